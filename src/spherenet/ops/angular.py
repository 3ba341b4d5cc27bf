"""Cosines between features and class weights, logits and additive margins (docs/concepts.md, Eq. 5 to 8).

The multiplicative margin ψ_m is a method of the angle function (`AngleFunction.psi`). All functions take c = cos θ and
have gradients that are finite at θ = 0 and θ = π.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from spherenet.angles import AngleFunction, CosineAngle, angle_from_cosine
from spherenet.ops.norms import norm

__all__ = [
    "AngularOutput",
    "Columns",
    "additive_angle",
    "additive_cosine",
    "angular_cosine",
    "angular_logits",
    "logit_at",
    "with_target",
]

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


def angular_logits(
    cosine: Tensor, scale: Tensor | float, class_scale: Tensor | None, bias: Tensor | None, angle: AngleFunction | None
) -> Tensor:
    """Return the logits scale_i · class_scale_j · g(c_ij) + bias_j, without a margin.

    Args:
        cosine: Cosines [N, C].
        scale: Scale of each row [N], or a number.
        class_scale: Scale of each class [C], or None for 1.
        bias: Bias of each class [C], or None.
        angle: g, or None for the cosine itself without clamping.
    """
    similarity = cosine if angle is None else angle(cosine)
    if class_scale is not None:
        similarity = similarity * class_scale
    logits = similarity * (scale.unsqueeze(1) if isinstance(scale, Tensor) else scale)
    return logits if bias is None else logits + bias


def with_target(logits: Tensor, columns: Columns, target: Tensor) -> Tensor:
    """Return logits [N, C] in which those of the labels are replaced by `target` [N, 1]."""
    if columns.owned is not None:
        target = torch.where(columns.owned, target, logits.gather(1, columns.column))
    return logits.scatter(1, columns.column, target)


def logit_at(
    columns: Tensor, similarity: Tensor, scale: Tensor | float, class_scale: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Return the logit [N, 1] of one class per row from its similarity [N, 1]."""
    if class_scale is not None:
        similarity = similarity * class_scale[columns]
    logit = similarity * (scale.unsqueeze(1) if isinstance(scale, Tensor) else scale)
    return logit if bias is None else logit + bias[columns]


def additive_cosine(cosine: Tensor, m: float) -> Tensor:
    """Return cos θ − m, the margin of CosFace."""
    return cosine.clamp(-1, 1) - m


def additive_angle(cosine: Tensor, m: float) -> Tensor:
    """Return cos(θ + m), the margin of ArcFace, extended for θ + m > π by −2 − cos(θ + m).

    The extension is that of ψ: it joins at θ + m = π in value and slope and continues to decrease, whereas cos(θ + m)
    itself would increase and reward the widest angles.
    """
    return _COSINE.extended(angle_from_cosine(cosine) + m)
