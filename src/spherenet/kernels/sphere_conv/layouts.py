"""Memory layouts of dense tensors [N, C, *spatial]: *rows* (channels last in memory) and *planes* (contiguous)."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["dense_like", "is_dense", "is_rows", "layout_of"]

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def is_rows(x: Tensor) -> bool:
    """Return whether the channels of a dense tensor are last in memory."""
    if x.dim() == 2:
        return x.is_contiguous()
    if x.dim() == 3:
        return x.stride(1) == 1 and x.transpose(1, 2).is_contiguous()
    return x.is_contiguous(memory_format=_CHANNELS_LAST[x.dim()])


def dense_like(x: Tensor, other: Tensor) -> Tensor:
    """Return x in the layout of `other`, or contiguous if that is not rows; copied only if necessary."""
    if not is_rows(other):
        return x.contiguous()
    if x.dim() == 3:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if x.dim() == 2:
        return x.contiguous()
    return x.contiguous(memory_format=_CHANNELS_LAST[x.dim()])


@lru_cache(maxsize=1024)
def layout_of(shape: tuple[int, ...], stride: tuple[int, ...]) -> str:
    """Return the layout of a tensor with this shape and strides: "rows", "planes" or "other"."""
    like = torch.empty_strided(shape, stride, device="meta")
    return "rows" if is_rows(like) else "planes" if like.is_contiguous() else "other"


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor fill its memory in one of the two layouts."""
    return layout_of(tensor.shape, tensor.stride()) != "other"
