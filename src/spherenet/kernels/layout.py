"""The two memory layouts that the kernels work on.

A dense tensor [N, C, *spatial] is either *rows*, channels last in memory, or *planes*, contiguous.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["dense_like", "is_rows"]

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def is_rows(x: Tensor) -> bool:
    """Whether the channels of a dense tensor lie last in memory."""
    if x.dim() == 2:
        return x.is_contiguous()
    if x.dim() == 3:
        return x.stride(1) == 1 and x.transpose(1, 2).is_contiguous()
    return x.is_contiguous(memory_format=_CHANNELS_LAST[x.dim()])


def dense_like(x: Tensor, other: Tensor) -> Tensor:
    """Return x in rows if `other` is, otherwise contiguous; copied only if it lies otherwise."""
    if not is_rows(other):
        return x.contiguous()
    if x.dim() == 3:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if x.dim() == 2:
        return x.contiguous()
    return x.contiguous(memory_format=_CHANNELS_LAST[x.dim()])
