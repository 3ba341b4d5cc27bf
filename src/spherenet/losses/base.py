"""What every loss of the family shares: logits from an `AngularOutput`, a margin on the target, cross entropy.

A loss is four choices, g, t, scale and class_scale:

    z_ij = scale_i · class_scale_j · g(θ_ij) + b_j
    z_iy = scale_i · class_scale_y · t(θ_iy) + b_y    for the label y, with a margin in t (t = g without one)

b is the head's bias, absent by default.
"""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spherenet.kernels.angular_cross_entropy import (
    angular_cross_entropy,
    has_kernel,
    plain_logits,
    with_label_column,
)
from spherenet.kernels.dispatch import blockwise
from spherenet.losses.labels import check_class_weight, check_labels, check_output
from spherenet.ops.angle_functions import DEFAULT_K, AngleFunction, make_angle
from spherenet.ops.angular_output import AngularOutput
from spherenet.ops.arguments import require_number, require_one_of
from spherenet.ops.margins import same_for_all_classes
from spherenet.ops.norms import working_dtype

__all__ = ["AngularLoss", "CrossEntropyOptions", "angle_of_loss"]

LOSS_ANGLES = ("linear", "cosine", "sigmoid")


class CrossEntropyOptions(TypedDict, total=False):
    """Keyword arguments that every loss takes, with the meaning and default of `AngularLoss`."""

    class_weight: Tensor | None
    ignore_index: int
    label_smoothing: float
    reduction: str


def angle_of_loss(angle: str | AngleFunction, k: float) -> AngleFunction:
    """Return the g that a loss's `angle` and `k` name; k counts for the sigmoid alone."""
    if angle == "learnable":
        raise ValueError(
            'angle must be "linear", "cosine", "sigmoid" or an AngleFunction object, got "learnable": '
            "a loss owns no weights; pass a LearnableSigmoidAngle and give its parameters to the optimiser."
        )
    if isinstance(angle, str):
        require_one_of("angle", angle, LOSS_ANGLES)
    elif not isinstance(angle, AngleFunction):
        raise TypeError(
            f"angle must be one of {', '.join(map(repr, LOSS_ANGLES))} or an AngleFunction object, got {angle!r}."
        )
    if angle == "sigmoid":
        return make_angle(angle, k)
    # The signature's default k is no statement about a g that has none; any other is a mistake.
    if k != DEFAULT_K:
        raise ValueError(f'k must be left out unless angle is "sigmoid", got k={k!r} with angle {angle!r}.')
    return make_angle(angle)


