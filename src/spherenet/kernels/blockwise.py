"""How large the blocks are in which heads and losses walk over very many classes.

Cosines between a batch and very many class weights without a second copy of the weights.

The plain form brings all weights to unit length first: for 100,000 classes that is one more buffer of the
size of the weights in forward and two more in backward, and fresh memory costs more time than the arithmetic
in it. Here the weights are walked over in blocks of classes small enough to stay in the cache: each block is
normalised into a scratch buffer, multiplied, and forgotten; backward normalises it again.

Cross entropy of an angular loss over very many classes, without ever storing the logits.

    z_ij = scale_i · class_scale_j · g(c_ij) + bias_j,   but z_iy = target_i for the label y of row i

Plain operations write a map of N × C for g, for the logits, for their softmax and for each gradient in
between. Here rows are taken in blocks that stay in the cache, forward keeps two numbers a row, and backward
recomputes a block's softmax and writes the one map that has to exist: the gradient of the cosines.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from spherenet.angles import AngleFunction, CosineAngle, LinearAngle, SigmoidAngle
from spherenet.kernels.interface import gradients_of
from spherenet.ops.norms import SHRINK, norm, without_autocast

__all__ = [
    "BLOCK_ELEMENTS",
    "angular_cosine",
    "angular_cross_entropy",
    "block_length",
    "has_kernel",
    "plain_angular_cosine",
    "plain_logits",
    "with_label_column",
]

BLOCK_ELEMENTS = {"cpu": 1 << 19}
"""Elements of a block by device: 2 MB in float32 on a CPU, so that a block and its scratch stay in the cache."""

BLOCK_ELEMENTS_ELSEWHERE = 1 << 25
"""On other devices a block serves to save memory, not cache: few, large launches."""


def block_length(tensor: Tensor) -> int:
    """Return how many rows of a matrix make a block."""
    elements = BLOCK_ELEMENTS.get(tensor.device.type, BLOCK_ELEMENTS_ELSEWHERE)
    return max(1, elements // tensor.shape[1])


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


def has_kernel(angle: AngleFunction | None) -> bool:
    """Whether `angular_cross_entropy` knows this g; a subclass may have changed it, so only the types themselves."""
    return angle is None or type(angle) in (CosineAngle, LinearAngle, SigmoidAngle)


def plain_logits(
    cosine: Tensor, scale: Tensor | float, class_scale: Tensor | None, bias: Tensor | None, angle: AngleFunction | None
) -> Tensor:
    """z_ij of the module's formula for every class alike, by whole-tensor operations; angle None means g = c.

    Shapes: cosine [N, C], scale [N] or a number, class_scale and bias [C] → [N, C].
    """
    similarity = cosine if angle is None else angle(cosine)
    if class_scale is not None:
        similarity = similarity * class_scale
    logits = similarity * (scale.unsqueeze(1) if isinstance(scale, Tensor) else scale)
    return logits if bias is None else logits + bias


def angular_cross_entropy(
    cosine: Tensor,
    scale: Tensor | float,
    class_scale: Tensor | None,
    bias: Tensor | None,
    target: Tensor,
    labels: Tensor,
    angle: AngleFunction | None,
    sum_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """−log p_iy of each row and, where sum_weight [C] is given, −Σ_j sum_weight_j·log p_ij; p = softmax(z).

    Shapes: cosine [N, C]; scale [N] or a number; class_scale, bias [C]; target [N]; labels int64 [N], all of
    them from 0 to C − 1 → [N], [N]. `has_kernel(angle)` must hold. Differentiable in every floating tensor
    but sum_weight; second derivatives go through the plain form.
    """
    of_label, of_all = _AngularCrossEntropy.apply(  # type: ignore[no-untyped-call]
        cosine, scale, class_scale, bias, target, labels, angle, sum_weight
    )
    return of_label, (None if sum_weight is None else of_all)


def with_label_column(cosine: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
    """The cosines [N, C] and those of the labels [N, 1], column int64 [N, 1].

    The gradients of the two meet in one map. `gather` alone would fill a second one with zeros and add the two.
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
        # In place: the map was made by `_AngularCrossEntropy` for us alone.
        return grad_cosine.scatter_add_(1, column, grad_of_label), None


