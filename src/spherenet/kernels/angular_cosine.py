"""Cosines between a batch and very many class weights without a second copy of the weights.

The plain form brings all weights to unit length first: for 100,000 classes that is one more buffer of the
size of the weights in forward and two more in backward, and fresh memory costs more time than the arithmetic
in it. Here the weights are walked over in blocks of classes small enough to stay in the cache: each block is
normalised into a scratch buffer, multiplied, and forgotten; backward normalises it again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from spherenet.kernels.blocks import block_length
from spherenet.kernels.second_derivatives import gradients_of
from spherenet.ops.norms import SHRINK, norm, without_autocast

__all__ = ["angular_cosine", "plain_angular_cosine"]


def plain_angular_cosine(unit_features: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """cos θ [N, C] and ‖w‖ [C] from unit features [N, in] and weights [C, in], by whole-tensor operations."""
    length = norm(weight, 1, eps)
    return F.linear(unit_features, weight / length), length.squeeze(1)


def angular_cosine(unit_features: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The same as `plain_angular_cosine`, block by block; its second derivatives come from the plain form."""
    cosine, length = _BlockwiseCosine.apply(unit_features, weight, eps)  # type: ignore[no-untyped-call]
    return cosine, length


def _blocks(weight: Tensor) -> range:
    return range(0, weight.shape[0], block_length(weight))


class _BlockwiseCosine(torch.autograd.Function):
    """cos θ and ‖w‖ with the weights normalised block by block."""

    @staticmethod
    def forward(ctx: Any, unit_features: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        classes = weight.shape[0]
        cosine = unit_features.new_empty(unit_features.shape[0], classes)
        length = weight.new_empty(classes, 1)
        blocks = _blocks(weight)
        unit = weight.new_empty(min(blocks.step, classes), weight.shape[1])
        with without_autocast(weight):
            for first in blocks:
                rows = weight[first : first + blocks.step]
                ends = first + rows.shape[0]
                block = unit[: rows.shape[0]]
                # `ops.norms.norm` without its temporaries.
                squares = torch.mul(rows, SHRINK, out=block).square_().sum(1, keepdim=True)
                length[first:ends] = squares.add_(eps * SHRINK**2).sqrt_().div_(SHRINK)
                torch.div(rows, length[first:ends], out=block)
                torch.mm(unit_features, block.t(), out=cosine[:, first:ends])
        ctx.save_for_backward(unit_features, weight, length)
        ctx.eps = eps
        return cosine, length.squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad_cosine: Tensor | None, grad_length: Tensor | None) -> tuple[Any, ...]:
        unit_features, weight, length = ctx.saved_tensors
        needs_features, needs_weight = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():  # create_graph=True
            return gradients_of(plain_angular_cosine, (unit_features, weight, ctx.eps), (grad_cosine, grad_length))
        grad_features = torch.zeros_like(unit_features) if needs_features else None
        grad_weight = torch.zeros_like(weight) if grad_cosine is None else torch.empty_like(weight)
        blocks = _blocks(weight)
        scratch = weight.new_empty(2, min(blocks.step, weight.shape[0]), weight.shape[1])
        with without_autocast(weight):
            for first in blocks:
                rows = weight[first : first + blocks.step]
                at = slice(first, first + rows.shape[0])
                unit = torch.div(rows, length[at], out=scratch[0, : rows.shape[0]])
                if grad_features is not None and grad_cosine is not None:
                    grad_features.addmm_(grad_cosine[:, at], unit)
                if not needs_weight:
                    continue
                block = grad_weight[at]
                # d(w/‖w‖) = (I − uuᵀ)/‖w‖ and d‖w‖ = u, with u = w/‖w‖; eps is inside ‖w‖ and changes neither.
                if grad_cosine is not None:
                    torch.mm(grad_cosine[:, at].t(), unit_features, out=block)
                    radial = torch.mul(block, unit, out=scratch[1, : rows.shape[0]]).sum(1, keepdim=True)
                    block.addcmul_(unit, radial, value=-1).div_(length[at])
                if grad_length is not None:
                    block.addcmul_(unit, grad_length[at].unsqueeze(1))
        return grad_features, (grad_weight if needs_weight else None), None
