"""Time of the orthogonality penalty (Eq. 4) of a deep network: batched over layers or in a loop.

    python benchmarks/orthogonality.py [--widths 64 96 128] [--depth 23] [--threads 2] [--channels-last]

The network is a stack of 3 × depth SphereConv2d layers (3×3, as in cnn-69). The loop is the straightforward
implementation: flatten, `w @ w.T`, subtract the identity, square, sum. Both alternate in one process. The script prints
medians with quartiles in milliseconds, for forward and for forward with backward.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from spherenet.layers import SphereConv2d
from spherenet.regularizers import hyperspherical_energy, orthogonality, sphere_layers


def conv_stack(widths: list[int], depth: int) -> nn.Sequential:
    """Return the convolutions of a plain network: `depth` of each width."""
    outputs = [width for width in widths for _ in range(depth)]
    return nn.Sequential(*(SphereConv2d(i, o, 3, padding=1) for i, o in zip([3, *outputs], outputs, strict=False)))


def loop(model: nn.Sequential, form: str) -> Tensor:
    """Return the same sum, computed layer by layer."""
    total = torch.zeros(())
    for layer in model:
        kernels = layer.weight.flatten(1)
        if form == "normalized":
            kernels = kernels / kernels.norm(dim=1, keepdim=True)
        total = total + (kernels @ kernels.T - torch.eye(len(kernels))).square().sum()
    return total


def time_once(term: Callable[[], Tensor], model: nn.Module) -> tuple[float, float]:
    """Return the seconds of forward, and of forward and backward."""
    model.zero_grad()
    start = time.perf_counter()
    value = term()
    middle = time.perf_counter()
    value.backward()
    return middle - start, time.perf_counter() - start


def describe(seconds: list[float]) -> str:
    """Return median and quartiles in milliseconds as text."""
    low, middle, high = (1e3 * value for value in statistics.quantiles(seconds, n=4))
    return f"{middle:7.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    """Print one line per implementation."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--widths", type=int, nargs=3, default=[64, 96, 128])
    parser.add_argument("--depth", type=int, default=23, help="layers of each width")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--channels-last", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = conv_stack(options.widths, options.depth)
    if options.channels_last:
        model = model.to(memory_format=torch.channels_last)
    terms: dict[str, Callable[[], Tensor]] = {
        "raw, loop": lambda: loop(model, "raw"),
        "raw, orthogonality()": lambda: orthogonality(model),
        "normalized, loop": lambda: loop(model, "normalized"),
        "normalized, orthogonality()": lambda: orthogonality(model, "normalized"),
        "hyperspherical_energy()": lambda: hyperspherical_energy(model),
    }
    timings: dict[str, list[tuple[float, float]]] = {name: [] for name in terms}
    search_times = []
    for repeat in range(options.repeats + 2):
        start = time.perf_counter()
        sphere_layers(model)
        search_times.append(time.perf_counter() - start)
        for name, term in terms.items():
            seconds = time_once(term, model)
            if repeat >= 2:  # the first two are warm-up
                timings[name].append(seconds)
    print(
        f"{3 * options.depth} layers of widths {options.widths}, {options.threads} threads, torch {torch.__version__}"
    )
    print(f"{'milliseconds':28} {'forward':26} forward and backward")
    for name, pairs in timings.items():
        forward, both = zip(*pairs, strict=True)
        print(f"{name:28} {describe(list(forward)):26} {describe(list(both))}")
    print(f"search for sphere layers     {describe(search_times[2:])}")


if __name__ == "__main__":
    main()
