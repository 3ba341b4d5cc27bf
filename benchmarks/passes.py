"""Time of the native kernels of a SphereConv, relative to the convolution inside it.

    python benchmarks/passes.py [--threads 2] [--repeats 40]

Medians in milliseconds for one 3×3 layer in channels-last format: forward with patch norms, backward with transposed
window sums, correction of the input gradient, and unit weights with their gradient.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from spherenet.angles import CosineAngle, LinearAngle, SigmoidAngle
from spherenet.kernels import library
from spherenet.kernels.backends import Saved
from spherenet.kernels.sphere_conv import native
from spherenet.ops.geometry import Geometry
from spherenet.ops.operation import Operation, Parameters

SIZES = ((128, 64, 32), (128, 96, 16), (128, 128, 8), (64, 16, 16), (64, 24, 8), (64, 32, 4))
ANGLES = (CosineAngle(), LinearAngle(), SigmoidAngle(0.3))
GEOMETRY = Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1)


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
            start = time.perf_counter()
            run()
            if index >= 3:
                seconds.append(time.perf_counter() - start)
        return 1e3 * statistics.median(seconds)

    print(
        f"{arguments.threads} threads, {library.instruction_set()}, torch {torch.__version__}, n = {arguments.repeats}"
    )
    with torch.no_grad():
        for size in SIZES:
            measure(median, *size)


def measure(median: Callable[[Callable[[], object]], float], batch: int, channels: int, side: int) -> None:
    """Print the times of one layer."""
    x = torch.randn(batch, channels, side, side).to(memory_format=torch.channels_last)
    weight = torch.randn(channels, channels, 3, 3).to(memory_format=torch.channels_last)
    operations = [Operation(angle, GEOMETRY, 1e-4) for angle in ANGLES]
    unit, scale = native.unit_weight(weight, operations[0], torch.float32)
    product, grad = F.conv2d(x, unit, padding=1), torch.randn_like(x)
    saved = Saved(unit, scale, *native.apply(product, x, operations[0], Parameters(), False)[1:], is_output=True)

    def backward(operation: Operation) -> Any:
        return native.differentiate(grad, x, operation, Parameters(operation.angle.k), saved, (True,))[1]

    spread = backward(operations[0])
    print(f"\n{channels} to {channels} channels, {side}x{side}, batch {batch}")
    print(f"  convolution      {median(lambda: F.conv2d(x, unit, padding=1)):8.3f}")
    for operation in operations:
        forward = median(partial(native.apply, product, x, operation, Parameters(operation.angle.k), False))
        gradient = median(partial(backward, operation))
        print(f"  {operation.angle.name:8} forward {forward:8.3f}   backward {gradient:8.3f}")
    print(f"  correction       {median(lambda: native.correct(grad, x, spread, 1)):8.3f}")
    weights = median(lambda: native.unit_weight(weight, operations[0], torch.float32))
    gradient = median(lambda: native.unit_weight_backward(weight, saved, operations[0], torch.float32))
    print(f"  unit weights     {weights:8.3f}   gradient {gradient:8.3f}")


if __name__ == "__main__":
    main()
