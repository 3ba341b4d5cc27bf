"""Where a convolution looks: sizes for each dimension and the padding of torch.nn's modes.

Sums over the window of a convolution, on maps with one channel per group, and their transpose.

In two dimensions and without dilation this is average pooling without the division; otherwise a convolution with ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Geometry", "pad_input", "per_dimension", "same_as_numbers", "spread", "window_sum"]


class Geometry(NamedTuple):
    """How a kernel moves over its input, one number per spatial dimension; all empty for a fully connected layer."""

    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1


def per_dimension(value: int | Sequence[int], spatial_dims: int) -> tuple[int, ...]:
    """Return one number a dimension from a number, a sequence of one or a whole sequence."""
    if type(value) is tuple and len(value) == spatial_dims:
        return value
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * spatial_dims if len(values) == 1 else values


def _begin_and_end(
    kernel_size: Sequence[int], padding: str | Sequence[int], dilation: Sequence[int]
) -> list[tuple[int, int]]:
    """How much is padded before and after each dimension; "same" puts the odd pixel after, as torch does."""
    if padding == "valid":
        return [(0, 0)] * len(kernel_size)
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel_size, dilation, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(int(amount), int(amount)) for amount in padding]


def pad_input(
    x: Tensor,
    kernel_size: Sequence[int],
    padding: str | Sequence[int],
    dilation: Sequence[int],
    padding_mode: str = "zeros",
) -> Tensor:
    """Pad the spatial dimensions of x as torch.nn's convolutions do for `padding_mode`."""
    amounts = [n for pair in reversed(_begin_and_end(kernel_size, padding, dilation)) for n in pair]
    if not any(amounts):
        return x
    return F.pad(x, amounts, mode="constant" if padding_mode == "zeros" else padding_mode)


def same_as_numbers(
    x: Tensor, kernel_size: Sequence[int], padding: str | Sequence[int], dilation: Sequence[int]
) -> tuple[Tensor, tuple[int, ...]]:
    """Return an input and a padding in numbers that together mean `padding`.

    The input is padded here only where "same" is lopsided (an even kernel), which numbers cannot say.
    """
    sides = _begin_and_end(kernel_size, padding, dilation)
    if all(begin == end for begin, end in sides):
        return x, tuple(begin for begin, _ in sides)
    return pad_input(x, kernel_size, padding, dilation), (0,) * len(sides)


_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def _is_pixel(kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> bool:
    """Whether every window is one pixel and every pixel has one window."""
    return all(k == 1 and s == 1 and p == 0 for k, s, p in zip(kernel_size, stride, padding, strict=True))


def _is_pooling(kernel_size: Sequence[int], padding: Sequence[int], dilation: Sequence[int]) -> bool:
    """Whether torch's average pooling takes this geometry; in three dimensions its backward is not deterministic."""
    return (
        len(kernel_size) == 2
        and all(d == 1 for d in dilation)
        and all(2 * p <= k for k, p in zip(kernel_size, padding, strict=True))
    )


def window_sum(
    maps: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    *,
    of_squares: bool = True,
) -> Tensor:
    """Sum maps [N, groups, *spatial] over each window → [N, groups, *out]; sums of squares are never negative."""
    if _is_pixel(kernel_size, stride, padding):
        return maps
    if _is_pooling(kernel_size, padding, dilation):
        return F.avg_pool2d(maps, tuple(kernel_size), tuple(stride), tuple(padding), divisor_override=1)
    box = maps.new_ones(maps.shape[1], 1, *kernel_size)
    sums = _CONV[len(kernel_size)](maps, box, None, stride, padding, dilation, maps.shape[1])
    # Some convolution algorithms (Winograd, FFT) return a tiny negative number for a sum of zeros.
    return sums.clamp_min(0) if of_squares else sums


def spread(
    sums: Tensor,
    size: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Give each pixel the sum of the windows that contain it: the transpose of `window_sum`, onto maps of `size`."""
    if _is_pixel(kernel_size, stride, padding):
        return sums
    like = sums.new_empty(size)
    if _is_pooling(kernel_size, padding, dilation):
        pooled: Tensor = torch.ops.aten.avg_pool2d_backward(
            sums, like, list(kernel_size), list(stride), list(padding), False, True, 1
        )
        return pooled
    box = sums.new_ones(sums.shape[1], 1, *kernel_size)
    none = (0,) * len(kernel_size)
    wide: Tensor = torch.ops.aten.convolution_backward(
        sums, like, box, None, stride, padding, dilation, False, none, sums.shape[1], (True, False, False)
    )[0]
    return wide
