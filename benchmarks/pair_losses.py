"""Memory and time of the losses on pairs at 32,768 × 32,768 similarities.

Each loss runs forward and backward once in a process of its own, because the largest resident memory of a process never
falls. The script prints the memory above that of the same loss with 64 samples, features included, and the seconds. All
similarities alone would take 4.3 GB in float32, their gradients as much again. NT-Xent compares both views of half as
many samples. Takes 2 CPU minutes per loss.

    python benchmarks/pair_losses.py
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

import spherenet as sn

LOSSES: dict[str, Callable[[], torch.nn.Module]] = {
    "SupCon": sn.SupConLoss,
    "InfoNCE": sn.InfoNCELoss,
    "NT-Xent": lambda: sn.InfoNCELoss(0.1, "all"),
    "SigLIP": sn.SigLIPLoss,
    "prototypical": sn.PrototypicalLoss,
    "alignment and uniformity": sn.AlignmentUniformityLoss,
}
SUPERVISED = ("SupCon", "prototypical")


def largest_memory() -> float:
    """Return the largest resident memory of this process in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def measure(arguments: tuple[str, int, int]) -> tuple[float, float]:
    """Return the memory in MB that a loss needs forward and backward, and its seconds."""
    name, samples, dim = arguments
    loss = LOSSES[name]()

    def run(count: int) -> None:
        torch.manual_seed(0)
        features = torch.randn(count, dim, requires_grad=True)
        second: Tensor = torch.arange(count) // 2 if name in SUPERVISED else torch.randn(count, dim, requires_grad=True)
        loss(features, second).backward()

    run(64)
    before, start = largest_memory(), time.perf_counter()
    run(samples // 2 if name == "NT-Xent" else samples)
    return largest_memory() - before, time.perf_counter() - start


def main() -> None:
    """Print one row per loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=32_768)
    parser.add_argument("--dim", type=int, default=128, help="size of the features")
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES))
    arguments = parser.parse_args()
    threads = torch.get_num_threads()
    print(f"{arguments.samples:,} samples of {arguments.dim} features, {threads} threads, torch {torch.__version__}")
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        jobs = [(name, arguments.samples, arguments.dim) for name in arguments.losses]
        for (name, *_), (megabytes, seconds) in zip(jobs, pool.imap(measure, jobs), strict=True):
            print(f"{name:25} {megabytes:6.0f} MB {seconds:7.1f} s", flush=True)


if __name__ == "__main__":
    main()