def _similarity(angle: AngleFunction | None, cosine: Tensor, out: Tensor) -> Tensor:
    """g(cosine)/gain, written into `out`; the cosines themselves where g = c."""
    if angle is None:
        return cosine
    torch.clamp(cosine, -1, 1, out=out)
    if isinstance(angle, LinearAngle):
        out.asin_()
    elif isinstance(angle, SigmoidAngle):
        out.asin_().mul_(1 / (2 * angle.k)).tanh_()
    return out


def _gain(angle: AngleFunction | None) -> float:
    """The constant factor of g, which is multiplied into a row's scale rather than into its classes."""
    if isinstance(angle, LinearAngle):
        return 2 / math.pi
    return 1 / math.tanh(math.pi / (4 * angle.k)) if isinstance(angle, SigmoidAngle) else 1.0


def _apply_slope(angle: AngleFunction | None, cosine: Tensor, similarity: Tensor, grad: Tensor) -> None:
    """grad ← grad · d(g/gain)/dc, given g/gain already; `similarity` is overwritten."""
    if not isinstance(angle, (LinearAngle, SigmoidAngle)):
        return
    one = cosine.new_ones(())
    if isinstance(angle, SigmoidAngle):
        grad.mul_(torch.addcmul(one, similarity, similarity, value=-1, out=similarity)).mul_(1 / (2 * angle.k))
    # 1/sin θ with the floor of `angles.sine`, in two passes fewer.
    square = torch.addcmul(one, cosine, cosine, value=-1, out=similarity)
    grad.mul_(square.clamp_min_(16 * torch.finfo(cosine.dtype).eps).rsqrt_())


