"""Sums over the window of a convolution, on maps with one channel a group: the patch norm and its transpose."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["spread", "window_sum"]

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def _is_pixel(kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> bool:
    """Whether every window is one pixel and every pixel has one window."""
    return all(k == 1 and s == 1 and p == 0 for k, s, p in zip(kernel_size, stride, padding, strict=True))


def window_sum(
    maps: Tensor, kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """Sum maps [N, groups, *spatial] over each window → [N, groups, *out]."""
    if _is_pixel(kernel_size, stride, padding):
        return maps
    groups = maps.shape[1]
    box = maps.new_ones(groups, 1, *kernel_size)
    sums = _CONV[len(kernel_size)](maps, box, None, stride, padding, dilation, groups)
    # Some convolution algorithms (Winograd, FFT) return a tiny negative for a sum of zeros.
    return sums.clamp_min_(0)


def spread(
    sums: Tensor,
    size: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Give each pixel the sum of the windows that saw it: the transpose of `window_sum`, onto maps of `size`."""
    if _is_pixel(kernel_size, stride, padding):
        return sums
    groups = sums.shape[1]
    box = sums.new_ones(groups, 1, *kernel_size)
    maps = sums.new_empty(1).expand(tuple(size))  # only its shape is read
    none = (0,) * len(kernel_size)
    gradients = torch.ops.aten.convolution_backward(
        sums, maps, box, None, stride, padding, dilation, False, none, groups, (True, False, False)
    )
    result: Tensor = gradients[0]
    return result
