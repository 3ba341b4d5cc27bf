"""What the implementations of the kernels share: the description of g and of the affine map behind it.

An implementation is a module with five functions, `native` on CPUs and `triton` on GPUs:

    unit_weight(weight, eps, dtype) → (unit, scale)
    unit_weight_backward(grad_unit, unit, scale, dtype) → grad_weight
    forward(product, x, kernel_size, geometry, eps, angle, affine, keep_cosine) → (out, inverse_norm, cosine)
    backward(grad, known, known_is_cosine, inverse_norm, x, kernel_size, geometry, angle, affine,
             needs_x, needs_k, needs_affine) → (grad_product, spread, sums)
    correct(grad_x, x, spread, groups) → grad_x

`kernels/sphere_conv.py` calls them around torch's own convolutions and documents what each returns.

The two memory layouts that the kernels work on.

A dense tensor [N, C, *spatial] is either *rows*, channels last in memory, or *planes*, contiguous.

Second derivatives of kernels that know only their first: differentiate the plain form instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["ANGLES", "Affine", "Angle", "dense_like", "gradients_of", "is_rows"]

ANGLES = ("cosine", "linear", "sigmoid")
"""The names of the angle functions that the kernels know, in the order of their numbers in csrc/api.h."""


class Angle(NamedTuple):
    """An angle function as the kernels know it; k is a number, or a tensor with one element or one per filter."""

    name: str
    k: Tensor | float | None = None


class Affine(NamedTuple):
    """The map β·(g + b) + γ behind g; each a tensor with one element per filter, or None."""

    bias: Tensor | None = None
    beta: Tensor | None = None
    gamma: Tensor | None = None

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return not (self.bias is None and self.beta is None and self.gamma is None)


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
