"""Time and memory of AngularHead and a loss with many classes, relative to plain softmax in torch.

    python benchmarks/head_and_loss.py [--features 256] [--classes 100000] [--batch 512] [--repeats 9] [--threads 2]

One step is forward and backward of head and loss, including gradients of features and class weights. The plain step is
`F.cross_entropy(F.linear(features, weight), labels)`. All alternate in one process. The script prints medians in
milliseconds with quartiles, and the median ratio to the plain step of the same round. Memory is the peak above weights
and features, measured in a separate process per loss (Linux).

Bounds: ratio of time 1.25 for the cosine forms and 1.6 for linear and sigmoid, ratio of memory 1.5.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from spherenet.layers.head import AngularHead
from spherenet.losses import (
    AngularLoss,
    ArcFaceLoss,
    ASoftmaxLoss,
    CosFaceLoss,
    GASoftmaxLoss,
    SoftmaxLoss,
    SSoftmaxLoss,
    WSoftmaxLoss,
)

PLAIN = "F.cross_entropy"
LOSSES: dict[str, tuple[Callable[[], AngularLoss], float]] = {
    "softmax": (SoftmaxLoss, 1.25),
    "w-cosine": (WSoftmaxLoss, 1.25),
    "a": (ASoftmaxLoss, 1.25),
    "s-cosine": (SSoftmaxLoss, 1.25),
    "cosface": (CosFaceLoss, 1.25),
    "arcface": (ArcFaceLoss, 1.25),
    "w-linear": (lambda: WSoftmaxLoss("linear"), 1.6),
    "ga-linear": (GASoftmaxLoss, 1.6),
    "w-sigmoid": (lambda: WSoftmaxLoss("sigmoid"), 1.6),
    "ga-sigmoid": (lambda: GASoftmaxLoss("sigmoid"), 1.6),
}
MEMORY_BOUND = 1.5


class Problem:
    """A head, a batch and one training step per loss."""

    def __init__(self, features: int, classes: int, batch: int) -> None:
        torch.manual_seed(0)
        self.head = AngularHead(features, classes)
        # Unit variance as after a normalized layer; logits of plain softmax then have a standard deviation of 1.4.
        self.features = torch.randn(batch, features, requires_grad=True)
        self.labels = torch.randint(classes, (batch,))
        self.losses = {name: make() for name, (make, _) in LOSSES.items()}

    def step(self, name: str) -> None:
        """Run forward and backward; `forget` removes the gradients, outside the timed section."""
        self._loss(name).backward()

    def forget(self) -> None:
        """Remove the gradients."""
        self.features.grad = self.head.weight.grad = None

    def _loss(self, name: str) -> Tensor:
        if name == PLAIN:
            return F.cross_entropy(F.linear(self.features, self.head.weight), self.labels)
        loss: Tensor = self.losses[name](self.head(self.features), self.labels)
        return loss


def resident(field: str) -> float:
    """Return a memory field of this process in MB: VmRSS (now) or VmHWM (peak)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def peak_memory(name: str, sizes: tuple[int, int, int], threads: int) -> float:
    """Return the peak memory in MB of the second step of a process, above weights and features."""
    torch.set_num_threads(threads)
    problem = Problem(*sizes)
    problem.step(name)  # one-time allocations of libraries
    problem.forget()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    problem.step(name)
    return resident("VmHWM") - before


def times(problem: Problem, names: list[str], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of steps, alternating between losses."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_index in range(repeats + 1):
        for name in names:
            start = time.perf_counter()
            problem.step(name)
            elapsed = time.perf_counter() - start
            problem.forget()
            if round_index > 0:  # the first round is warm-up
                seconds[name].append(elapsed)
    return seconds


def main() -> None:
    """Print one line per loss."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--features", type=int, default=256)
    parser.add_argument("--classes", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=LOSSES, default=list(LOSSES))
    arguments = parser.parse_args()
    sizes = (arguments.features, arguments.classes, arguments.batch)
    torch.set_num_threads(arguments.threads)
    names = [PLAIN, *arguments.only]

    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        memory = {name: pool.apply(peak_memory, (name, sizes, arguments.threads)) for name in names}
    seconds = times(Problem(*sizes), names, arguments.repeats)

    print(f"{sizes[0]} features x {sizes[1]} classes, batch {sizes[2]}, {arguments.threads} threads, "
          f"{arguments.repeats} repeats, torch {torch.__version__}")  # fmt: skip
    print(f"{'loss':16s} {'ms':>7s} {'quartiles':>16s} {'ratio':>6s} {'bound':>6s} {'MB':>7s} {'ratio':>6s}")
    for name in names:
        low, middle, high = (1e3 * value for value in statistics.quantiles(seconds[name], n=4))
        ratio = statistics.median(a / b for a, b in zip(seconds[name], seconds[PLAIN], strict=True))
        bound = 1.0 if name == PLAIN else LOSSES[name][1]
        memory_ratio = memory[name] / memory[PLAIN]
        verdict = "" if ratio <= bound and memory_ratio <= MEMORY_BOUND else "  over"
        print(f"{name:16s} {middle:7.0f} {low:7.0f} to {high:5.0f} {ratio:6.2f} {bound:6.2f} {memory[name]:7.0f} "
              f"{memory_ratio:6.2f}{verdict}")  # fmt: skip


if __name__ == "__main__":
    main()
