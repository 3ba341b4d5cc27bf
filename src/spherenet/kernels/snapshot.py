"""Reading a counter that the same step will advance, in a way that torch.compile cannot repeat too late."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["snapshot"]


@torch.library.custom_op("spherenet::snapshot", mutates_args=())
def _snapshot(value: Tensor) -> Tensor:
    return value.clone()


@_snapshot.register_fake
def _(value: Tensor) -> Tensor:
    return torch.empty_like(value)


def snapshot(counter: Tensor) -> Tensor:
    """Return the counter's present value for a computation whose gradients need it.

    A compiled backward may recompute cheap values instead of saving them, and then reads a buffer that forward
    has changed since: silently the next iteration's value (pytorch/pytorch#197039, in torch 2.13). It does not
    recompute an operator it knows nothing about.
    """
    value: Tensor = _snapshot(counter) if torch.compiler.is_compiling() else counter
    return value
