"""Losses of a head whose classes are divided among processes (`shard_head`).

The loss is that of the batches of all processes together, and every process returns the same value. Each process
computes the logits of the classes that it owns, with the margins of the labels that it owns.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spherenet.kernels.classes.blockwise import has_kernel
from spherenet.kernels.classes.logits import ClassLogits, DirectLogits, FormulaLogits
from spherenet.kernels.classes.reduction import reduce_classes
from spherenet.kernels.classes.sharded import ShardedOutput, own_rows, total
from spherenet.kernels.dispatch import current_backend
from spherenet.losses.arguments import checked_labels
from spherenet.ops.angular import AngularOutput, Columns, angular_logits

if TYPE_CHECKING:
    from spherenet.losses.base import AngularLoss

__all__ = ["distributed_logits", "loss_on_shards"]


def loss_on_shards(
    loss: AngularLoss, output: ShardedOutput, labels: Tensor, return_scores: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Return what `AngularLoss.forward` returns, for the output of a sharded head.

    Args:
        loss: The loss.
        output: Output of the head.
        labels: Class indices of this process's rows.
        return_scores: Whether to return the predicted classes of this process's rows too.
    """
    shard, num_classes = output.shard, output.shard.num_classes
    if loss.class_weight is not None and len(loss.class_weight) != num_classes:
        raise ValueError(f"class_weight must have {num_classes} entries, got {len(loss.class_weight)}.")
    all_labels = _gather_labels(loss, output, labels)
    ignored = all_labels == loss.ignore_index
    columns = all_labels - shard.first
    columns = columns.masked_fill(ignored | (columns < 0) | (columns >= len(output.weight)), -1)
    classes = multiplicity = None
    if output.sample_rate < 1:
        classes, columns, multiplicity = _sample(output, columns)
    loss = copy.copy(loss)  # with the λ of this step, because backward computes the logits again
    if loss.uses_weight_norm:
        output = _limited(output)

    parameters = [parameter for parameter in loss.parameters() if parameter.requires_grad]
    smoothing = loss.label_smoothing if loss.uses_softmax else 0.0
    reduced = reduce_classes(
        output,
        _class_logits(loss, num_classes, parameters),
        columns,
        softmax=loss.uses_softmax,
        classes=classes,
        multiplicity=multiplicity,
        sum_weight=_own_class_weight(loss, output, classes) if smoothing > 0 else None,
        parameters=parameters,
        predict=return_scores,
    )
    losses = reduced.of_label
    weight = torch.ones_like(losses)
    if loss.class_weight is not None:
        weight = loss.class_weight.to(losses.dtype)[all_labels.masked_fill(ignored, 0).clamp(0, num_classes - 1)]
    losses = weight * losses
    if smoothing > 0:
        losses = (1 - smoothing) * losses + smoothing / num_classes * reduced.of_all
    if losses.device.type != "cpu":  # there, wrong labels raise an error
        losses = losses.masked_fill((all_labels < 0) | (all_labels >= num_classes), torch.nan)
    result = _reduce_rows(loss, output, losses.masked_fill(ignored, 0), weight.masked_fill(ignored, 0), ignored)
    if reduced.prediction is None:
        return result
    return result, reduced.prediction[output.own].reshape(output.leading).clone()  # FSDP warns about views


def _class_logits(loss: AngularLoss, num_classes: int, parameters: Sequence[Tensor]) -> ClassLogits:
    """Return the logits of a loss, without autograd of whole blocks if its angle function has a kernel."""
    has_margin = loss.margin_on == "target"
    if loss.uses_softmax and loss.margin_on != "others" and has_kernel(loss.angle) and current_backend() != "reference":

        def target_similarity(cosine: Tensor) -> Tensor:
            return loss._margin(loss.target_similarity, cosine) if has_margin else loss.similarity(cosine)

        scale = None if loss.uses_weight_norm else loss.scale_for(num_classes)
        return DirectLogits(loss.angle, scale, loss.uses_weight_norm, target_similarity)

    def values_of(angles: AngularOutput, labels: Columns) -> tuple[Tensor, Tensor]:
        return loss.class_values(angles, labels, num_classes)

    return FormulaLogits(values_of, parameters)


