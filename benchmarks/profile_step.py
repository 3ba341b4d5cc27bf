"""Profile of a training step of cnn-9.

    python benchmarks/profile_step.py [OPERATOR] [--steps 4]

Without OPERATOR, the CNN twin is profiled. The script prints self times of torch.profiler in milliseconds per step. The
time of native kernels is part of SphereConvFunction.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch.profiler import ProfilerActivity, profile

from spherenet.bench.networks import Contestant, training_or_inference


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operator", nargs="?")
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    contestant = Contestant(str(arguments.operator), {"operator": arguments.operator})
    step = training_or_inference("cnn-9", contestant, mode="train", batch_size=128, device="cpu")
    start = time.perf_counter()
    step()
    print(f"first step {time.perf_counter() - start:.2f} s")
    step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(arguments.steps):
            step()
    rows = [(event.self_cpu_time_total / 1e3 / arguments.steps, event.key) for event in profiler.key_averages()]
    print(f"{sum(ms for ms, _ in rows):8.1f} ms in total, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for ms, name in sorted(rows, reverse=True)[:18]:
        print(f"{ms:8.1f} ms  {name[:70]}")


if __name__ == "__main__":
    main()
