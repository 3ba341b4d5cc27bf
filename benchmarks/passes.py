"""What the pieces of a SphereConv cost by themselves: window sums, passes, fresh memory, a call.

    python benchmarks/passes.py [--threads 2] [--repeats 40]

Medians in milliseconds; buffers are used again unless said otherwise.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from spherenet.kernels.window import spread, window_sum
from torch import nn
from torch.nn import functional as F

import spherenet as sn
from spherenet.kernels import passes


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    def show(name: str, run: Callable[[], object]) -> None:
        seconds = []
        for index in range(arguments.repeats + 3):
            begin = time.perf_counter()
            run()
            if index >= 3:
                seconds.append(time.perf_counter() - begin)
        print(f"{name:44} {1e3 * statistics.median(seconds):8.3f}")

    print(f"{arguments.threads} threads, torch {torch.__version__}, n = {arguments.repeats}, medians in ms")
    maps, box, geometry = torch.rand(128, 1, 32, 32), torch.ones(1, 1, 3, 3), ((3, 3), (1, 1), (1, 1), (1, 1))
    backward = torch.ops.aten.convolution_backward
    with torch.no_grad():
        show("window sum of 128 maps 32x32, shifted views", lambda: window_sum(maps, *geometry))
        show("  as a convolution with ones", lambda: F.conv2d(maps, box, padding=1))
        show("its transpose, shifted views", lambda: spread(maps, maps.shape, *geometry))
        show(
            "  as that convolution's backward",
            lambda: backward(maps, maps, box, None, *geometry[1:], False, (0, 0), 1, (True, False, False)),
        )
        large = torch.randn(131072, 64)
        again = torch.empty_like(large)
        show("copy of 32 MB into memory in use", lambda: again.copy_(large))
        show("copy of 32 MB into fresh memory", lambda: large.clone())
        rows, grad, into = (torch.rand(32768, 64) * 2 - 1 for _ in range(3))
        norm, shape = torch.ones(32768, 1), passes.steepness(torch.full((64,), 0.3))
        show("sum of squares, 8 MB", lambda: passes.sum_of_squares(rows, -1))
        for angle in ("cosine", "linear", "sigmoid"):
            steep = shape if angle == "sigmoid" else None
            show(f"forward {angle}, 8 MB", lambda: passes.forward(angle, rows, norm, None, steep))  # noqa: B023
            show(
                f"backward {angle}, 8 MB",
                lambda: passes.backward(angle, grad, rows, False, norm, into, -1, steep),  # noqa: B023
            )
        images = [t.view(32, 1024, 64) for t in (grad, rows)]
        show("gradient of k, 8 MB", lambda: passes.gradient_of_k(*images, False, 1, shape))
        show("correction, 8 MB", lambda: passes.correct(into, rows, norm))
    small = torch.randn(4, 16, 8, 8, requires_grad=True)
    for layer in (nn.Conv2d(16, 16, 3, bias=False), sn.SphereConv2d(16, 16, 3)):
        name = f"a call on 4 maps 8x8, both ways, {type(layer).__name__}"
        show(name, lambda: layer(small).sum().backward())  # noqa: B023


if __name__ == "__main__":
    main()
