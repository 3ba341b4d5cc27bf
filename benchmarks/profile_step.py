"""Profile of a training step of cnn-9.

    python benchmarks/profile_step.py [OPERATOR] [--steps 4] [--threads 2]
    python benchmarks/profile_step.py sigmoid --widths 16 24 32 --size 16 --batch-size 64 --steps 200 --calls

Without OPERATOR, the CNN twin is profiled, with `--engine` on the engine of sphere layers. The script prints self times
of torch.profiler in milliseconds per step; the time of native kernels is part of SphereConvFunction. With `--calls` it
prints the time inside the C++ library instead, function by function, and the median step with its quartiles.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from spherenet.bench.networks import Contestant, Spread, training_or_inference
from spherenet.kernels import library
from spherenet.kernels.sphere_conv import native, winograd


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operator", nargs="?")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--widths", type=int, nargs=3, default=(64, 96, 128))
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--engine", action="store_true", help="CNN twin on the engine of sphere layers")
    parser.add_argument("--calls", action="store_true", help="time inside the C++ library instead of torch's profile")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    options: dict[str, Any] = {"operator": arguments.operator, "widths": tuple(arguments.widths)}
    options |= {"input_size": (arguments.size, arguments.size)} | ({"engine": "winograd"} if arguments.engine else {})
    contestant = Contestant(str(arguments.operator), options)
    step = training_or_inference(
        "cnn-9", contestant, mode="train", batch_size=arguments.batch_size, device="cpu", precision="float32"
    )
    start = time.perf_counter()
    step()
    print(f"first step {time.perf_counter() - start:.2f} s, {arguments.threads} threads, torch {torch.__version__}")
    step()
    (print_calls if arguments.calls else print_profile)(step, arguments.steps)


def print_profile(step: Callable[[], object], steps: int) -> None:
    """Print the largest self times of torch's operations."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            step()
    rows = [(event.self_cpu_time_total / 1e3 / steps, event.key) for event in profiler.key_averages()]
    print(f"{sum(ms for ms, _ in rows):8.1f} ms in total")
    for ms, name in sorted(rows, reverse=True)[:18]:
        print(f"{ms:8.1f} ms  {name[:70]}")


def print_calls(step: Callable[[], object], steps: int) -> None:
    """Print the median time per step in each function of the C++ library."""
    spent: dict[str, float] = defaultdict(float)

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = function(*arguments)
            spent[name] += time.perf_counter() - start
            return result

        return call

    kernels = library.load()
    if kernels is None:
        raise SystemExit("The native kernels are not available.")
    functions = {name: timed(name, function) for name, function in kernels._asdict().items() if callable(function)}
    native.load = winograd.load = lambda: kernels._replace(**functions)
    measured: dict[str, list[float]] = defaultdict(list)
    for _ in range(10 + steps):
        spent.clear()
        start = time.perf_counter()
        step()
        spent["step"] = time.perf_counter() - start
        for name, seconds in spent.items():
            measured[name].append(1e3 * seconds)
    whole = Spread.of(measured.pop("step")[10:])
    print(f"{whole.median:8.3f} ms per step ({whole.lower:.3f} to {whole.upper:.3f}), n = {whole.n}")
    for name, milliseconds in sorted(measured.items(), key=lambda item: -median(item[1])):
        print(f"{median(milliseconds[10:]):8.3f} ms  {name}")


if __name__ == "__main__":
    main()
