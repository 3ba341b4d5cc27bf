"""Heads and losses with very many classes, processed in blocks that stay in the cache.

Cosines: the plain form normalizes all class weights first. For 100,000 classes that takes one more buffer of the size
of the weights in forward and two more in backward, and allocating memory takes more time than the arithmetic in it.
Here each block of classes is normalized into a scratch buffer and multiplied; backward normalizes it again.

Cross entropy: the logits are never stored.

    z_ij = scale_i · class_scale_j · g(c_ij) + bias_j,   but z_iy = target_i for the label y of row i

Plain operations write a map of N × C for g, for the logits, for their softmax and for each gradient in between. Here
rows are processed in blocks, forward saves two numbers per row, and backward recomputes the softmax of a block and
writes the one map that must exist: the gradient of the cosines.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spherenet.angles import AngleFunction
from spherenet.angles.elementary import gradients_of
from spherenet.ops import angular
from spherenet.ops.angular import AngularLogits, AngularOutput
from spherenet.ops.norms import SHRINK, without_autocast

__all__ = [
    "BLOCK_ELEMENTS",
    "angular_cosine",
    "angular_cross_entropy",
    "block_length",
    "exponential_",
    "factors_of",
    "has_kernel",
    "with_label_column",
]

BLOCK_ELEMENTS = {"cpu": 1 << 19}
"""Elements of a block by device: 2 MB in float32 on a CPU, so that a block and its scratch stay in the cache."""

BLOCK_ELEMENTS_ELSEWHERE = 1 << 25
"""Elements of a block on other devices, where blocks save memory: few, large launches."""


def block_length(tensor: Tensor) -> int:
    """Return the number of rows of a matrix that make a block."""
    elements = BLOCK_ELEMENTS.get(tensor.device.type, BLOCK_ELEMENTS_ELSEWHERE)
    return max(1, elements // tensor.shape[1])


def angular_cosine(unit_features: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return cos θ [N, C] and ‖w‖ [C] like `ops.angular.angular_cosine`, block by block.

    Second derivatives use the plain form.
    """
    cosine, length = _BlockwiseCosine.apply(unit_features, weight, eps)  # type: ignore[no-untyped-call]
    return cosine, length


def _blocks(weight: Tensor) -> range:
    return range(0, weight.shape[0], block_length(weight))


class _BlockwiseCosine(torch.autograd.Function):
    """cos θ and ‖w‖ with the weights normalized block by block."""

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
            return gradients_of(angular.angular_cosine, (unit_features, weight, ctx.eps), (grad_cosine, grad_length))
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


def has_kernel(angle: AngleFunction | None) -> bool:
    """Return whether `angular_cross_entropy` supports g: it must have factors, and no tensor parameter."""
    return angle is None or (not isinstance(angle.k, Tensor) and angle.factors(angle.k) is not None)


def factors_of(angle: AngleFunction | None) -> tuple[Any, float]:
    """Return (inner, gain) of g = gain·shape(c, inner), for a g with a kernel.

    The gain is multiplied into the scale of a row instead of all its classes.
    """
    factors = None if angle is None else angle.factors(angle.k)
    return (None, 1.0) if factors is None else factors


