"""Values of a block of classes of a sharded head, and their gradients: by a formula, or directly in two buffers.

`reduce_classes` calls `values` for every block in forward, and again in backward, followed by `gradient`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from spherenet.kernels.classes.blockwise import factors_of
from spherenet.ops.angular import AngularLogits, AngularOutput, Columns

__all__ = ["BlockGradient", "ClassLogits", "DirectLogits", "FormulaLogits", "ValuesOf"]

ValuesOf: TypeAlias = Callable[[AngularOutput, Columns], tuple[Tensor, Tensor]]
"""Function of the angles of a block of classes that returns values [N, classes] and scores [N, classes]."""


class BlockGradient(NamedTuple):
    """Gradients of the angles of a block and of parameters; None for those that have none."""

    cosine: Tensor
    norm: Tensor | None
    length: Tensor | None
    bias: Tensor | None
    parameters: Sequence[Tensor | None] = ()


class FormulaLogits:
    """Values by a function, differentiated by autograd.

    Args:
        values_of: The function.
        parameters: Parameters that it depends on besides the angles.
    """

    def __init__(self, values_of: ValuesOf, parameters: Sequence[Tensor]) -> None:
        self._values_of, self._parameters = values_of, list(parameters)
        self._leaves: list[Tensor] = []
        self._values = torch.empty(0)

    def values(
        self, angles: AngularOutput, label: Columns, *, predict: bool = False, differentiate: bool = False
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Return values, which the caller may overwrite, and the largest score of each row and its class."""
        self._leaves = [tensor.detach().requires_grad_(differentiate) for tensor in angles if tensor is not None]
        with torch.set_grad_enabled(differentiate):
            values, scores = self._values_of(AngularOutput(*self._leaves), label)
        self._values = values if differentiate else torch.empty(0)
        best = tuple(scores.max(1)) if predict else None
        return (values.detach().clone() if differentiate else values), best  # type: ignore[return-value]

    def gradient(self, grad: Tensor) -> BlockGradient:
        """Return the gradients for that of the values of the last block, which may be overwritten."""
        inputs = [*self._leaves, *self._parameters]
        cosine, norm, length, *rest = torch.autograd.grad(self._values, inputs, grad, allow_unused=True)
        bias = rest.pop(0) if len(self._leaves) == 4 else None
        return BlockGradient(cosine, norm, length, bias, rest)


class DirectLogits:
    """Logits scale_i·length_j·g(c_ij) + b_j, with a margin on the label's class or none, for a g with factors.

    Args:
        logits: Logits whose g has a kernel (`blockwise.has_kernel`), without a margin on the other classes.
    """

    def __init__(self, logits: AngularLogits) -> None:
        self._logits, self._angle, self._scale = logits, logits.angle, logits.scale
        self._uses_length = logits.uses_weight_norm
        self._inner, self._gain = factors_of(logits.angle)
        self._buffers = torch.empty(2, 0)

    def values(
        self, angles: AngularOutput, label: Columns, *, predict: bool = False, differentiate: bool = False
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Return values, which the caller may overwrite, and the largest score of each row and its class."""
        cosine, norm, length, bias = angles
        if self._buffers.shape[1] < cosine.numel() or self._buffers.dtype != cosine.dtype:
            self._buffers = cosine.new_empty(2, cosine.numel())
        similarity, logits = self._buffers[:, : cosine.numel()].view(2, *cosine.shape)
        if self._angle is None:
            similarity = cosine
        else:
            similarity = self._angle.shape(torch.clamp(cosine, -1, 1, out=similarity), self._inner, similarity)
        row_scale = self._gain * (norm.unsqueeze(1) if self._scale is None else self._scale)
        torch.mul(similarity, row_scale, out=logits)
        if self._uses_length:
            logits.mul_(length)
        if bias is not None:
            logits.add_(bias)
        best = tuple(logits.max(1)) if predict else None
        column, owned = label
        assert owned is not None
        inputs = [cosine.gather(1, column), norm.unsqueeze(1), length[column], None if bias is None else bias[column]]
        self._inputs = [None if tensor is None else tensor.detach().requires_grad_(differentiate) for tensor in inputs]
        with torch.set_grad_enabled(differentiate):
            self._target = self._logits.label_logit(*self._inputs)  # type: ignore[arg-type]
        logits.scatter_(1, column, torch.where(owned, self._target.detach(), logits.gather(1, column)))
        self._block = (angles, label, similarity, row_scale)
        return logits, best

    def gradient(self, grad: Tensor) -> BlockGradient:
        """Return the gradients for that of the values of the last block, which may be overwritten."""
        angles, (column, owned), similarity, row_scale = self._block
        cosine, norm, length, bias = angles
        assert owned is not None
        at_label = grad.gather(1, column)
        grad.scatter_(1, column, torch.where(owned, 0, at_label))  # the label's logit has another similarity
        of_bias = None if bias is None else grad.sum(0)
        of_norm = of_length = None
        if self._scale is None or self._uses_length:
            by_class = similarity * grad
            if self._scale is None:
                of_norm = (by_class.mv(length) if self._uses_length else by_class.sum(1)).mul_(self._gain)
            if self._uses_length:
                scale = norm if self._scale is None else torch.full_like(norm, self._scale)
                of_length = by_class.t().mv(scale).mul_(self._gain)
        if self._uses_length:
            grad.mul_(length)
        grad.mul_(row_scale)
        if self._angle is not None:
            self._angle.multiply_by_slope_(grad, cosine, similarity, self._inner)
        leaves = [tensor for tensor in self._inputs if tensor is not None]
        at_label = torch.where(owned, at_label, 0)
        of_label = torch.autograd.grad(self._target, leaves, at_label, allow_unused=True)
        grad.scatter_add_(1, column, of_label[0])
        if of_label[1] is not None:
            of_norm = of_label[1].squeeze(1) if of_norm is None else of_norm.add_(of_label[1].squeeze(1))
        for total, of_target in ((of_length, of_label[2]), (of_bias, of_label[-1])):
            if total is not None and of_target is not None:
                total.index_add_(0, column.squeeze(1), of_target.squeeze(1))
        return BlockGradient(grad, of_norm, of_length, of_bias)


ClassLogits: TypeAlias = FormulaLogits | DirectLogits