class AngularLoss(nn.Module):
    """Cross entropy on the logits of an `AngularOutput`; the losses of the family subclass it.

    `class_weight` [C], `ignore_index`, `label_smoothing` and `reduction` mean exactly what they mean in
    `torch.nn.functional.cross_entropy`. They act on the cross entropy; a margin stands on the label's class.

    Labels are class indices [*] or, for mixup, probabilities q [*, C]. With the latter every class takes part
    in the margin by its share: z_j = scale·class_scale_j·(q_j·t(θ_j) + (1 − q_j)·g(θ_j)) + b_j (SPEC 1 (5)).

    Logits and loss are computed in float32 at least. Over very many classes hard labels go through a kernel
    that never stores the logits (`kernels.angular_cross_entropy`), with the same result.
    """

    class_weight: Tensor | None
    angle: AngleFunction | None

    def __init__(
        self,
        *,
        angle: AngleFunction | None = None,
        class_weight: Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
    ) -> None:
        """angle: the g of the loss, or None for the cosine as it is, unclamped."""
        super().__init__()
        self.angle = angle
        # A setting, not a state: not saved, as the constructor gives it again.
        self.register_buffer("class_weight", check_class_weight(class_weight), persistent=False)
        if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
            raise TypeError(f"ignore_index must be an integer, got {ignore_index!r}.")
        self.ignore_index = ignore_index
        self.label_smoothing = require_number("label_smoothing", label_smoothing)
        if not 0 <= self.label_smoothing <= 1:
            raise ValueError(f"label_smoothing must be from 0 to 1, got {label_smoothing!r}.")
        self.reduction = require_one_of("reduction", reduction, ("mean", "sum", "none"))

    @property
    def uses_weight_norm(self) -> bool:
        """Whether the length of the class weights changes the loss: in plain softmax alone."""
        return False

    def scale(self, output: AngularOutput) -> Tensor | float:
        """What multiplies a row's similarities: the feature norms [*], or one number."""
        return output.feature_norm

    def class_scale(self, output: AngularOutput) -> Tensor | None:
        """What multiplies a class's similarities [C]; None for weights of unit length."""
        return None

    def target_similarity(self, cosine: Tensor) -> Tensor | None:
        """t(θ), what stands in the target's place of g(θ); None without a margin."""
        return None

    def logits(self, output: AngularOutput) -> Tensor:
        """Return the scores [*, C] of an output [*, C] without labels, hence without margin."""
        flat, scale, class_scale = self._flatten(output)
        return plain_logits(flat.cosine, scale, class_scale, flat.bias, self.angle).reshape(output.cosine.shape)

    def forward(self, output: AngularOutput, labels: Tensor) -> Tensor:
        """Return the loss of labels [*] or probabilities [*, C]: a scalar, or [*] where reduction is "none"."""
        flat, scale, class_scale = self._flatten(output)
        labels = check_labels(labels, output.cosine, self.ignore_index)
        shape = output.cosine.shape[:-1]
        if torch.is_floating_point(labels):
            loss = self._of_probabilities(flat, scale, class_scale, labels.reshape(flat.cosine.shape))
        else:
            loss = self._of_indices(flat, scale, class_scale, labels.reshape(-1))
        return loss.reshape(shape) if self.reduction == "none" else loss

    def extra_repr(self) -> str:
        """Name what differs from the defaults."""
        parts = [] if self.class_weight is None else [f"class_weight=[{len(self.class_weight)}]"]
        defaults = {"ignore_index": -100, "label_smoothing": 0.0, "reduction": "mean"}
        parts += [f"{name}={getattr(self, name)!r}" for name, value in defaults.items() if getattr(self, name) != value]
        return ", ".join(parts)

    def _flatten(self, output: AngularOutput) -> tuple[AngularOutput, Tensor | float, Tensor | None]:
        """The output as [N, C], [N], [C], [C] in the working dtype, its scale and its class scale."""
        cosine, feature_norm, weight_norm, bias = check_output(output)
        dtype = working_dtype(cosine.dtype)
        flat = AngularOutput(
            cosine.to(dtype).reshape(-1, cosine.shape[-1]),
            feature_norm.to(dtype).reshape(-1),
            weight_norm.to(dtype),
            None if bias is None else bias.to(dtype),
        )
        if self.class_weight is not None and len(self.class_weight) != cosine.shape[-1]:
            raise ValueError(f"class_weight must have {cosine.shape[-1]} entries, got {len(self.class_weight)}.")
        return flat, self.scale(flat), self.class_scale(flat)

    def _of_indices(
        self, output: AngularOutput, scale: Tensor | float, class_scale: Tensor | None, labels: Tensor
    ) -> Tensor:
        # An ignored row borrows class 0; the cross entropy drops it.
        columns = labels.masked_fill(labels == self.ignore_index, 0).unsqueeze(1)
        tensors = [tensor for tensor in (*output, scale, labels) if isinstance(tensor, Tensor)]
        if has_kernel(self.angle) and blockwise(output.cosine.numel(), *tensors):
            return self._blockwise(output, scale, class_scale, labels, columns)
        cosine, bias = output.cosine, output.bias
        logits = plain_logits(cosine, scale, class_scale, bias, self.angle)
        target = self._target(cosine, columns)
        if target is not None:
            logits = logits.scatter(1, columns, _logit_at(target, scale, class_scale, bias, columns))
        return self._cross_entropy(logits, labels)

    def _target(self, cosine: Tensor, columns: Tensor) -> Tensor | None:
        """t(θ_y) [N, 1], or None without a margin."""
        if self.angle is None or same_for_all_classes(self.angle):
            return self.target_similarity(cosine.gather(1, columns))
        target = self.target_similarity(cosine)
        return None if target is None else target.gather(1, columns)

    def _of_probabilities(
        self, output: AngularOutput, scale: Tensor | float, class_scale: Tensor | None, labels: Tensor
    ) -> Tensor:
        labels = labels.to(output.cosine.dtype)
        logits = plain_logits(output.cosine, scale, class_scale, output.bias, self.angle)
        target = self.target_similarity(output.cosine)
        if target is not None:
            with_margin = plain_logits(target, scale, class_scale, output.bias, None)
            logits = labels * with_margin + (1 - labels) * logits
        return self._cross_entropy(logits, labels)

    def _cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(
            logits,
            labels,
            None if self.class_weight is None else self.class_weight.to(logits.dtype),
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )

    def _blockwise(
        self,
        output: AngularOutput,
        scale: Tensor | float,
        class_scale: Tensor | None,
        labels: Tensor,
        columns: Tensor,
    ) -> Tensor:
        """The same for maps too large to store their logits."""
        num_classes = output.cosine.shape[1]
        cosine, of_columns = with_label_column(output.cosine, columns)
        target = self.target_similarity(of_columns)
        if target is None:
            target = of_columns if self.angle is None else self.angle(of_columns)
        target_logit = _logit_at(target, scale, class_scale, output.bias, columns).squeeze(1)
        weight = cosine.new_ones(num_classes) if self.class_weight is None else self.class_weight.to(cosine.dtype)
        of_label, of_all = angular_cross_entropy(
            cosine,
            scale,
            class_scale,
            output.bias,
            target_logit,
            columns.squeeze(1),
            self.angle,
            weight if self.label_smoothing > 0 else None,
        )
        weight_of_label = weight.gather(0, columns.squeeze(1))
        losses = weight_of_label * of_label
        if of_all is not None:
            losses = (1 - self.label_smoothing) * losses + self.label_smoothing / num_classes * of_all
        ignored = labels == self.ignore_index
        losses = losses.masked_fill(ignored, 0)
        if self.reduction == "none":
            return losses
        total = losses.sum()
        return total if self.reduction == "sum" else total / weight_of_label.masked_fill(ignored, 0).sum()


def _logit_at(
    similarity: Tensor, scale: Tensor | float, class_scale: Tensor | None, bias: Tensor | None, columns: Tensor
) -> Tensor:
    """The logit of one class a row from its similarity [N, 1]."""
    if class_scale is not None:
        similarity = similarity * class_scale[columns]
    logit = similarity * (scale.unsqueeze(1) if isinstance(scale, Tensor) else scale)
    return logit if bias is None else logit + bias[columns]