def angular_cross_entropy(
    angles: AngularOutput,
    logits: AngularLogits,
    target: Tensor,
    labels: Tensor,
    sum_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return −log p_iy of each row and, if sum_weight is given, −Σ_j sum_weight_j·log p_ij, with p = softmax(z).

    It is differentiable in every floating point tensor except sum_weight. Second derivatives use the plain form.

    Args:
        angles: Cosines [N, C], feature norms, weight norms and bias.
        logits: Logits whose g has a kernel (`has_kernel`), without a margin on the other classes.
        target: Logit of the label's class [N].
        labels: int64 class indices [N], all from 0 to C − 1.
        sum_weight: Weight of each class in the second result [C].
    """
    scale = angles.feature_norm if logits.scale is None else logits.scale
    class_scale = angles.weight_norm if logits.uses_weight_norm else None
    terms = _Terms(angles.cosine, scale, class_scale, angles.bias, target, labels, sum_weight)
    of_label, of_all = _AngularCrossEntropy.apply(logits.angle, *terms)  # type: ignore[no-untyped-call]
    return of_label, (None if sum_weight is None else of_all)


def with_label_column(cosine: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines [N, C] and those of the labels [N, 1], for a column of int64 labels [N, 1].

    The gradients of both are written to one map. `gather` alone would fill a second one with zeros and add the two.
    """
    same, of_label = _WithLabelColumn.apply(cosine, column)  # type: ignore[no-untyped-call]
    return same, of_label


class _WithLabelColumn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cosine: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(column)
        ctx.like = cosine.shape
        return cosine.view_as(cosine), cosine.gather(1, column)

    @staticmethod
    def backward(ctx: Any, grad_cosine: Tensor | None, grad_of_label: Tensor | None) -> tuple[Any, ...]:
        (column,) = ctx.saved_tensors
        if grad_of_label is None:
            return grad_cosine, None
        if grad_cosine is None:
            return grad_of_label.new_zeros(ctx.like).scatter(1, column, grad_of_label), None
        if torch.is_grad_enabled():
            return grad_cosine.scatter_add(1, column, grad_of_label), None
        # In place: `_AngularCrossEntropy` created this map, and nothing else uses it.
        return grad_cosine.scatter_add_(1, column, grad_of_label), None


class _Terms(NamedTuple):
    """Inputs of `angular_cross_entropy` except g."""

    cosine: Tensor
    scale: Tensor | float
    class_scale: Tensor | None
    bias: Tensor | None
    target: Tensor
    labels: Tensor
    sum_weight: Tensor | None


class _AngularCrossEntropy(torch.autograd.Function):
    """The two results of `angular_cross_entropy`, one block of rows at a time; inputs are g and `_Terms`."""

    @staticmethod
    def forward(ctx: Any, angle: AngleFunction | None, *inputs: Any) -> tuple[Tensor, Tensor]:
        terms = _Terms(*inputs)
        cosine, scale, target, sum_weight = terms.cosine, terms.scale, terms.target, terms.sum_weight
        ctx.set_materialize_grads(False)
        ctx.angle = angle
        ctx.scale = None if isinstance(scale, Tensor) else scale
        # log Σ exp z = largest + log total. They are saved separately: at logits of 1e4 float32 rounds their sum to
        # 1e-3, and the error would enter every probability.
        largest, total = cosine.new_empty(2, cosine.shape[0], 1)
        of_all = torch.zeros_like(target)
        rows_of = _Rows(terms, angle)
        with without_autocast(cosine):
            for rows in rows_of.blocks:
                logits = rows_of.logits(rows, rows_of.similarity(rows), rows_of.scratch(rows, 1))
                largest[rows] = logits.amax(1, keepdim=True)
                logits.sub_(largest[rows])
                if sum_weight is not None:
                    of_all[rows] = logits.mv(sum_weight).neg_()
                total[rows] = exponential_(logits).sum(1, keepdim=True)
            log_total = total.log().squeeze(1)
            of_label = largest.squeeze(1) - target + log_total
            if sum_weight is not None:
                of_all.addcmul_(log_total, sum_weight.sum())
        scale_tensor = scale if isinstance(scale, Tensor) else None
        ctx.save_for_backward(*terms._replace(scale=scale_tensor), largest, total)  # type: ignore[arg-type]
        return of_label, of_all

    @staticmethod
    def backward(ctx: Any, grad_of_label: Tensor | None, grad_of_all: Tensor | None) -> tuple[Any, ...]:
        *saved, largest, total = ctx.saved_tensors
        cosine, scale, class_scale, bias, target, labels, sum_weight = saved
        terms = _Terms(*saved)._replace(scale=ctx.scale if scale is None else scale)
        if torch.is_grad_enabled():  # create_graph=True
            return gradients_of(_plain_cross_entropy, (ctx.angle, *terms), (grad_of_label, grad_of_all))
        # dz_j = a·(p_j − [j = y]) + b·(Σ_l weight_l · p_j − weight_j), with a and b the gradients of the two results.
        factor = torch.zeros_like(target) if grad_of_label is None else grad_of_label
        if grad_of_all is not None:
            factor = factor + grad_of_all * sum_weight.sum()
        factor = factor.unsqueeze(1) / total
        rows_of = _Rows(terms, ctx.angle)
        grad_cosine = torch.empty_like(cosine)
        grad_scale = None if scale is None else torch.empty_like(scale)
        grad_class_scale = None if class_scale is None else torch.zeros_like(class_scale)
        grad_bias = None if bias is None else torch.zeros_like(bias)
        grad_target = torch.zeros_like(target) if grad_of_label is None else -grad_of_label
        with without_autocast(cosine):
            for rows in rows_of.blocks:
                similarity = rows_of.similarity(rows)
                # First the gradient of the logits, in the memory of that of the cosines.
                grad = rows_of.logits(rows, similarity, grad_cosine[rows])
                exponential_(grad.sub_(largest[rows])).mul_(factor[rows])
                if grad_of_all is not None:
                    grad.addr_(grad_of_all[rows], sum_weight, alpha=-1)
                column = labels[rows, None]
                grad_target[rows] += grad.gather(1, column).squeeze(1)
                # The target's logit is a separate input; its cosine does not contribute.
                grad.scatter_(1, column, 0)
                if grad_bias is not None:
                    grad_bias += grad.sum(0)
                if grad_scale is not None:
                    by_class = torch.mul(similarity, grad, out=rows_of.scratch(rows, 1))
                    if grad_class_scale is None:
                        grad_scale[rows] = by_class.sum(1).mul_(rows_of.gain)
                    else:
                        grad_scale[rows] = by_class.mv(class_scale).mul_(rows_of.gain)
                        grad_class_scale += by_class.t().mv(scale[rows]).mul_(rows_of.gain)
                if class_scale is not None:
                    grad.mul_(class_scale)
                grad.mul_(rows_of.row_scale(rows))
                if ctx.angle is not None:
                    ctx.angle.multiply_by_slope_(grad, cosine[rows], similarity, rows_of.inner)
        return None, grad_cosine, grad_scale, grad_class_scale, grad_bias, grad_target, None, None


class _Rows:
    """The inputs of one call, and blocks of rows computed from them."""

    def __init__(self, terms: _Terms, angle: AngleFunction | None) -> None:
        self.cosine, self.scale, self.class_scale, self.bias, self.target, self.labels, _ = terms
        self.angle = angle
        self.inner, self.gain = factors_of(angle)
        count, classes = self.cosine.shape
        step = block_length(self.cosine)
        self.blocks = [slice(first, min(first + step, count)) for first in range(0, count, step)]
        self._buffers = self.cosine.new_empty(2, min(step, count), classes)

    def scratch(self, rows: slice, index: int) -> Tensor:
        """Return one of two buffers of the block's size, the same for every block."""
        return self._buffers[index, : rows.stop - rows.start]

    def row_scale(self, rows: slice) -> Tensor | float:
        """Return the factor of g/gain of each row."""
        scale: Tensor | float = self.gain * (self.scale[rows, None] if isinstance(self.scale, Tensor) else self.scale)
        return scale

    def similarity(self, rows: slice) -> Tensor:
        """Return g/gain of the block's cosines in the first buffer, or the cosines themselves if there is no g."""
        if self.angle is None:
            return self.cosine[rows]
        out = self.scratch(rows, 0)
        return self.angle.shape(torch.clamp(self.cosine[rows], -1, 1, out=out), self.inner, out)

    def logits(self, rows: slice, similarity: Tensor, out: Tensor) -> Tensor:
        """Return the block's logits including the target's, written to `out`."""
        torch.mul(similarity, self.row_scale(rows), out=out)
        if self.class_scale is not None:
            out.mul_(self.class_scale)
        if self.bias is not None:
            out.add_(self.bias)
        return out.scatter_(1, self.labels[rows, None], self.target[rows, None])


def exponential_(exponent: Tensor) -> Tensor:
    """Return exp of numbers ≤ 0, in place, without subnormal results.

    A probability below 1e-30 (float32) changes no sum, but subnormal numbers slow down a processor's exp and the matrix
    products of backward by an order of magnitude.
    """
    return exponent.clamp_min_(0.8 * math.log(torch.finfo(exponent.dtype).tiny)).exp_()


def _plain_cross_entropy(angle: AngleFunction | None, *inputs: Any) -> tuple[Tensor, Tensor]:
    """Return the results of `angular_cross_entropy` by whole-tensor operations."""
    cosine, scale, class_scale, bias, target, labels, sum_weight = _Terms(*inputs)
    column = labels.unsqueeze(1)
    similarity = cosine if angle is None else angle(cosine)
    similarity = similarity if class_scale is None else similarity * class_scale
    logits = similarity * (scale.unsqueeze(1) if isinstance(scale, Tensor) else scale)
    logits = (logits if bias is None else logits + bias).scatter(1, column, target.unsqueeze(1))
    losses = -logits.log_softmax(1)
    of_label = losses.gather(1, column).squeeze(1)
    return of_label, (torch.zeros_like(of_label) if sum_weight is None else losses.mv(sum_weight))
