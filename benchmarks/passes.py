"""Time of the native kernels of a SphereConv, relative to the convolution inside it.

    python benchmarks/passes.py [--threads 2] [--repeats 40] [--kernel 1]

Medians in milliseconds for one layer in channels-last format with kernels of 3×3, 1×1 or, with `--kernel 0`, for a
fully connected layer: forward with patch norms, backward with transposed window sums, correction of the input gradient,
and unit weights with their gradient. The share of the forward pass in the whole layer, as it is called in inference,
bounds what fusing it into the matrix product could save.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from spherenet.angles import CosineAngle, LinearAngle, SigmoidAngle
from spherenet.kernels import library
from spherenet.kernels.backends import Pass, Saved
from spherenet.kernels.dispatch import sphere_layer
from spherenet.kernels.sphere_conv import native
from spherenet.ops.geometry import Geometry, convolve, convolve_backward
from spherenet.ops.operation import Operation, Parameters

SIZES = ((128, 64, 32), (128, 96, 16), (128, 128, 8), (64, 16, 16), (64, 24, 8), (64, 32, 4))
ANGLES = (CosineAngle(), LinearAngle(), SigmoidAngle(0.3))
LINEAR = ((1, 128, 0), (1, 512, 0), (16, 128, 0), (128, 128, 0), (128, 512, 0), (4096, 256, 0), (4096, 768, 0))
POINTWISE = ((1, 64, 8), (1, 64, 32), (1, 256, 14), (16, 64, 16), (128, 64, 32), (128, 256, 8), (16, 256, 14))
SHAPES = {0: LINEAR, 1: POINTWISE, 3: SIZES}
"""Batch, channels and side of the maps by side of the kernels."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--kernel", type=int, choices=SHAPES, default=3)
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
        for shape in SHAPES[arguments.kernel]:
            measure(median, arguments.kernel, *shape)


def measure(median: Callable[[Callable[[], object]], float], kernel: int, batch: int, channels: int, side: int) -> None:
    """Print the times of one layer."""
    geometry = Geometry((kernel,) * 2, (1, 1), (kernel // 2,) * 2, (1, 1)) if kernel else Geometry()
    x, weight = torch.randn(batch, channels, *spatial_size(kernel, side)), torch.randn(channels, channels)
    if kernel:
        weight = torch.randn(channels, channels, kernel, kernel).to(memory_format=torch.channels_last)
        x = x.to(memory_format=torch.channels_last)
    operations = [Operation(angle, geometry, 1e-4) for angle in ANGLES]
    unit, scale = native.unit_weight(weight, operations[0], torch.float32)
    product, grad = convolve(x, unit, geometry), torch.randn_like(x)
    saved = Saved(unit, scale, *native.apply(product, x, operations[0], Parameters(), False)[1:], is_output=True)

    def backward(operation: Operation) -> Any:
        return native.differentiate(grad, x, Pass(operation, Parameters(operation.angle.k), saved, (True,)))[1]

    spread = backward(operations[0])
    print(f"\n{channels} to {channels} channels, " + (f"{side}x{side}, " if kernel else "") + f"batch {batch}")
    convolution = median(lambda: convolve(x, unit, geometry))
    gradients = median(lambda: convolve_backward(grad, x, unit, geometry, True, True))
    print(f"  convolution      {convolution:8.3f}   gradients {gradients:7.3f}")
    for operation in operations:
        forward = median(partial(native.apply, product, x, operation, Parameters(operation.angle.k), False))
        gradient = median(partial(backward, operation))
        layer = median(partial(sphere_layer, x, weight, operation, Parameters()))
        print(
            f"  {operation.angle.name:8} forward {forward:8.3f} ({forward / layer:4.0%})   backward {gradient:8.3f}   "
            f"layer {layer:8.3f}"
        )
    print(f"  correction       {median(lambda: native.correct(grad, x, spread, 1)):8.3f}")
    weights = median(lambda: native.unit_weight(weight, operations[0], torch.float32))
    gradient = median(lambda: native.unit_weight_backward(weight, saved, operations[0], torch.float32))
    print(f"  unit weights     {weights:8.3f}   gradient {gradient:8.3f}")


def spatial_size(kernel: int, side: int) -> tuple[int, ...]:
    """Return the spatial size of the maps, none for a fully connected layer."""
    return (side, side) if kernel else ()


if __name__ == "__main__":
    main()
