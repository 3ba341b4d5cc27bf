"""Where a training step of cnn-9 spends its time.

    python benchmarks/profile_step.py [OPERATOR] [--steps 4]

Without an operator it is the CNN twin. Self times of torch.profiler, mean milliseconds per step; what the native
kernels take is part of SphereConvFunction.
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
    begin = time.perf_counter()
    step()
    print(f"first step {time.perf_counter() - begin:.2f} s")
    step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(arguments.steps):
            step()
    rows = [(event.self_cpu_time_total / 1e3 / arguments.steps, event.key) for event in profiler.key_averages()]
    print(f"{sum(ms for ms, _ in rows):8.1f} ms in all, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for ms, name in sorted(rows, reverse=True)[:18]:
        print(f"{ms:8.1f} ms  {name[:70]}")


if __name__ == "__main__":
    main()
