"""Check the choice between Winograd's algorithm and torch's: never slower than torch by more than 3 %.

Plain 3×3 convolutions (`FastConv2d`, the engine without sphere passes) alternate with `nn.Conv2d` in one process,
forward and forward + backward. A shape violates the rule if the median ratio of neighboring runs exceeds the limit, and
still does when it is measured again with four times the rounds. `--missed` also lists the shapes that torch serves
although the engine takes less than 0.97 of its time. Run it on a machine that does nothing else.

    python benchmarks/engine_choice.py --threads 2          # about an hour
    python benchmarks/engine_choice.py --threads 2 --quick  # about four minutes
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from itertools import product
from statistics import quantiles

import torch
from torch import Tensor, nn

import spherenet as sn
from spherenet.kernels.sphere_conv.winograd import plan_for
from spherenet.ops.geometry import Geometry

LIMIT, GAIN = 1.03, 0.97
CHANNELS, MAPS, BATCHES = (
    (16, 24, 32, 48, 64, 96, 128, 192, 256),
    (4, 6, 8, 12, 16, 24, 32, 48, 64),
    (1, 4, 16, 64, 128),
)
QUICK = (16, 64, 256), (4, 8, 16, 32, 64), (1, 16, 128)
LARGEST = 128 * 64 * 64 * 64
"""Elements of the largest map: 134 MB in float32."""

GEOMETRY = Geometry((3, 3), (1, 1), (1, 1), (1, 1))
Shape = tuple[int, int, int, int]


def shapes(quick: bool) -> Iterator[Shape]:
    """Yield batch, input channels, filters and map size; filters differ from channels in a third of the shapes."""
    channels, maps, batches = QUICK if quick else (CHANNELS, MAPS, BATCHES)
    for index, (width, size, batch) in enumerate(product(channels, maps, batches)):
        filters = width if index % 3 else 3 * width // 2
        if batch * filters * size * size <= LARGEST:
            yield batch, width, filters, size


def runs_of(shape: Shape, backward: bool, layout: torch.memory_format) -> dict[str, Callable[[], object]]:
    """Return one pass of torch's layer and one of ours as functions without arguments."""
    batch, channels, filters, size = shape
    x = torch.randn(batch, channels, size, size).contiguous(memory_format=layout).requires_grad_(backward)
    plain = nn.Conv2d(channels, filters, 3, padding=1, bias=False).to(memory_format=layout)
    fast = sn.FastConv2d(channels, filters, 3, padding=1, bias=False).to(memory_format=layout)
    fast.load_state_dict(plain.state_dict())
    grad = torch.randn(batch, filters, size, size).contiguous(memory_format=layout)

    def run(layer: nn.Module) -> Tensor | None:
        if backward:
            torch.autograd.backward(layer(x), grad)
            return None
        with torch.inference_mode():
            out: Tensor = layer(x)
            return out

    return {"torch": lambda: run(plain), "ours": lambda: run(fast)}


def ratios(runs: dict[str, Callable[[], object]], seconds: float) -> tuple[float, float, float]:
    """Return quartiles of the paired time ratios ours/torch of at least seven rounds."""
    for run in runs.values():
        run()
    measured: list[float] = []
    end = time.perf_counter() + seconds
    while len(measured) < 7 or time.perf_counter() < end:
        names = ("torch", "ours") if len(measured) % 2 else ("ours", "torch")
        spent = {}
        for name in names:
            start = time.perf_counter()
            runs[name]()
            spent[name] = time.perf_counter() - start
        measured.append(spent["ours"] / spent["torch"])
    lower, median, upper = quantiles(measured, n=4)
    return lower, median, upper


def is_served(shape: Shape, layout: torch.memory_format) -> bool:
    """Return whether the engine serves a shape."""
    batch, channels, filters, size = shape
    x = torch.empty(batch, channels, size, size).contiguous(memory_format=layout)
    return plan_for(x, filters, GEOMETRY) is not None


def main() -> None:
    """Measure all shapes and print the violations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="45 shapes instead of 400, channels-last only")
    parser.add_argument("--missed", action="store_true", help="list the shapes at which the engine would be faster too")
    parser.add_argument("--seconds", type=float, default=0.4, help="time of each measurement")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    layouts = [torch.channels_last] if arguments.quick else [torch.channels_last, torch.contiguous_format]
    violations, missed, count = 0, 0, 0
    for layout, shape, backward in product(layouts, shapes(arguments.quick), (False, True)):
        served = is_served(shape, layout)
        if not served and not arguments.missed:
            continue  # then both layers make the same call
        count += 1
        with sn.convolution("auto" if served else "winograd"):
            runs = runs_of(shape, backward, layout)
            lower, median, upper = ratios(runs, arguments.seconds)
            if (served and median > LIMIT) or (not served and median < GAIN):
                lower, median, upper = ratios(runs, 4 * arguments.seconds)
        batch, channels, filters, size = shape
        label = f"{channels:3d} → {filters:3d}, {size:2d}×{size:<2d}, batch {batch:3d}, {str(layout)[6:]}, "
        label += f"{'forward + backward' if backward else 'forward'}: {median:.3f} ({lower:.3f} to {upper:.3f})"
        if served and median > LIMIT:
            violations += 1
            print(f"slower than torch: {label}", flush=True)
        elif not served and median < GAIN:
            missed += 1
            print(f"torch serves, engine faster: {label}", flush=True)
    print(f"{count} measurements with {arguments.threads} threads: {violations} above {LIMIT}", end="")
    print(f", {missed} gains below {GAIN} that the choice misses" if arguments.missed else "")


if __name__ == "__main__":
    main()
