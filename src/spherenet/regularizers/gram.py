"""Gram matrices of the kernels of many layers at once, and the cosines between kernels.

Layers of equal shape share one result, so that everything after the products runs once a shape instead of
once a layer. The products of small kernels run as one batch too; large ones on a CPU are multiplied one by
one, because there copying them into a batch costs more than the calls it saves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from spherenet.layers import SphereLayer
from spherenet.ops.norms import without_autocast
from spherenet.regularizers.sphere_layers import kernel_matrix

__all__ = ["KernelStack", "cosines", "gram", "kernel_stacks", "unit_kernels"]

SMALL_MATRIX = 16384
"""Entries up to which a CPU copies a matrix into a batch in less time than one more product takes to call."""


@dataclass
class KernelStack:
    """The kernel matrices [groups, kernels, fan_in] of the layers that share shape, dtype, device and eps."""

    kernels: int
    fan_in: int
    eps: float
    matrices: list[Tensor] = field(default_factory=list)

    @property
    def groups(self) -> list[int]:
        """How many groups each layer has."""
        return [len(matrix) for matrix in self.matrices]


def kernel_stacks(layers: Iterable[SphereLayer]) -> list[KernelStack]:
    """Sort the kernels of layers into as few stacks as their shapes allow."""
    stacks: dict[tuple[object, ...], KernelStack] = {}
    for layer in layers:
        matrix = kernel_matrix(layer)
        kernels, fan_in = matrix.shape[1:]
        key = (kernels, fan_in, matrix.dtype, matrix.device, layer.eps)
        stacks.setdefault(key, KernelStack(kernels, fan_in, layer.eps)).matrices.append(matrix)
    return list(stacks.values())


class _Gram(torch.autograd.Function):
    """M Mᵀ of each matrix, one after the other along dimension 0.

    The gradient of a symmetric product needs one product, (G + Gᵀ)·M, where autograd's rule for `@` takes
    two. Differentiable any number of times.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*matrices: Tensor) -> Tensor:
        products = [_product(matrix, matrix.mT) for matrix in matrices]
        return products[0] if len(products) == 1 else torch.cat(products)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, ...]:
        matrices = ctx.saved_tensors
        with without_autocast(grad_output):
            pairs = torch.split(grad_output + grad_output.mT, [len(matrix) for matrix in matrices])
            return tuple(_product(pair, matrix) for pair, matrix in zip(pairs, matrices, strict=True))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        moved = torch.cat([t @ matrix.mT for t, matrix in zip(tangents, ctx.saved_tensors, strict=True)])
        return moved + moved.mT


def _product(left: Tensor, right: Tensor) -> Tensor:
    # A batch of one takes up to twice as long as the plain product of two small matrices.
    return (left[0] @ right[0]).unsqueeze(0) if len(left) == 1 else left @ right


def gram(matrices: Sequence[Tensor]) -> Tensor:
    """Return M Mᵀ for each of `matrices`, all [groups, rows, columns] with equal rows and columns.

    Shapes: n × [groups_i, rows, columns] → [Σ groups_i, rows, rows].
    """
    first = matrices[0]
    if len(matrices) > 1 and (first.device.type != "cpu" or first[0].numel() <= SMALL_MATRIX):
        matrices = [torch.cat(list(matrices))]
    with without_autocast(first):  # it would multiply in half precision
        if torch.compiler.is_compiling():  # dynamo cannot trace a function that has a jvp of its own
            return _Gram.forward(*matrices)
        result: Tensor = _Gram.apply(*matrices)  # type: ignore[no-untyped-call]
    return result


def unit_kernels(stack: KernelStack) -> list[Tensor]:
    """Return the kernels divided by their norms, ‖w‖ and the exceptions as in `cosines`."""
    return [m / m.square().sum(-1, keepdim=True).clamp_min(stack.eps).sqrt() for m in stack.matrices]


def cosines(stack: KernelStack) -> Tensor:
    """Return the cosines wᵢᵀwⱼ/(‖wᵢ‖‖wⱼ‖) between the kernels of each group, ‖w‖ = sqrt(max(Σw², eps)).

    A kernel's own cosine is 1 unless it is shorter than √eps, eps being the layer's. The layer itself adds eps
    instead, but then two copies could lower their cosine by growing short: a floor leaves the length of every
    kernel above it exactly without influence, and bounds the gradient of the others just as well. A zero
    kernel has the cosine 0 with all, and so has one whose squares overflow (‖w‖ > 1e19 in float32).

    Shapes: [Σ groups, kernels, kernels].
    """
    products = gram(stack.matrices)
    norms = products.diagonal(dim1=-2, dim2=-1).clamp_min(stack.eps).sqrt()
    # inf/inf and 0·inf must not meet, in backward neither: so both operands are replaced, not the quotient.
    overflow = norms.isinf()
    norms = norms.masked_fill(overflow, 1)
    products = products.masked_fill(overflow.unsqueeze(-1) | overflow.unsqueeze(-2), 0)
    return products / (norms.unsqueeze(-1) * norms.unsqueeze(-2))
