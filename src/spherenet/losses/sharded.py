"""A batch whose classes are divided among processes (`shard_head`).

The loss is that of the batches of all processes together, and every process returns the same value. Each process
computes the logits of the classes that it owns, with the margins of the labels that it owns.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spherenet.errors import InvalidArgument, InvalidArgumentType
from spherenet.kernels.classes.blockwise import has_kernel
from spherenet.kernels.classes.logits import ClassLogits, DirectLogits, FormulaLogits
from spherenet.kernels.classes.reduction import Reduced, Used, reduce_classes
from spherenet.kernels.classes.sharded import ShardedOutput, own_rows, total
from spherenet.kernels.dispatch import allows_kernels
from spherenet.losses.arguments import checked_labels
from spherenet.ops.angular import AngularLogits, AngularOutput, Columns
from spherenet.ops.norms import direction, without_autocast

if TYPE_CHECKING:
    from spherenet.losses.base import AngularLoss
    from spherenet.losses.batch import ClassTerms

__all__ = ["ShardedBatch"]


class ShardedBatch:
    """The rows of all processes, with the classes of this process; it does what `Batch` does.

    Args:
        loss: The loss, for its options.
        output: Output of a sharded head.

    Attributes:
        num_classes: Number of classes of all processes.
        feature_norm: Norms of the features of all processes [N].
    """

    def __init__(self, loss: AngularLoss, output: ShardedOutput) -> None:
        self.loss = copy.copy(loss)  # with the λ of this step, because backward computes the logits again
        self._output = output
        self.num_classes = output.shard.num_classes
        self.feature_norm = output.feature_norm

    def labels(self, labels: Tensor) -> Tensor:
        """Return the class indices of all rows [N]. Wrong labels of one process raise the same error in all of them."""
        output, shard = self._output, self._output.shard
        device = output.weight.device
        message = torch.zeros(max(output.rows) + 1, dtype=torch.int64, device=device)
        error: Exception | None = None
        try:
            if isinstance(labels, Tensor) and torch.is_floating_point(labels):
                raise InvalidArgumentType(
                    "labels", f"must be class indices (int64) if the head is sharded, got {labels.dtype}."
                )
            own = checked_labels(labels, (*output.leading, shard.num_classes), device, self.loss.ignore_index)
            message[1 : own.numel() + 1] = own.reshape(-1)
        except (TypeError, ValueError) as wrong:
            error = wrong
            message[0] = 1
        gathered = shard.gather(message)
        if bool(gathered[:, 0].any()):
            shard.raise_together(error)
        if min(output.rows) == max(output.rows):
            return gathered[:, 1:].flatten()
        return torch.cat([values[1 : count + 1] for values, count in zip(gathered, output.rows, strict=True)])

    def total(self, values: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of values [..., N] over all rows without those ignored, and no gradient."""
        return values.detach().masked_fill(labels == self.loss.ignore_index, 0).sum(-1)

    def label_cosine(self, labels: Tensor) -> Tensor:
        """Return the cosine of each row with its label [N], without a gradient."""
        output, columns = self._output, self._columns(labels)
        weight = output.weight.detach()
        if len(weight) == 0:
            return output.shard.reduce(torch.zeros_like(self.feature_norm))
        with torch.no_grad(), without_autocast(weight):
            directions = direction(weight[columns.clamp_min(0)], -1, output.eps)  # [N, in] or [N, directions, in]
            cosine = torch.einsum("n...i,ni->n...", directions, output.unit_features.detach())
            cosine = cosine if cosine.dim() == 1 else cosine.amax(1)
            return output.shard.reduce(cosine.masked_fill(columns < 0, 0))

    def scores(self, logits: AngularLogits) -> Tensor:
        """Return the logits of all rows without a margin as a DTensor [N, C] that is sharded by class."""
        from torch.distributed.tensor import DTensor, Shard

        _require_one_angle(logits)
        own = logits.scores(self._limited(logits).angles())
        scores: Tensor = DTensor.from_local(
            own,
            self._output.shard.mesh,
            [Shard(1)],
            shape=torch.Size([len(own), self.num_classes]),
            stride=(self.num_classes, 1),
        )
        return scores

    def cross_entropy(self, logits: AngularLogits, labels: Tensor, return_scores: bool) -> tuple[Tensor, Tensor | None]:
        """Return the reduced cross entropy of the logits, and the predicted classes of the own rows if requested."""
        _require_one_angle(logits)
        loss, smoothing = self.loss, self.loss.label_smoothing

        def with_margin(angles: AngularOutput, columns: Columns) -> tuple[Tensor, Tensor]:
            scores = logits.scores(angles)
            return logits.with_margin(scores, angles, columns), scores

        direct = logits.others is None and has_kernel(logits.angle) and allows_kernels()
        values: ClassLogits = DirectLogits(logits) if direct else FormulaLogits(with_margin, self._parameters())
        reduced = self._reduce_classes(self._limited(logits), values, labels, return_scores, softmax=True)
        losses, weight = reduced.of_label, torch.ones_like(reduced.of_label)
        ignored = labels == loss.ignore_index
        if loss.class_weight is not None:
            known = labels.masked_fill(ignored, 0).clamp(0, self.num_classes - 1)
            weight = loss.class_weight.to(losses.dtype)[known]
        losses = weight * losses
        if smoothing > 0:
            losses = (1 - smoothing) * losses + smoothing / self.num_classes * reduced.of_all
        return self._reduced(losses, labels, weight.masked_fill(ignored, 0)), self._predictions(reduced)

    def sum_over_classes(
        self, terms: ClassTerms, logits: AngularLogits, labels: Tensor, return_scores: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the reduced sums of terms over the classes, and the predicted classes of the own rows if requested."""

        def values_of(angles: AngularOutput, columns: Columns) -> tuple[Tensor, Tensor]:
            assert columns.owned is not None
            owned = columns.owned.to(angles.cosine.dtype)
            positive = torch.zeros_like(angles.cosine).scatter(1, columns.column, owned)
            return terms(angles, positive), logits.scores(angles)

        values = FormulaLogits(values_of, self._parameters())
        reduced = self._reduce_classes(self._output, values, labels, return_scores, softmax=False)
        counted = (labels != self.loss.ignore_index).to(reduced.of_label.dtype)
        return self._reduced(reduced.of_label, labels, counted), self._predictions(reduced)

    def reduce(self, rows: Tensor, labels: Tensor) -> Tensor:
        """Return values of the rows [N], reduced as the loss does; ignored rows do not count."""
        # Each process contributes its own rows, so that no gradient counts twice.
        own = torch.zeros_like(labels, dtype=torch.bool)
        own[self._output.own] = True
        counted = (labels != self.loss.ignore_index).to(rows.dtype)
        return self._reduced(total(rows.masked_fill(~own, 0), self._output.shard), labels, counted)

    def _reduced(self, rows: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
        """Return values that all processes have for all rows [N], reduced; a mean is divided by the sum of weights."""
        output, ignored = self._output, labels == self.loss.ignore_index
        if rows.device.type != "cpu":  # there, wrong labels raise an error
            rows = rows.masked_fill((labels < 0) | (labels >= self.num_classes), torch.nan)
        rows = rows.masked_fill(ignored, 0)
        if self.loss.reduction == "none":
            return own_rows(rows, output).reshape(output.leading)
        return rows.sum() if self.loss.reduction == "sum" else rows.sum() / weight.sum()

    def _reduce_classes(
        self, output: ShardedOutput, values: ClassLogits, labels: Tensor, predict: bool, *, softmax: bool
    ) -> Reduced:
        """Return the reductions over the classes of all processes, or over a sample of them."""
        columns = self._columns(labels)
        classes = multiplicity = None
        if output.sample_rate < 1:
            classes, columns, multiplicity = _sample(output, columns)
        smooth = softmax and self.loss.label_smoothing > 0
        used = Used(columns, classes, multiplicity, self._own_class_weight(classes) if smooth else None)
        return reduce_classes(output, values, used, softmax=softmax, parameters=self._parameters(), predict=predict)

    def _columns(self, labels: Tensor) -> Tensor:
        """Return the index of each row's label among the own classes [N], −1 if another process owns it."""
        columns = labels - self._output.shard.first
        elsewhere = (labels == self.loss.ignore_index) | (columns < 0) | (columns >= len(self._output.weight))
        return columns.masked_fill(elsewhere, -1)

    def _predictions(self, reduced: Reduced) -> Tensor | None:
        """Return the predicted classes of the own rows."""
        if reduced.prediction is None:
            return None
        return reduced.prediction[self._output.own].reshape(self._output.leading).clone()  # FSDP warns about views

    def _parameters(self) -> list[Tensor]:
        """Return the trained parameters of the loss, e.g. of its angle function."""
        return [parameter for parameter in self.loss.parameters() if parameter.requires_grad]

    def _own_class_weight(self, classes: Tensor | None) -> Tensor:
        """Return the weights of the own classes, or of those that are used."""
        output, class_weight = self._output, self.loss.class_weight
        count, first = len(output.weight), output.shard.first
        if class_weight is None:
            return output.weight.new_ones(count if classes is None else len(classes))
        weight = class_weight[first : first + count].to(output.weight.dtype)
        return weight if classes is None else weight[classes]

    def _limited(self, logits: AngularLogits) -> ShardedOutput:
        """Return an output with feature norms limited as by `Batch`, by the largest norm of all weights."""
        output = self._output
        if not logits.uses_weight_norm or output.weight.dim() == 3:
            return output
        weight = output.weight.detach()
        largest = weight.new_ones(())
        if len(weight):
            largest = torch.linalg.vector_norm(weight, dim=1).amax().clamp_min(1)
        limit = torch.finfo(weight.dtype).max ** 0.8 / output.shard.reduce(largest, "MAX")
        limited = copy.copy(output)
        limited.feature_norm = torch.minimum(output.feature_norm, limit)
        return limited


def _require_one_angle(logits: AngularLogits) -> None:
    """Raise ValueError if the angle function has parameters per class, which would have to be sharded too."""
    angle = logits.angle
    if angle is not None and any(tensor.numel() > 1 for tensor in (*angle.parameters(), *angle.buffers())):
        raise InvalidArgument("angle", "must have the same parameters for all classes if the head is sharded.")


def _sample(output: ShardedOutput, columns: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Draw some of the own classes: all labels of the batch, and others at random.

    Returns:
        The classes in ascending order, the columns of the labels among them, and how many classes each one stands for:
        1 for a label; for another class its number of classes per drawn one, so that sums over all classes, such as
        the denominator of the softmax, have the right expectation. (None, columns, None) if all classes are used.
    """
    count = len(output.weight)
    labels = torch.unique(columns[columns >= 0])
    drawn = max(round(output.sample_rate * count), len(labels) + 1)
    if drawn >= count:
        return None, columns, None
    keys = torch.rand(count, device=columns.device)
    keys[labels] = 2.0
    classes = keys.topk(drawn).indices.sort().values
    multiplicity = output.weight.new_full((drawn,), (count - len(labels)) / (drawn - len(labels)))
    multiplicity[torch.searchsorted(classes, labels)] = 1.0
    columns = torch.where(columns >= 0, torch.searchsorted(classes, columns), -1)
    return classes, columns, multiplicity
