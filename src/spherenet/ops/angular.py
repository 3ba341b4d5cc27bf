"""Cosines between features and class weights, logits and additive margins (docs/concepts.md, Eq. 5 to 8).

The multiplicative margin ψ_m is a method of the angle function (`AngleFunction.psi`). All functions take c = cos θ and
have gradients that are finite at θ = 0 and θ = π.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from spherenet.angles import AngleFunction, CosineAngle, angle_from_cosine
from spherenet.angles.elementary import clamp_rounding
from spherenet.ops.norms import norm

__all__ = [
    "AngularLogits",
    "AngularOutput",
    "Columns",
    "Similarity",
    "additive_angle",
    "additive_cosine",
    "angular_cosine",
    "finite",
    "nearest_direction",
    "unit_features",
]

Similarity: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Function of cosines [N, C] or [N, 1] and feature norms [N, 1]."""

_COSINE = CosineAngle()


class AngularOutput(NamedTuple):
    """Angles and norms of features and class weights: cos θ_ij, ‖x_i‖, ‖w_j‖ and b_j.

    The inner product of plain softmax is weight_norm_j · feature_norm_i · cosine_ij + bias_j; angular losses leave out
    one norm or both. All are float32 if features and weights are half precision.

    Shape:
        cosine [*, C], feature_norm [*], weight_norm [C], bias [C] or None.
    """

    cosine: Tensor
    feature_norm: Tensor
    weight_norm: Tensor
    bias: Tensor | None = None


class Columns(NamedTuple):
    """Column of each row's label among the classes of an output.

    Attributes:
        column: Columns [N, 1]; 0 if the label is not among these classes.
        owned: Whether the label is among them [N, 1]; None if all labels are.
    """

    column: Tensor
    owned: Tensor | None = None


def angular_cosine(unit_features: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return cos θ [N, C] and ‖w‖ [C] from unit features [N, in] and weights [C, in]."""
    length = norm(weight, 1, eps)
    return F.linear(unit_features, weight / length), length.squeeze(1)


def unit_features(features: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return features/‖x‖ and ‖x‖ [*, 1] in the working dtype; a feature whose squares overflow counts as zero."""
    length = norm(features, -1, eps)
    overflowed = length.isinf()
    length = length.masked_fill(overflowed, eps**0.5)
    return features.to(length.dtype).masked_fill(overflowed, 0) / length, length


def finite(length: Tensor, eps: float) -> Tensor:
    """Return norms of weights, with that of a zero weight in place of infinite ones."""
    return length.masked_fill(length.isinf(), eps**0.5)


def nearest_direction(cosine: Tensor, directions: int) -> tuple[Tensor, Tensor]:
    """Return the largest cosine of each class [N, C] from those of all its directions [N, C · directions].

    The second result is the norm of a class, which is 1: the norms of its directions have no meaning.
    """
    largest = torch.unflatten(cosine, 1, (-1, directions)).max(2).values
    return largest, cosine.new_ones(largest.shape[1])


class AngularLogits(NamedTuple):
    """Logits of a loss: two scales, an angle function g and, for a margin, another similarity.

        z_ij = scale_i · class_scale_j · g(θ_ij) + b_j    for every class j: the scores, without labels
        z_iy = scale_i · class_scale_y · t(θ_iy) + b_y    for the label y if its class has a margin
        z_ij = scale_i · class_scale_j · o(θ_ij) + b_j    for j ≠ y if the other classes have one

    Attributes:
        angle: g, or None for the cosine itself without clamping.
        scale: Scale of all rows; None for ‖x_i‖.
        uses_weight_norm: Whether class_scale_j is ‖w_j‖; otherwise it is 1.
        target: t as a function of cosines [N, C] or [N, 1] and feature norms [N, 1]; None if t = g.
        others: o as a function of the same; None if o = g.
        offset: Number that is added to all scores, for losses that are no softmax.
    """

    angle: AngleFunction | None
    scale: float | None
    uses_weight_norm: bool = False
    target: Similarity | None = None
    others: Similarity | None = None
    offset: Tensor | float | None = None

    def scores(self, angles: AngularOutput) -> Tensor:
        """Return the logits without a margin [N, C]."""
        scores = self._scaled(angles.cosine if self.angle is None else self.angle(angles.cosine), angles)
        return scores if self.offset is None else scores + self.offset

    def with_margin(self, scores: Tensor, angles: AngularOutput, labels: Columns | Tensor) -> Tensor:
        """Return the logits with their margins [N, C].

        Args:
            scores: The logits without a margin.
            angles: What they were computed from.
            labels: Columns of class indices, or probabilities q [N, C], for which a class has q_j of the logit of a
                label and 1 − q_j of that of another class (Eq. 9).
        """
        if self.target is None and self.others is None:
            return scores
        cosine, norm, bias = angles.cosine, angles.feature_norm.unsqueeze(1), angles.bias
        others = scores if self.others is None else self._scaled(self.others(cosine, norm), angles)
        if isinstance(labels, Tensor):
            targets = scores if self.target is None else self._scaled(self.target(cosine, norm), angles)
            return labels * targets + (1 - labels) * others
        column, owned = labels
        if self.target is None:
            target = scores.gather(1, column)
        elif self.angle is None or self.angle.is_same_for_all_filters:
            class_norm, class_bias = angles.weight_norm[column], None if bias is None else bias[column]
            target = self.label_logit(cosine.gather(1, column), norm, class_norm, class_bias)
        else:  # g differs between classes
            target = self._scaled(self.target(cosine, norm), angles).gather(1, column)
        if owned is not None:
            target = torch.where(owned, target, others.gather(1, column))
        return others.scatter(1, column, target)

    def label_logit(self, cosine: Tensor, norm: Tensor, class_norm: Tensor, bias: Tensor | None) -> Tensor:
        """Return the logit of each row's label from the values of its class, all [N, 1]."""
        if self.target is not None:
            similarity = self.target(cosine, norm)
        else:
            similarity = cosine if self.angle is None else self.angle(cosine)
        if self.uses_weight_norm:
            similarity = similarity * class_norm
        logit = similarity * (norm if self.scale is None else self.scale)
        return logit if bias is None else logit + bias

    def _scaled(self, similarity: Tensor, angles: AngularOutput) -> Tensor:
        """Return scale_i · class_scale_j · similarity_ij + b_j."""
        if self.uses_weight_norm:
            similarity = similarity * angles.weight_norm
        logits = similarity * (angles.feature_norm.unsqueeze(1) if self.scale is None else self.scale)
        return logits if angles.bias is None else logits + angles.bias


def additive_cosine(cosine: Tensor, m: float) -> Tensor:
    """Return cos θ − m, the margin of CosFace."""
    return clamp_rounding(cosine) - m


def additive_angle(cosine: Tensor, m: Tensor | float) -> Tensor:
    """Return cos(θ + m), the margin of ArcFace, extended for θ + m > π by −2 − cos(θ + m).

    A margin per row is a tensor. If it is negative, θ + m < 0 counts as 0: beyond, the cosine would decrease again.

    The extension is that of ψ: it joins at θ + m = π in value and slope and continues to decrease, whereas cos(θ + m)
    itself would increase and reward the widest angles.
    """
    phi = angle_from_cosine(cosine) + m
    return _COSINE.extended(phi.clamp_min(0) if isinstance(m, Tensor) else phi)
