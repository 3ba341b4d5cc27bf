"""Second derivatives of kernels that know only their first: differentiate the plain form instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["gradients_of"]


def gradients_of(
    plain: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Any],
    grad_outputs: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of plain(*inputs) as tensors that can be differentiated again.

    For a backward that runs with create_graph=True. One entry an input; None for inputs that are no tensors
    or need no gradient.
    """
    # New aliases: the gradient must stop here and not run on into what the inputs were made from.
    aliases = [value.view_as(value) if isinstance(value, Tensor) else value for value in inputs]
    known = [pair for pair in zip(plain(*aliases), grad_outputs, strict=True) if pair[1] is not None]
    wanted = [index for index, value in enumerate(aliases) if isinstance(value, Tensor) and value.requires_grad]
    found = torch.autograd.grad(
        [output for output, _ in known],
        [aliases[index] for index in wanted],
        [grad for _, grad in known],
        create_graph=True,
        allow_unused=True,
    )
    gradients = dict(zip(wanted, found, strict=True))
    return tuple(gradients.get(index) for index in range(len(aliases)))
