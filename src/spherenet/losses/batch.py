"""A batch as a loss sees it: rows, labels and classes, and sums over them.

`batch_of` alone decides how a loss is computed. If the classes are divided among processes, by `losses/sharded.py`;
otherwise here, by tensor operations or, for very many classes, in blocks that never store all logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from spherenet._util.validation import require_floating
from spherenet.errors import InvalidArgument, InvalidArgumentType
from spherenet.kernels.classes.blockwise import angular_cross_entropy, has_kernel, with_label_column
from spherenet.kernels.classes.sharded import ShardedOutput, sum_over_processes
from spherenet.kernels.dispatch import blockwise
from spherenet.losses.arguments import checked_labels
from spherenet.losses.sharded import ShardedBatch
from spherenet.ops.angular import AngularLogits, AngularOutput, Columns
from spherenet.ops.norms import working_dtype

if TYPE_CHECKING:
    from spherenet.losses.base import AngularLoss

__all__ = ["AnyBatch", "Batch", "ClassTerms", "batch_of"]

ClassTerms: TypeAlias = Callable[[AngularOutput, Tensor], Tensor]
"""Function of angles and probabilities of the labels [N, C] that returns the terms of a sum over the classes [N, C]."""


class Batch:
    """The rows of a head's output, with all classes in this process.

    Args:
        loss: The loss, for its options.
        output: Output of a head.

    Attributes:
        num_classes: Number of classes C.
        feature_norm: Norms of the features [N].
    """

    def __init__(self, loss: AngularLoss, output: AngularOutput) -> None:
        if not isinstance(output, AngularOutput):
            raise InvalidArgumentType(
                "output", f"must be an AngularOutput of an AngularHead, got {type(output).__name__}."
            )
        cosine, feature_norm, weight_norm, bias = output
        if not isinstance(cosine, Tensor) or not cosine.is_floating_point():
            require_floating("output.cosine", cosine)
        self.loss, self._shape = loss, cosine.shape
        if cosine.dim() < 1 or cosine.shape[-1] < 2:
            raise InvalidArgument(
                "output.cosine", f"must have at least 2 classes in its last dimension, got {list(cosine.shape)}."
            )
        rows, classes = cosine.shape[:-1], cosine.shape[-1:]
        for name, tensor, shape in (
            ("feature_norm", feature_norm, rows),
            ("weight_norm", weight_norm, classes),
            ("bias", bias, classes),
        ):
            if tensor is not None and tensor.shape != shape:
                raise InvalidArgument(
                    f"output.{name}",
                    f"must have shape {list(shape)} for cosines of shape {list(cosine.shape)}, "
                    f"got {list(tensor.shape)}.",
                )
        dtype = working_dtype(cosine.dtype)
        self.num_classes = cosine.shape[-1]
        self.feature_norm = feature_norm.to(dtype).reshape(-1)
        self.angles = AngularOutput(
            cosine.to(dtype).reshape(math.prod(rows), self.num_classes),
            self.feature_norm,
            weight_norm.to(dtype),
            None if bias is None else bias.to(dtype),
        )

    def labels(self, labels: Tensor) -> Tensor:
        """Return checked labels: class indices [N] or probabilities [N, C]."""
        cosine = self.angles.cosine
        labels = checked_labels(labels, self._shape, cosine.device, self.loss.ignore_index)
        if torch.is_floating_point(labels):
            return labels.to(cosine.dtype).reshape(cosine.shape)
        return labels.reshape(-1)

    def total(self, values: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of values [..., N] over the rows of all processes without those ignored, and no gradient."""
        values = values.detach()
        if not torch.is_floating_point(labels):
            values = values.masked_fill(labels == self.loss.ignore_index, 0)
        return sum_over_processes(values.sum(-1))

    def label_cosine(self, labels: Tensor) -> Tensor:
        """Return the cosine of each row with its label [N], without a gradient."""
        return self.angles.cosine.detach().gather(1, self._column(labels)).squeeze(1)

    def scores(self, logits: AngularLogits) -> Tensor:
        """Return the logits without a margin [*, C]."""
        return self._shaped(logits.scores(self._limited(logits)))

    def cross_entropy(self, logits: AngularLogits, labels: Tensor, return_scores: bool) -> tuple[Tensor, Tensor | None]:
        """Return the reduced cross entropy of the logits, and the scores if requested."""
        loss, angles = self.loss, self._limited(logits)
        soft = torch.is_floating_point(labels)
        in_blocks = (
            not soft
            and blockwise(angles.cosine.numel(), *angles[:3], labels if angles.bias is None else angles.bias, labels)
            and has_kernel(logits.angle)
            and logits.others is None  # the kernel has one g for all classes but the label's
        )
        scores = None if in_blocks and not return_scores else logits.scores(angles)
        if in_blocks:
            value = self._in_blocks(logits, angles, labels)
        else:
            assert scores is not None
            with_margin = logits.with_margin(scores, angles, labels if soft else Columns(self._column(labels)))
            value = F.cross_entropy(
                with_margin,
                labels,
                None if loss.class_weight is None else loss.class_weight.to(scores.dtype),
                ignore_index=loss.ignore_index,
                reduction=loss.reduction,
                label_smoothing=loss.label_smoothing,
            )
        if loss.reduction == "none":
            value = value.reshape(self._shape[:-1])
        return value, (self._shaped(scores) if return_scores and scores is not None else None)

    def sum_over_classes(
        self, terms: ClassTerms, logits: AngularLogits, labels: Tensor, return_scores: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the reduced sums of terms over the classes, and the scores if requested."""
        positive = labels
        if not torch.is_floating_point(labels):
            positive = torch.zeros_like(self.angles.cosine).scatter(1, self._column(labels), 1.0)
        value = self.reduce(terms(self.angles, positive).sum(1), labels)
        return value, (self.scores(logits) if return_scores else None)

    def reduce(self, rows: Tensor, labels: Tensor) -> Tensor:
        """Return values of the rows [N], reduced as the loss does; ignored rows do not count."""
        count: Tensor | int = len(rows)
        if not torch.is_floating_point(labels):
            ignored = labels == self.loss.ignore_index
            rows, count = rows.masked_fill(ignored, 0), (~ignored).sum()
        if self.loss.reduction == "none":
            return rows.reshape(self._shape[:-1])
        return rows.sum() if self.loss.reduction == "sum" else rows.sum() / count

    def _in_blocks(self, logits: AngularLogits, angles: AngularOutput, labels: Tensor) -> Tensor:
        """Return the cross entropy of class indices without storing the logits."""
        loss, column = self.loss, self._column(labels)
        cosine, label_cosine = with_label_column(angles.cosine, column)
        angles = angles._replace(cosine=cosine)
        label_bias = None if angles.bias is None else angles.bias[column]
        norm, class_norm = angles.feature_norm.unsqueeze(1), angles.weight_norm[column]
        target = logits.label_logit(label_cosine, norm, class_norm, label_bias).squeeze(1)
        weight = cosine.new_ones(self.num_classes) if loss.class_weight is None else loss.class_weight.to(cosine.dtype)
        sum_weight = weight if loss.label_smoothing > 0 else None
        of_label, of_all = angular_cross_entropy(angles, logits, target, column.squeeze(1), sum_weight)
        weight_of_label = weight.gather(0, column.squeeze(1))
        losses = weight_of_label * of_label
        if of_all is not None:
            losses = (1 - loss.label_smoothing) * losses + loss.label_smoothing / self.num_classes * of_all
        ignored = labels == loss.ignore_index
        losses = losses.masked_fill(ignored, 0)
        if loss.reduction == "none":
            return losses
        total = losses.sum()
        return total if loss.reduction == "sum" else total / weight_of_label.masked_fill(ignored, 0).sum()

    def _column(self, labels: Tensor) -> Tensor:
        """Return class indices as [N, 1]; ignored rows get class 0, and the reduction drops them."""
        return labels.masked_fill(labels == self.loss.ignore_index, 0).unsqueeze(1)

    def _limited(self, logits: AngularLogits) -> AngularOutput:
        """Return angles with limited feature norms: products of two norms can overflow, and then softmax is NaN."""
        if not logits.uses_weight_norm:
            return self.angles
        _, feature_norm, weight_norm, _ = self.angles
        largest = torch.finfo(weight_norm.dtype).max ** 0.8 / weight_norm.detach().amax().clamp_min(1)
        return self.angles._replace(feature_norm=torch.minimum(feature_norm, largest))

    def _shaped(self, scores: Tensor) -> Tensor:
        """Return scores [*, C], not a view if it is not necessary: FSDP warns about views."""
        return scores if scores.shape == self._shape else scores.reshape(self._shape)


AnyBatch: TypeAlias = Batch | ShardedBatch


def batch_of(loss: AngularLoss, output: AngularOutput | ShardedOutput) -> AnyBatch:
    """Return the batch of a head's output."""
    batch = ShardedBatch(loss, output) if isinstance(output, ShardedOutput) else Batch(loss, output)
    if loss.class_weight is not None and len(loss.class_weight) != batch.num_classes:
        raise InvalidArgument("class_weight", f"must have {batch.num_classes} entries, got {len(loss.class_weight)}.")
    return batch