def distributed_logits(loss: AngularLoss, output: ShardedOutput) -> Tensor:
    """Return the scores of all rows as a DTensor [N, C] that is sharded by class."""
    from torch.distributed.tensor import DTensor, Shard

    num_classes = output.shard.num_classes
    _require_one_angle(loss)
    terms = loss._terms(output.angles(), num_classes)
    own = angular_logits(*terms, loss.angle)
    scores: Tensor = DTensor.from_local(
        own, output.shard.mesh, [Shard(1)], shape=torch.Size([len(own), num_classes]), stride=(num_classes, 1)
    )
    return scores


def _reduce_rows(loss: AngularLoss, output: ShardedOutput, losses: Tensor, weight: Tensor, ignored: Tensor) -> Tensor:
    """Return the losses of all rows [N] and the penalty of their features, reduced as the loss does."""
    if (penalty := loss.row_penalty(output.feature_norm, output.shard.num_classes)) is not None:
        # Each process contributes its own rows, so that no gradient counts twice.
        rows = torch.zeros_like(ignored)
        rows[output.own] = True
        penalty = total(penalty.masked_fill(ignored | ~rows, 0), output.shard)
    if loss.reduction == "none":
        return own_rows(losses if penalty is None else losses + penalty, output).reshape(output.leading)
    reduced, mean = losses.sum(), loss.reduction == "mean"
    reduced = reduced / weight.sum() if mean else reduced
    if penalty is None:
        return reduced
    return reduced + (penalty.sum() / (~ignored).sum() if mean else penalty.sum())


def _gather_labels(loss: AngularLoss, output: ShardedOutput, labels: Tensor) -> Tensor:
    """Return the class indices of all rows [N]. Wrong labels of one process raise the same error in all of them."""
    shard, device = output.shard, output.weight.device
    message = torch.zeros(max(output.rows) + 1, dtype=torch.int64, device=device)
    error: Exception | None = None
    try:
        _require_one_angle(loss)
        if isinstance(labels, Tensor) and torch.is_floating_point(labels):
            raise TypeError(f"labels must be class indices (int64) if the head is sharded, got {labels.dtype}.")
        own = checked_labels(labels, (*output.leading, shard.num_classes), device, loss.ignore_index)
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


def _require_one_angle(loss: AngularLoss) -> None:
    """Raise ValueError if the angle function has parameters per class, which would have to be sharded too."""
    angle = loss.angle
    if angle is not None and any(tensor.numel() > 1 for tensor in (*angle.parameters(), *angle.buffers())):
        raise ValueError("angle must have the same parameters for all classes if the head is sharded.")


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


def _own_class_weight(loss: AngularLoss, output: ShardedOutput, classes: Tensor | None) -> Tensor:
    """Return the weights of the own classes, or of those that are used."""
    count, first = len(output.weight), output.shard.first
    if loss.class_weight is None:
        return output.weight.new_ones(count if classes is None else len(classes))
    weight = loss.class_weight[first : first + count].to(output.weight.dtype)
    return weight if classes is None else weight[classes]


def _limited(output: ShardedOutput) -> ShardedOutput:
    """Return an output whose feature norms are limited as for an unsharded head, by the largest norm of all weights."""
    weight = output.weight.detach()
    largest = weight.new_ones(())
    if len(weight):
        largest = torch.linalg.vector_norm(weight, dim=1).amax().clamp_min(1)
    limit = torch.finfo(weight.dtype).max ** 0.8 / output.shard.reduce(largest, "MAX")
    limited = copy.copy(output)
    limited.feature_norm = torch.minimum(output.feature_norm, limit)
    return limited
