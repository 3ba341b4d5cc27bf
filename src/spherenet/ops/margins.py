"""Margins: what a loss puts in the place of g(θ) for the right class, so that a small angle is not enough.

All are functions of c = cos θ, elementwise, with gradients that are finite at θ = 0, θ = π and wherever two
pieces meet. Two of them ask for g beyond [0, π]; there each g is continued by its own shape, one copy lower
for every π,

    g(φ) = g(φ − jπ) − j·(g(0) − g(π)),   j = ⌊φ/π⌋,

which is continuous and decreasing for every decreasing g. Since the pieces meet, a j that rounding puts one
too high or too low changes the value by rounding error, not by a jump.

What an angular head says about a batch: all that any loss of the family needs to make its logits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from spherenet.angles import (
    AngleFunction,
    CosineAngle,
    CustomAngle,
    LearnableSigmoidAngle,
    LinearAngle,
    SigmoidAngle,
    angle_from_cosine,
)

__all__ = ["AngularOutput", "additive_angle", "additive_cosine", "continued", "psi", "same_for_all_classes"]

_COSINE = CosineAngle()


def psi(cosine: Tensor, m: float, angle: AngleFunction) -> Tensor:
    """ψ_m(θ) = g(mθ − jπ) − j·(g(0) − g(π)), j = ⌊mθ/π⌋ (SPEC 1 (5)), for any real m ≥ 1 and any g.

    m = 1 is g itself; with the linear g it is 1 − 2mθ/π without pieces; with the cosine it is A-Softmax's ψ.
    Shapes: cosine [*, C], or [*] for one class a row where g is the same for all classes → the same shape.
    """
    if m == 1:
        return angle(cosine)  # type: ignore[no-any-return]
    if type(angle) is LinearAngle:
        # 1 − 2mθ/π from 1 − 2θ/π, which is computed without cancellation at θ = π/2.
        value: Tensor = angle(cosine) * m - (m - 1)
        return value
    return continued(angle, angle_from_cosine(cosine) * m)


def additive_cosine(cosine: Tensor, m: float) -> Tensor:
    """cos θ − m: the margin of CosFace."""
    return cosine.clamp(-1, 1) - m


def additive_angle(cosine: Tensor, m: float) -> Tensor:
    """cos(θ + m), the margin of ArcFace, continued for θ + m > π by −2 − cos(θ + m).

    The continuation is that of ψ: at θ + m = π it joins in value and slope, and it goes on falling, where
    cos(θ + m) itself would turn and reward the widest angles.
    """
    return continued(_COSINE, angle_from_cosine(cosine) + m)


def continued(angle: AngleFunction, phi: Tensor) -> Tensor:
    """g continued to all φ ≥ 0: g(φ − jπ) − j·(g(0) − g(π)), j = ⌊φ/π⌋."""
    turns = (phi.detach() / math.pi).floor()
    return _at_angle(angle, phi - turns * math.pi) - turns * _drop(angle, phi)


def same_for_all_classes(angle: AngleFunction) -> bool:
    """Whether g treats every class alike, so that it may be applied to a row's target cosine alone."""
    if type(angle) is LearnableSigmoidAngle:
        return angle.raw_k.dim() == 0
    # Not their subclasses, which may have any g.
    return type(angle) in (LinearAngle, CosineAngle, SigmoidAngle, CustomAngle)


def _at_angle(angle: AngleFunction, phi: Tensor) -> Tensor:
    """g(φ) for φ ∈ [0, π], give or take rounding.

    Written in φ, not in cos φ: the way back from cos φ to φ would lose half the digits near 0 and π, and
    with them the slope of a g that has one there.
    """
    if type(angle) is LinearAngle:
        return 1 - phi * (2 / math.pi)
    if type(angle) is CosineAngle:
        return phi.cos()
    if type(angle) in (SigmoidAngle, LearnableSigmoidAngle):
        k = angle.k
        assert k is not None
        largest = math.tanh(math.pi / (4 * k)) if isinstance(k, float) else (math.pi / (4 * k)).tanh()
        return ((math.pi / 2 - phi) / (2 * k)).tanh() / largest
    # A user's g need not be defined outside [0, π]: its value is taken inside, its slope is let through.
    inside = phi + (phi.clamp(0, math.pi) - phi).detach()
    return angle.g(inside) if type(angle) is CustomAngle else angle.at(inside)


def _drop(angle: AngleFunction, phi: Tensor) -> Tensor | float:
    """g(0) − g(π); a value a class where g differs between classes."""
    if type(angle) in (LinearAngle, CosineAngle, SigmoidAngle, LearnableSigmoidAngle):
        return 2.0
    at_zero = phi.new_ones(phi.shape[-1:])
    drop: Tensor = angle(at_zero) - angle(-at_zero)
    return drop


class AngularOutput(NamedTuple):
    """Angles and lengths between features and class weights: cos θ_ij, ‖x_i‖, ‖w_j‖, b_j (SPEC 6).

    The inner product of plain softmax is weight_norm_j · feature_norm_i · cosine_ij + bias_j; angular losses
    leave out one norm or both. All are float32 where features and weights are half precision.

    Shapes: cosine [*, C], feature_norm [*], weight_norm [C], bias [C] or None.
    """

    cosine: Tensor
    feature_norm: Tensor
    weight_norm: Tensor
    bias: Tensor | None = None
