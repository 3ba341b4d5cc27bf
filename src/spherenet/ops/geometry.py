"""Geometry of convolutions: sizes per dimension, torch.nn's padding modes, convolutions and sums over windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from spherenet.angles.elementary import is_exporting, is_jit_tracing

__all__ = [
    "Geometry",
    "convolve",
    "convolve_backward",
    "pad_input",
    "resolve_padding",
    "spread",
    "sum_slices",
    "window_sum",
]

_CONVOLUTION = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}
_TRANSPOSED: dict[int, Any] = {3: F.conv_transpose1d, 4: F.conv_transpose2d, 5: F.conv_transpose3d}


class Geometry(NamedTuple):
    """How a kernel moves over its input, one number per spatial dimension; all empty for a fully connected layer.

    As in torch.nn, padding is "same", "valid" or numbers. `resolve_padding` replaces it by numbers and the padding mode
    "zeros", which convolutions, window sums and kernels require.
    """

    kernel_size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    padding: str | tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    padding_mode: str = "zeros"
    transposed: bool = False
    """Whether this is a transposed convolution, whose weight is [C, O/groups, *kernel]."""

    output_padding: tuple[int, ...] = ()
    """Size added to one side of the output of a transposed convolution, per dimension."""

    @property
    def is_pointwise(self) -> bool:
        """Whether every window is one pixel and every pixel has one window."""
        sizes = self.kernel_size + self.stride
        return all(n == 1 for n in sizes) and not any(self.padding) and not any(self.output_padding)

    @property
    def skips_pixels(self) -> bool:
        """Whether every window is one pixel and some pixels have no window."""
        if self.transposed or any(self.padding):
            return False
        return all(n == 1 for n in self.kernel_size) and any(n > 1 for n in self.stride)

    @property
    def is_pooling(self) -> bool:
        """Whether torch's average pooling can sum the windows; its 3-dimensional backward is not deterministic."""
        if len(self.kernel_size) != 2 or self.transposed or isinstance(self.padding, str):
            return False
        if any(d != 1 for d in self.dilation):
            return False
        return all(2 * p <= k for k, p in zip(self.kernel_size, self.padding, strict=True))

    def filters(self, weight: Tensor) -> int:
        """Return the number of filters of a weight."""
        return weight.shape[1] * self.groups if self.transposed else weight.shape[0]


def _padding_amounts(geometry: Geometry) -> list[tuple[int, int]]:
    """Return how much is padded before and after each dimension; "same" puts the odd pixel after, as torch does."""
    kernel_size, _, padding, dilation = geometry[:4]
    if padding == "valid":
        return [(0, 0)] * len(kernel_size)
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel_size, dilation, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(int(amount), int(amount)) for amount in padding]


def pad_input(x: Tensor, geometry: Geometry) -> Tensor:
    """Return x with its spatial dimensions padded as torch.nn's convolutions pad them."""
    amounts = [n for pair in reversed(_padding_amounts(geometry)) for n in pair]
    if not any(amounts):
        return x
    return F.pad(x, amounts, mode="constant" if geometry.padding_mode == "zeros" else geometry.padding_mode)


def resolve_padding(x: Tensor, geometry: Geometry) -> tuple[Tensor, Geometry]:
    """Return an input and an equivalent geometry whose padding is given in numbers and consists of zeros.

    The input is padded here if the padding is not zeros, or if "same" is asymmetric (an even kernel).
    """
    if geometry.padding_mode == "zeros":
        if not isinstance(geometry.padding, str):
            return x, geometry
        amounts = _padding_amounts(geometry)
        if all(before == after for before, after in amounts):
            return x, geometry._replace(padding=tuple(before for before, _ in amounts))
    no_padding = (0,) * len(geometry.kernel_size)
    return pad_input(x, geometry), geometry._replace(padding=no_padding, padding_mode="zeros")


