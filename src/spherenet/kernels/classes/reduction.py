"""Reductions over the classes of all processes, a block of classes at a time.

A process computes values of the rows of all processes for its own classes only, and reduces them:

    of_label_i = log Σ_j exp z_ij − z_iy,    of_all_i = Σ_j weight_j·(log Σ_l exp z_il − z_ij),    or    Σ_j v_ij

The processes exchange the largest logit and a few sums per row. Neither cosines nor logits are stored: backward
computes each block again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spherenet.kernels.classes.blockwise import BLOCK_ELEMENTS, BLOCK_ELEMENTS_ELSEWHERE, exponential_
from spherenet.kernels.classes.logits import ClassLogits
from spherenet.kernels.classes.sharded import ClassShard, ShardedOutput
from spherenet.ops.angular import AngularOutput, Columns, finite
from spherenet.ops.norms import SHRINK, without_autocast

__all__ = ["Reduced", "Used", "reduce_classes"]


class Reduced(NamedTuple):
    """Result of `reduce_classes`, the same in all processes.

    Attributes:
        of_label: log Σ exp z − z_y [N], or Σ v.
        of_all: Σ_j weight_j·(log Σ exp z − z_j) [N] if weights were given, else zeros.
        prediction: Class with the largest score [N], or None.
    """

    of_label: Tensor
    of_all: Tensor
    prediction: Tensor | None


class Used(NamedTuple):
    """Own classes that a reduction uses."""

    columns: Tensor
    """Index of each row's label among them [N], −1 if it is not among them."""

    classes: Tensor | None = None
    """Their indices among all own classes, ascending [S]; None for all."""

    multiplicity: Tensor | None = None
    """How many classes each of them stands for [S]; None for 1."""

    sum_weight: Tensor | None = None
    """Weight of each of them in `of_all` [S]."""


def reduce_classes(
    output: ShardedOutput,
    logits: ClassLogits,
    used: Used,
    *,
    softmax: bool,
    parameters: Sequence[Tensor] = (),
    predict: bool = False,
) -> Reduced:
    """Reduce values of all rows over the classes of all processes.

    Args:
        output: Output of the head.
        logits: Values and scores of a block of classes. Backward computes them again.
        used: Own classes to use.
        softmax: Whether the values are logits of a softmax; otherwise they are summed.
        parameters: Parameters that they depend on besides the angles; their gradients are summed.
        predict: Whether to return the predicted classes.
    """
    weight, bias, classes = output.weight, output.bias, used.classes
    if classes is not None:
        weight, bias = weight.index_select(0, classes), None if bias is None else bias.index_select(0, classes)
    plan = _Plan(logits, output.shard, output.eps, softmax, classes, predict)
    inputs = _Inputs(
        output.unit_features, output.feature_norm, weight, bias, used.columns, used.multiplicity, used.sum_weight
    )
    of_label, of_all, prediction = _ReduceClasses.apply(plan, *inputs, *parameters)  # type: ignore[no-untyped-call]
    return Reduced(of_label, of_all, prediction if predict else None)


@dataclass(frozen=True)
class _Plan:
    """Arguments of `reduce_classes` that are not tensors with gradients."""

    logits: ClassLogits
    shard: ClassShard
    eps: float
    softmax: bool
    classes: Tensor | None
    predict: bool


class _Inputs(NamedTuple):
    """Tensors of `reduce_classes`, restricted to the classes that it uses."""

    features: Tensor
    norm: Tensor
    weight: Tensor
    bias: Tensor | None
    columns: Tensor
    multiplicity: Tensor | None
    sum_weight: Tensor | None


