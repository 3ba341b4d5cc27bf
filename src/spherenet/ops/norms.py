"""Norms of vectors and of the patches of a convolution: ‖x‖ = sqrt(Σx² + eps) (docs/concepts.md, Eq. 2).

eps > 0 gives a zero patch the cosine 0 and a finite gradient. Norms of half-precision tensors are computed and returned
in float32. x is multiplied by 1/64 before it is squared: a power of two that costs no digit and moves float32's
overflow from Σx² = 3e38 to 1e42, so that 10⁶ inputs of 1e18 still have a norm. Beyond that the norm is inf, and callers
give such a patch the cosine 0, as they do for a zero patch.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from spherenet._util.validation import require_memory
from spherenet.ops.geometry import Geometry, resolve_padding, window_sum

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
"""Value of the authors' code: it bounds the gradient of a patch of norm r by 1/max(r, 0.01)."""

SHRINK = 2.0**-6
"""Factor of x before it is squared."""


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which norms and angles are computed: float32 for half precision, else the dtype itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def autocast_is_on(x: Tensor) -> bool:
    """Return whether autocast changes dtypes on the device of x; some devices (meta) have no autocast."""
    try:  # torch.compile of torch 2.10 cannot trace torch.amp.is_autocast_available
        return torch.is_autocast_enabled(x.device.type)
    except RuntimeError:
        return False


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which operations keep the dtype of their inputs."""
    return torch.autocast(x.device.type, enabled=False) if autocast_is_on(x) else nullcontext()


def norm(x: Tensor, dim: int | tuple[int, ...], eps: float = DEFAULT_EPS) -> Tensor:
    """Return sqrt(Σx² + eps) over `dim`, which is kept with size 1."""
    require_memory(x)
    shrunk = x.to(working_dtype(x.dtype)) * SHRINK
    return (shrunk.square().sum(dim, keepdim=True) + eps * SHRINK**2).sqrt() / SHRINK


def direction(x: Tensor, dim: int | tuple[int, ...], eps: float = DEFAULT_EPS) -> Tensor:
    """Return x/‖x‖ over `dim` in the dtype of x; zero if x is zero or its norm is not finite."""
    length = norm(x, dim, eps)
    return (x.to(working_dtype(x.dtype)) / length).to(x.dtype)


def patch_norm(x: Tensor, geometry: Geometry, eps: float = DEFAULT_EPS) -> Tensor:
    """Return ‖patch‖ for each patch of a convolution.

    The squares are summed over channels first, so that the window slides over one map per group, not over all channels.

    Shape:
        x [N, C, *spatial] or [C, *spatial] → [N, groups, *out] or [groups, *out].
    """
    batch = x if x.dim() == len(geometry.kernel_size) + 2 else x.unsqueeze(0)
    batch, geometry = resolve_padding(batch, geometry)
    shrunk = batch.to(working_dtype(x.dtype)) * SHRINK
    squares = torch.unflatten(shrunk.square(), 1, (geometry.groups, -1)).sum(2)
    with without_autocast(x):  # a convolution would run in half precision
        sums = window_sum(squares, geometry)
    norms = (sums + eps * SHRINK**2).sqrt() / SHRINK
    return norms if x.dim() == batch.dim() else norms.squeeze(0)
