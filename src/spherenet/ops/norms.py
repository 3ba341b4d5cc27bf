"""Norms of vectors and of the patches a convolution looks at: ‖x‖ = sqrt(Σx² + eps) (SPEC 1).

eps > 0 gives a zero patch the cosine 0 and a finite gradient. Norms of half-precision tensors are computed
and returned in float32. Squares are taken of x/64, a power of two that costs no digit and moves float32's
overflow from Σx² = 3e38 to 1e42: 10⁶ inputs of 1e18 still have a norm. Beyond, the norm is inf, and callers
give such a patch the cosine 0, as they do for a zero patch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F

from spherenet.ops.geometry import pad_input, same_as_numbers

__all__ = [
    "DEFAULT_EPS",
    "SHRINK",
    "autocast_is_on",
    "direction",
    "norm",
    "patch_norm",
    "without_autocast",
    "working_dtype",
]

DEFAULT_EPS = 1e-4
"""The authors' value (SPEC 10): it bounds the gradient of a patch of norm r by 1/max(r, 0.01)."""

SHRINK = 2.0**-6
"""What x is multiplied by before it is squared; see the module."""

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype norms and angles are computed in: float32 for half precision, else the dtype itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def autocast_is_on(x: Tensor) -> bool:
    """Whether autocast changes dtypes on the device of x; some devices (meta) have none."""
    device_type = x.device.type
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context in which operations keep the dtype they are given."""
    return torch.autocast(x.device.type, enabled=False) if autocast_is_on(x) else nullcontext()


def _root(shrunk_sum: Tensor, eps: float) -> Tensor:
    """sqrt(Σx² + eps) from Σ(x/64)²."""
    return (shrunk_sum + eps * SHRINK**2).sqrt() / SHRINK


def norm(x: Tensor, dim: int | tuple[int, ...], eps: float = DEFAULT_EPS) -> Tensor:
    """Return sqrt(Σx² + eps) over `dim`, which is kept with size 1."""
    shrunk = x.to(working_dtype(x.dtype)) * SHRINK
    return _root(shrunk.square().sum(dim, keepdim=True), eps)


def direction(x: Tensor, dim: int | tuple[int, ...], eps: float = DEFAULT_EPS) -> Tensor:
    """Return x/‖x‖ over `dim` in the dtype of x; zero where x is zero or its norm is not finite."""
    return (x.to(working_dtype(x.dtype)) / norm(x, dim, eps)).to(x.dtype)


def patch_norm(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: str | Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
    padding_mode: str = "zeros",
    eps: float = DEFAULT_EPS,
) -> Tensor:
    """Return ‖patch‖ for each patch that a convolution of this geometry looks at.

    The squares are summed over channels first, so the sliding window runs over one map a group, not over all
    channels.

    Shapes: x [N, C, *spatial] or [C, *spatial] → [N, groups, *out] or [groups, *out].
    """
    spatial_dims = len(kernel_size)
    if padding_mode == "zeros":
        x, padding = same_as_numbers(x, kernel_size, padding, dilation)
    else:
        x, padding = pad_input(x, kernel_size, padding, dilation, padding_mode), (0,) * spatial_dims
    shrunk = x.to(working_dtype(x.dtype)) * SHRINK
    channels_at = x.dim() - spatial_dims - 1
    squares = torch.unflatten(shrunk.square(), channels_at, (groups, -1)).sum(channels_at + 1)
    box = squares.new_ones(groups, 1, *kernel_size)
    # Autocast would run this convolution in half precision.
    with without_autocast(x):
        window = _CONV[spatial_dims](squares, box, None, stride, padding, dilation, groups)
    # Some convolution algorithms (Winograd, FFT) return a tiny negative for a sum of zeros.
    return _root(window.clamp_min(0), eps)