class _Blocks:
    """Angles of one block of classes after the other, in the same memory."""

    def __init__(self, inputs: _Inputs, eps: float) -> None:
        features, weight = inputs.features, inputs.weight
        self.features, self.norm, self.weight, self.bias, self.columns, *_ = inputs
        self.eps = eps
        elements = BLOCK_ELEMENTS.get(weight.device.type, BLOCK_ELEMENTS_ELSEWHERE)
        count = len(weight)
        self.directions = weight.shape[1] if weight.dim() == 3 else 1
        self.step = max(1, min(count, elements // max(1, self.directions * max(len(features), weight.shape[-1]))))
        self.starts = range(0, count, self.step)
        self._unit = weight.new_empty(min(self.step, count) * self.directions, weight.shape[-1])
        self._cosine = features.new_empty(len(features) * len(self._unit))
        self._nearest: Tensor | None = None

    def at(self, first: int) -> tuple[slice, Tensor, Tensor, AngularOutput, Columns]:
        """Return the classes of a block, their directions and norms, their angles and the columns of the labels."""
        classes = slice(first, min(first + self.step, len(self.weight)))
        rows = self.weight[classes].flatten(0, -2)
        unit = self._unit[: len(rows)]
        # `ops.norms.norm` without its temporaries.
        squares = torch.mul(rows, SHRINK, out=unit).square_().sum(1, keepdim=True)
        length = squares.add_(self.eps * SHRINK**2).sqrt_().div_(SHRINK)
        torch.div(rows, length, out=unit)
        cosine = self._cosine[: len(self.features) * len(rows)].view(len(self.features), len(rows))
        torch.mm(self.features, unit.t(), out=cosine)
        bias = None if self.bias is None else self.bias[classes]
        class_norm = finite(length.squeeze(1), self.eps)
        if self.directions > 1:
            cosine, self._nearest = cosine.view(len(self.features), -1, self.directions).max(2)
            class_norm = torch.ones_like(class_norm[: cosine.shape[1]])
        columns = (self.columns - first).unsqueeze(1)
        owned = (columns >= 0) & (columns < cosine.shape[1]) & (self.columns >= 0).unsqueeze(1)
        angles = AngularOutput(cosine, self.norm, class_norm, bias)
        return classes, unit, length, angles, Columns(columns.masked_fill(~owned, 0), owned)

    def of_directions(self, grad: Tensor) -> Tensor:
        """Return the gradient of the cosines of all directions from that of the classes' cosines of the last block."""
        if self._nearest is None:
            return grad
        every = grad.new_zeros(*grad.shape, self.directions)
        return every.scatter_(2, self._nearest.unsqueeze(2), grad.unsqueeze(2)).flatten(1)


class _ReduceClasses(torch.autograd.Function):
    """The results of `reduce_classes`, one block of classes at a time; inputs are `_Inputs` and parameters."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, *tensors: Any) -> tuple[Tensor, Tensor, Tensor]:
        inputs, parameters = _Inputs(*tensors[:7]), tensors[7:]
        features, norm, _, _, columns, multiplicity, sum_weight = inputs
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        factor = sum_weight if sum_weight is None or multiplicity is None else sum_weight * multiplicity
        count = len(features)
        # Largest logit and largest score of each row; sums Σ exp(z − largest), z_y, Σ weight, Σ weight·(z − largest).
        largest, best = features.new_full((2, count), -torch.inf)
        sums = features.new_zeros(4, count)
        choice = columns.new_zeros(count)
        blocks = _Blocks(inputs, plan.eps)
        with without_autocast(features):
            for first in blocks.starts:
                classes, _, _, angles, label = blocks.at(first)
                values, best_of_block = plan.logits.values(angles, label, predict=plan.predict)
                copies = None if multiplicity is None else multiplicity[classes]
                if best_of_block is not None:
                    highest, position = best_of_block
                    better = highest > best
                    choice = torch.where(better, position + first, choice)
                    best = torch.where(better, highest, best)
                if not plan.softmax:
                    sums[0] += values.sum(1) if copies is None else values.mv(copies)
                    continue
                before, largest = largest, torch.maximum(largest, values.amax(1))
                _rebase(sums, before, largest)
                assert label.owned is not None
                sums[1] += torch.where(label.owned, values.gather(1, label.column), 0).squeeze(1)
                relative = values.sub_(largest.unsqueeze(1))
                if factor is not None:
                    sums[2] += factor[classes].sum()
                    sums[3] += relative.mv(factor[classes])
                exponential_(relative)
                sums[0] += relative.sum(1) if copies is None else relative.mv(copies)
        own_best, before = best, largest
        if plan.softmax or plan.predict:
            largest, best = plan.shard.reduce(torch.stack([largest, best]), "MAX")
        if plan.softmax:
            _rebase(sums, before, largest)
            # Relative to the largest logit, so that the difference of two large logits keeps its digits.
            sums[1] = torch.where(columns >= 0, sums[1] - largest, 0)
        if plan.predict:
            choice = choice if plan.classes is None or len(plan.classes) == 0 else plan.classes[choice]
            is_best = (own_best == best) & (own_best > -torch.inf)
            choice = plan.shard.reduce(torch.where(is_best, choice + plan.shard.first, plan.shard.num_classes), "MIN")
            choice = torch.where(choice < plan.shard.num_classes, choice, 0)  # all scores of the row are NaN
        sums = plan.shard.reduce(sums)
        ctx.save_for_backward(*inputs._replace(sum_weight=factor), largest, sums, *parameters)
        ctx.mark_non_differentiable(choice)
        if not plan.softmax:
            return sums[0].clone(), torch.zeros_like(norm), choice
        log_total = sums[0].log()
        return log_total - sums[1], log_total * sums[2] - sums[3], choice

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_label: Tensor | None, grad_all: Tensor | None, _: Any) -> tuple[Any, ...]:
        inputs = _Inputs(*ctx.saved_tensors[:7])
        features, norm, weight, bias, _, multiplicity, factor = inputs
        largest, sums, *parameters = ctx.saved_tensors[7:]
        plan: _Plan = ctx.plan
        grad_label = torch.zeros_like(norm) if grad_label is None else grad_label
        grad_all = None if factor is None else grad_all
        # dz_j = a·(p_j − [j = y]) + b·(Σ_l weight_l·p_j − weight_j), with a and b the gradients of the two results.
        slope = grad_label if grad_all is None else grad_label + grad_all * sums[2]
        slope = (slope / sums[0]).unsqueeze(1) if plan.softmax else grad_label.unsqueeze(1)
        grad_features, grad_norm = torch.zeros_like(features), torch.zeros_like(norm)
        grad_weight = torch.empty_like(weight)
        grad_bias = None if bias is None else torch.empty_like(bias)
        grad_parameters = [torch.zeros_like(parameter) for parameter in parameters]
        blocks = _Blocks(inputs, plan.eps)
        with without_autocast(features):
            for first in blocks.starts:
                classes, unit, length, angles, label = blocks.at(first)
                values, _ = plan.logits.values(angles, label, differentiate=True)
                if plan.softmax:
                    grad = exponential_(values.sub_(largest.unsqueeze(1))).mul_(slope)
                else:
                    grad = values.copy_(slope.expand_as(values))
                if multiplicity is not None:
                    grad.mul_(multiplicity[classes])
                if plan.softmax:
                    assert label.owned is not None
                    grad.scatter_add_(1, label.column, torch.where(label.owned, -grad_label.unsqueeze(1), 0))
                if grad_all is not None:
                    assert factor is not None
                    grad.addr_(grad_all, factor[classes], alpha=-1)
                of_block = plan.logits.gradient(grad)
                block = grad_weight[classes].flatten(0, -2)
                grad_cosine = blocks.of_directions(of_block.cosine)
                # d(w/‖w‖) = (I − uuᵀ)/‖w‖ and d‖w‖ = u, with u = w/‖w‖; eps is inside ‖w‖ and changes neither.
                grad_features.addmm_(grad_cosine, unit)
                torch.mm(grad_cosine.t(), features, out=block)
                radial = (block * unit).sum(1, keepdim=True)
                block.addcmul_(unit, radial, value=-1).div_(length)
                if of_block.length is not None and blocks.directions == 1:
                    block.addcmul_(unit, of_block.length.unsqueeze(1))
                if of_block.norm is not None:
                    grad_norm += of_block.norm
                if grad_bias is not None:
                    grad_bias[classes] = 0 if of_block.bias is None else of_block.bias
                for sum_of_blocks, gradient in zip(grad_parameters, of_block.parameters, strict=False):
                    sum_of_blocks += 0 if gradient is None else gradient
        grad_parameters = [plan.shard.reduce(grad) for grad in grad_parameters]
        return None, grad_features, grad_norm, grad_weight, grad_bias, None, None, None, *grad_parameters


def _rebase(sums: Tensor, before: Tensor, after: Tensor) -> None:
    """Make sums relative to another largest logit, in place. Without any classes it is −inf and the sums are 0."""
    sums[0] *= (before - after).exp()
    sums[3] += sums[2] * torch.where(before.isinf(), 0, before - after)
