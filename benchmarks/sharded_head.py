"""Memory and time of training with many classes: data parallel, sharded head, and sampled sharded head.

    python benchmarks/sharded_head.py [--classes 1000000] [--features 64] [--batch 256] [--rounds 9] [--output FILE]

Two gloo processes with one thread each. One step is forward, backward and Adam of a head with a CosFace loss, on
features that require a gradient. In data parallel training DDP sums the gradients of all class weights. The strategies
alternate, one step each per round, and ratios compare steps of the same round. Memory is the peak of a process during
the second step, weights and optimizer included, measured in separate processes (Linux). Prints a table, and with
--output writes JSON.

Bounds: a sharded head takes at most 0.6 of the memory and 0.8 of the time of data parallel training.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sharding_costs import Workload, costs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import spherenet as sn
from spherenet._util.atomic import write_json

WORLD = 2
DATA_PARALLEL, SHARDED, SAMPLED = "data parallel", "sharded head", "sharded head, sampled"
SAMPLE_RATE = 0.1
BOUNDS = {DATA_PARALLEL: (1.0, 1.0), SHARDED: (0.6, 0.8), SAMPLED: (0.6, 0.8)}


class Head(nn.Module):
    """Class weights and loss in one module, for DDP."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.head, self.criterion = sn.AngularHead(features, classes), sn.CosFaceLoss()

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        loss: torch.Tensor = self.criterion(self.head(features), labels)
        return loss


class Problem:
    """One strategy in one of the processes."""

    def __init__(self, strategy: str, classes: int, features: int, batch: int) -> None:
        torch.manual_seed(0)
        module = Head(features, classes)
        if strategy != DATA_PARALLEL:
            mesh = init_device_mesh("cpu", (WORLD,))
            sn.shard_head(module, mesh, sample_rate=SAMPLE_RATE if strategy == SAMPLED else 1.0)
        self.optimizer = torch.optim.Adam(module.parameters(), lr=1e-3, fused=True)
        self.forward = nn.parallel.DistributedDataParallel(module) if strategy == DATA_PARALLEL else module
        torch.manual_seed(dist.get_rank())
        self.features = torch.randn(batch // WORLD, features, requires_grad=True)
        self.labels = torch.randint(classes, (batch // WORLD,))

    def step(self) -> None:
        """Make one optimizer step."""
        self.forward(self.features, self.labels).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.features.grad = None


def resident(field: str) -> float:
    """Return a memory field of this process in MB: VmRSS (now) or VmHWM (peak)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def measure(rank: int, store: str, sizes: tuple[int, int, int], strategies: list[str], rounds: int, queue: Any) -> None:
    """Put the peak memory of one strategy (rounds = 0), or the seconds of all, in each process, into a queue."""
    torch.set_num_threads(1)
    timeout = timedelta(minutes=10)
    dist.init_process_group("gloo", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD, timeout=timeout)
    before = resident("VmRSS")
    problems = {strategy: Problem(strategy, *sizes) for strategy in strategies}
    if rounds == 0:
        (problem,) = problems.values()
        problem.step()  # one-time allocations of libraries, and the state of the optimizer
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        problem.step()
        queue.put(resident("VmHWM") - before)
    else:
        seconds: dict[str, list[float]] = {strategy: [] for strategy in strategies}
        for round_index in range(rounds + 1):
            for strategy, problem in problems.items():
                dist.barrier()
                start = time.perf_counter()
                problem.step()
                if round_index > 0:  # the first round is warm-up
                    seconds[strategy].append(time.perf_counter() - start)
        if rank == 0:
            queue.put(seconds)
    dist.barrier()
    dist.destroy_process_group()


def in_processes(sizes: tuple[int, int, int], strategies: list[str], rounds: int) -> list[Any]:
    """Return what the processes put into their queue."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"{folder}/store", sizes, strategies, rounds, queue)
        processes = [context.Process(target=measure, args=(rank, *arguments)) for rank in range(WORLD)]
        for process in processes:
            process.start()
        results = [queue.get(timeout=1800) for _ in range(WORLD if rounds == 0 else 1)]
        for process in processes:
            process.join()
    return results


def main() -> None:
    """Print one line per strategy."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--classes", type=int, default=1_000_000)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--batch", type=int, default=256, help="rows of both processes together")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    sizes = (arguments.classes, arguments.features, arguments.batch)
    memory = {strategy: max(in_processes(sizes, [strategy], 0)) for strategy in BOUNDS}
    (seconds,) = in_processes(sizes, list(BOUNDS), arguments.rounds)
    estimates = [
        costs(Workload(*sizes[:2], WORLD, sizes[2], sample_rate=rate, device="cpu")) for rate in (1.0, SAMPLE_RATE)
    ]
    estimated = {DATA_PARALLEL: estimates[0][0], SHARDED: estimates[0][2], SAMPLED: estimates[1][2]}
    rows = []
    for strategy, (memory_bound, time_bound) in BOUNDS.items():
        pairs = zip(seconds[strategy], seconds[DATA_PARALLEL], strict=True)
        rows.append(
            {
                "strategy": strategy,
                "megabytes": memory[strategy],
                "memory_ratio": memory[strategy] / memory[DATA_PARALLEL],
                "milliseconds": [1e3 * value for value in statistics.quantiles(seconds[strategy], n=4)],
                "time_ratio": statistics.quantiles([own / base for own, base in pairs], n=4),
                "bounds": [memory_bound, time_bound],
                "estimated_megabytes": estimated[strategy].total_memory / 1e6,
                "estimated_sent_megabytes": estimated[strategy].total_sent / 1e6,
            }
        )
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    names = dict(zip(("classes", "features", "batch"), sizes, strict=True))
    results = {**names, "processes": WORLD, "threads": 1, "rounds": arguments.rounds, **versions, "rows": rows}
    print(json.dumps({name: value for name, value in results.items() if name != "rows"}))
    print(f"{'strategy':22s} {'MB':>7s} {'ratio':>6s} {'ms':>7s} {'quartiles':>16s} {'ratio':>6s} {'quartiles':>14s}")
    for row in rows:
        (low, middle, high), ratio = row["milliseconds"], row["time_ratio"]
        within = row["memory_ratio"] <= row["bounds"][0] and ratio[1] <= row["bounds"][1]
        print(f"{row['strategy']:22s} {row['megabytes']:7.0f} {row['memory_ratio']:6.2f} {middle:7.0f} "
              f"{low:7.0f} to {high:5.0f} {ratio[1]:6.2f} {ratio[0]:5.2f} to {ratio[2]:.2f}"
              f"{'' if within else '  over'}")  # fmt: skip
    if arguments.output is not None:
        write_json(arguments.output, results)


if __name__ == "__main__":
    main()
