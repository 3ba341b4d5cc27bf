"""Memory that a kernel uses and gives back before it returns, kept from call to call.

The C library hands large blocks back to the system when they are freed, and the system clears every page again when the
next one is asked for: for a map of 32 MB that takes longer than the pass that fills it. One block a thread is kept
instead, as large as the largest map so far, and forgotten when something larger is needed. Only on the CPU: torch keeps
the memory of other devices by itself.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

__all__ = ["release_scratch", "scratch_like"]

_kept = threading.local()


def release_scratch() -> None:
    """Give this thread's block back to the system."""
    _kept.block = None


def scratch_like(x: Tensor) -> Tensor:
    """Return uninitialised memory of the shape, dtype and strides of x, valid until the next call in this thread."""
    if x.device.type != "cpu":
        return torch.empty_like(x)
    size = x.numel() * x.element_size()
    block: Tensor | None = getattr(_kept, "block", None)
    if block is None or block.numel() < size:
        _kept.block = block = None  # free the smaller one first
        _kept.block = block = torch.empty(size, dtype=torch.uint8)
    like = torch.empty_like(x, device="meta")
    return block[:size].view(x.dtype).as_strided(like.shape, like.stride())