def convolve(x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """Return torch's convolution of x with a weight, or its product with a weight [out, in]."""
    if weight.dim() == 2:
        return F.linear(x, weight)
    _, stride, padding, dilation, groups, _, transposed, output_padding = geometry
    if transposed:
        out: Tensor = _TRANSPOSED[x.dim()](x, weight, None, stride, padding, output_padding, groups, dilation)
        return out
    if max(stride) > 1:
        if geometry.skips_pixels:
            x, stride = _used_pixels(x, stride), (1,) * len(stride)
        elif not is_jit_tracing() and x.shape[1] == 1:  # a traced shape has no value
            x, weight = _as_planes(x), _as_planes(weight)
    return _CONVOLUTION[x.dim()](x, weight, None, stride, padding, dilation, groups)


def _used_pixels(x: Tensor, stride: Sequence[int]) -> Tensor:
    """Return the pixels that a convolution with kernels of one pixel uses.

    Without the other pixels the stride is 1. oneDNN in torch 2.10 to 2.13 corrupts the memory in the gradient of the
    weight of strided 1×1 convolutions with few channels in channels-last format, with AVX-512.
    """
    used: tuple[Any, ...] = (..., *(slice(None, None, step) for step in stride))
    return x[used]


def _as_planes(x: Tensor) -> Tensor:
    """Return a view of a tensor with one channel that has the strides of a contiguous tensor.

    Such a tensor is contiguous and channels-last at once, and torch takes the format from its strides. In channels-last
    format torch 2.10 to 2.13 computes a convolution of one channel with a horizontal stride and an output of width 1
    from the wrong pixels (docs/errata.md).
    """
    return x.squeeze(1).unsqueeze(1)


def convolve_backward(
    grad: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, needs_x: bool, needs_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and weight of `convolve`, None for those that are not needed."""
    if weight.dim() == 2:
        return grad @ weight if needs_x else None, grad.t() @ x if needs_weight else None
    if not needs_x and not needs_weight:
        return None, None
    _, stride, padding, dilation, groups, _, transposed, output_padding = geometry
    shape, steps = x.shape, stride
    if max(stride) > 1 and geometry.skips_pixels:
        x, stride = _used_pixels(x, stride), (1,) * len(stride)
    grad_x, grad_weight, _ = torch.ops.aten.convolution_backward.default(
        grad, x, weight, None, stride, padding, dilation, transposed, output_padding or (0,) * len(stride), groups,
        (needs_x, needs_weight, False),
    )  # fmt: skip
    if needs_x and stride != steps:
        for dim, step in enumerate(steps, x.dim() - len(steps)):
            zeros = grad_x.new_zeros((*grad_x.shape[:dim], shape[dim], *grad_x.shape[dim + 1 :]))
            grad_x = torch.slice_scatter(zeros, grad_x, dim, step=step)
    return grad_x if needs_x else None, grad_weight if needs_weight else None


def window_sum(maps: Tensor, geometry: Geometry, *, of_squares: bool = True) -> Tensor:
    """Return the sum of maps [N, groups, *spatial] over each window, [N, groups, *out].

    In two dimensions and without dilation this is average pooling without the division; otherwise a convolution with
    ones. Sums of squares are never negative. The padding must be given in numbers.
    """
    if geometry.is_pointwise:
        return maps
    kernel_size, stride, padding = geometry[:3]
    exported = is_exporting() or is_jit_tracing()
    if exported and maps.dtype == torch.float64 and not geometry.transposed:
        return sum_slices(maps, geometry)
    # Not in files for other programs: torch's exporter to ONNX ignores divisor_override.
    if geometry.is_pooling and not exported:
        return F.avg_pool2d(maps, kernel_size, stride, padding, divisor_override=1)  # type: ignore[arg-type]
    groups = maps.shape[1]
    box = maps.new_ones(groups, 1, *kernel_size)
    sums = convolve(maps, box, geometry._replace(groups=groups))
    # Some convolution algorithms (Winograd, FFT) return a tiny negative number for a sum of zeros.
    return sums.clamp_min(0) if of_squares else sums


def sum_slices(maps: Tensor, geometry: Geometry) -> Tensor:
    """Return the sums of `window_sum` as sums of slices, one dimension after the other.

    ONNX Runtime has neither convolutions nor poolings in float64, but slices.
    """
    padding = [int(amount) for amount in geometry.padding]
    if any(padding):
        maps = F.pad(maps, [amount for amount in reversed(padding) for _ in range(2)])
    for dim, (size, stride, dilation) in enumerate(
        zip(geometry.kernel_size, geometry.stride, geometry.dilation, strict=True), start=2
    ):
        before: tuple[slice, ...] = (slice(None),) * dim
        length = (size - 1) * dilation
        terms = [maps[(*before, slice(i * dilation, i * dilation - length or None, stride))] for i in range(size)]
        maps = sum(terms[1:], terms[0])
    return maps


def spread(sums: Tensor, size: Sequence[int], geometry: Geometry) -> Tensor:
    """Return for each pixel the sum of the windows that contain it, [N, groups, *spatial] of `size`.

    This is the transpose of `window_sum`. The padding must be given in numbers.
    """
    if geometry.is_pointwise:
        return sums
    kernel_size, stride, padding = geometry[:3]
    like = sums.new_empty(size)
    if geometry.is_pooling:
        pooled: Tensor = torch.ops.aten.avg_pool2d_backward(
            sums, like, list(kernel_size), list(stride), list(padding), False, True, 1
        )
        return pooled
    groups = sums.shape[1]
    box = sums.new_ones(groups, 1, *kernel_size)
    wide = convolve_backward(sums, like, box, geometry._replace(groups=groups), True, False)[0]
    assert wide is not None
    return wide