class _AngularCrossEntropy(torch.autograd.Function):
    """The two sums of `angular_cross_entropy`, a block of rows at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        cosine: Tensor,
        scale: Tensor | float,
        class_scale: Tensor | None,
        bias: Tensor | None,
        target: Tensor,
        labels: Tensor,
        angle: AngleFunction | None,
        sum_weight: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.angle = angle
        ctx.scale = None if isinstance(scale, Tensor) else scale
        # log Σ exp z = largest + log total. They are kept apart: at logits of 1e4 float32 rounds their sum to 1e-3,
        # and the error would go into every probability.
        largest, total = cosine.new_empty(2, cosine.shape[0], 1)
        of_all = torch.zeros_like(target)
        walk = _Walk(cosine, scale, class_scale, bias, target, labels, angle)
        with without_autocast(cosine):
            for rows in walk.blocks:
                logits = walk.logits(rows, walk.similarity(rows), walk.scratch(rows, 1))
                largest[rows] = logits.amax(1, keepdim=True)
                logits.sub_(largest[rows])
                if sum_weight is not None:
                    of_all[rows] = logits.mv(sum_weight).neg_()
                total[rows] = _exponential_(logits).sum(1, keepdim=True)
            log_total = total.log().squeeze(1)
            of_label = largest.squeeze(1) - target + log_total
            if sum_weight is not None:
                of_all.addcmul_(log_total, sum_weight.sum())
        kept_scale = scale if isinstance(scale, Tensor) else None
        ctx.save_for_backward(cosine, kept_scale, class_scale, bias, target, labels, sum_weight, largest, total)
        return of_label, of_all

    @staticmethod
    def backward(ctx: Any, grad_of_label: Tensor | None, grad_of_all: Tensor | None) -> tuple[Any, ...]:
        cosine, scale, class_scale, bias, target, labels, sum_weight, largest, total = ctx.saved_tensors
        chosen_scale = ctx.scale if scale is None else scale
        if torch.is_grad_enabled():  # create_graph=True
            inputs = (cosine, chosen_scale, class_scale, bias, target, labels, ctx.angle, sum_weight)
            return gradients_of(_plain_cross_entropy, inputs, (grad_of_label, grad_of_all))
        # dz_j = a·(p_j − [j = y]) + b·(Σ_l weight_l · p_j − weight_j), a and b the two given gradients.
        factor = torch.zeros_like(target) if grad_of_label is None else grad_of_label
        if grad_of_all is not None:
            factor = factor + grad_of_all * sum_weight.sum()
        factor = factor.unsqueeze(1) / total
        walk = _Walk(cosine, chosen_scale, class_scale, bias, target, labels, ctx.angle)
        grad_cosine = torch.empty_like(cosine)
        grad_scale = None if scale is None else torch.empty_like(scale)
        grad_class_scale = None if class_scale is None else torch.zeros_like(class_scale)
        grad_bias = None if bias is None else torch.zeros_like(bias)
        grad_target = torch.zeros_like(target) if grad_of_label is None else -grad_of_label
        with without_autocast(cosine):
            for rows in walk.blocks:
                similarity = walk.similarity(rows)
                # First the gradient of the logits, in the place where that of the cosines will stand.
                grad = walk.logits(rows, similarity, grad_cosine[rows])
                _exponential_(grad.sub_(largest[rows])).mul_(factor[rows])
                if grad_of_all is not None:
                    grad.addr_(grad_of_all[rows], sum_weight, alpha=-1)
                column = labels[rows, None]
                grad_target[rows] += grad.gather(1, column).squeeze(1)
                # The target's logit is an input of its own; its cosine takes no part in the sum.
                grad.scatter_(1, column, 0)
                if grad_bias is not None:
                    grad_bias += grad.sum(0)
                if grad_scale is not None:
                    by_class = torch.mul(similarity, grad, out=walk.scratch(rows, 1))
                    if grad_class_scale is None:
                        grad_scale[rows] = by_class.sum(1).mul_(walk.gain)
                    else:
                        grad_scale[rows] = by_class.mv(class_scale)
                        grad_class_scale += by_class.t().mv(scale[rows])
                if class_scale is not None:
                    grad.mul_(class_scale)
                grad.mul_(walk.row_scale(rows))
                _apply_slope(ctx.angle, cosine[rows], similarity, grad)
        return grad_cosine, grad_scale, grad_class_scale, grad_bias, grad_target, None, None, None


class _Walk:
    """The inputs of one call and how a block of rows is made from them."""

    def __init__(
        self,
        cosine: Tensor,
        scale: Tensor | float,
        class_scale: Tensor | None,
        bias: Tensor | None,
        target: Tensor,
        labels: Tensor,
        angle: AngleFunction | None,
    ) -> None:
        self.cosine, self.scale, self.class_scale, self.bias = cosine, scale, class_scale, bias
        self.target, self.labels, self.angle, self.gain = target, labels, angle, _gain(angle)
        count, classes = cosine.shape
        step = block_length(cosine)
        self.blocks = [slice(first, min(first + step, count)) for first in range(0, count, step)]
        self._buffers = cosine.new_empty(2, min(step, count), classes)

    def scratch(self, rows: slice, index: int) -> Tensor:
        """One of two buffers of the block's size, the same for every block."""
        return self._buffers[index, : rows.stop - rows.start]

    def row_scale(self, rows: slice) -> Tensor | float:
        """What a row's g/gain is multiplied by."""
        return self.gain * (self.scale[rows, None] if isinstance(self.scale, Tensor) else self.scale)

    def similarity(self, rows: slice) -> Tensor:
        """g/gain of the block's cosines, in the first buffer where it is not the cosines themselves."""
        return _similarity(self.angle, self.cosine[rows], self.scratch(rows, 0))

    def logits(self, rows: slice, similarity: Tensor, out: Tensor) -> Tensor:
        """The block's logits, the target's among them, written into `out`."""
        torch.mul(similarity, self.row_scale(rows), out=out)
        if self.class_scale is not None:
            out.mul_(self.class_scale)
        if self.bias is not None:
            out.add_(self.bias)
        return out.scatter_(1, self.labels[rows, None], self.target[rows, None])


def _exponential_(exponent: Tensor) -> Tensor:
    """exp of numbers ≤ 0, in place, without subnormal results.

    A probability below 1e-30 (float32) changes no sum, but subnormal numbers slow a processor's exp and the
    matrix products of backward down by an order of magnitude.
    """
    return exponent.clamp_min_(0.8 * math.log(torch.finfo(exponent.dtype).tiny)).exp_()


def _plain_cross_entropy(
    cosine: Tensor,
    scale: Tensor | float,
    class_scale: Tensor | None,
    bias: Tensor | None,
    target: Tensor,
    labels: Tensor,
    angle: AngleFunction | None,
    sum_weight: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The two results of `angular_cross_entropy` by whole-tensor operations."""
    column = labels.unsqueeze(1)
    logits = plain_logits(cosine, scale, class_scale, bias, angle).scatter(1, column, target.unsqueeze(1))
    losses = -logits.log_softmax(1)
    of_label = losses.gather(1, column).squeeze(1)
    return of_label, (torch.zeros_like(of_label) if sum_weight is None else losses.mv(sum_weight))
