"""What the native kernels of a SphereConv cost by themselves, against the convolution they surround.

    python benchmarks/passes.py [--threads 2] [--repeats 40]

Medians in milliseconds for one 3×3 layer in rows (channels last): forward with the patch norms, backward with the
transposed window sums, the correction of the input's gradient, and unit weights with their gradient.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from spherenet.kernels import native
from spherenet.kernels.interface import Affine, Angle
from spherenet.ops.geometry import Geometry

SIZES = ((128, 64, 32), (128, 96, 16), (128, 128, 8), (64, 16, 16), (64, 24, 8), (64, 32, 4))
ANGLES = (Angle("cosine"), Angle("linear"), Angle("sigmoid", 0.3))
GEOMETRY = Geometry((1, 1), (1, 1), (1, 1), 1)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    def median(run: Callable[[], object]) -> float:
        seconds = []
        for index in range(arguments.repeats + 3):
            begin = time.perf_counter()
            run()
            if index >= 3:
                seconds.append(time.perf_counter() - begin)
        return 1e3 * statistics.median(seconds)

    print(
        f"{arguments.threads} threads, {native.instruction_set()}, torch {torch.__version__}, n = {arguments.repeats}"
    )
    with torch.no_grad():
        for size in SIZES:
            measure(median, *size)


def measure(median: Callable[[Callable[[], object]], float], batch: int, channels: int, side: int) -> None:
    """Print the times of one layer."""
    x = torch.randn(batch, channels, side, side).to(memory_format=torch.channels_last)
    weight = torch.randn(channels, channels, 3, 3).to(memory_format=torch.channels_last)
    unit, scale = native.unit_weight(weight, 1e-4, torch.float32)
    product, grad, where = F.conv2d(x, unit, padding=1), torch.randn_like(x), ((3, 3), GEOMETRY)
    out, norms, _ = native.forward(product, x, *where, 1e-4, ANGLES[0], Affine(), False)

    def backward(angle: Angle) -> Tensor | None:
        return native.backward(grad, out, False, norms, x, *where, angle, Affine(), True, False, False)[1]

    spread = backward(ANGLES[0])
    assert spread is not None
    print(f"\n{channels} to {channels} channels, {side}x{side}, batch {batch}")
    print(f"  convolution      {median(lambda: F.conv2d(x, unit, padding=1)):8.3f}")
    for angle in ANGLES:
        forward = median(partial(native.forward, product, x, *where, 1e-4, angle, Affine(), False))
        print(f"  {angle.name:8} forward {forward:8.3f}   backward {median(partial(backward, angle)):8.3f}")
    print(f"  correction       {median(lambda: native.correct(grad, x, spread, 1)):8.3f}")
    weights = median(lambda: native.unit_weight(weight, 1e-4, torch.float32))
    gradient = median(lambda: native.unit_weight_backward(weight, unit, scale, torch.float32))
    print(f"  unit weights     {weights:8.3f}   gradient {gradient:8.3f}")


if __name__ == "__main__":
    main()
