"""Angle functions g(θ): one class per g that knows everything about it (docs/concepts.md, Eq. 1).

All built-in g are functions of c = cos θ. They are odd in c, decrease in θ and map [−1, 1] onto [−1, 1]. An angle
function is a module, since g may have learned parameters. It always receives cosines with the *filters in the last
dimension*, so that a parameter of shape [filters] broadcasts.

To use your own g, wrap a function of θ:

    sn.SphereConv2d(3, 64, 3, operator=sn.CustomAngle(lambda theta: 1 - (theta / math.pi) ** 2 * 2))

or, if g has parameters, subclass `AngleFunction` and define `forward(cosine)`.

A built-in g has a line in `ANGLES`. It defines `value(cosine, k)`, and other methods if it has better formulas. If the
kernels support it (`kernels/csrc/angles.h`, `kernels/sphere_conv/triton/angles.py`), it sets `kernel_id`.
"""

from __future__ import annotations

import torch

from spherenet._util.validation import require_one_of
from spherenet.angles.base import AngleFunction, CustomAngle, Device, LearnedAngle
from spherenet.angles.cosine_powers import SharpenedCosineAngle, SquareCosineAngle
from spherenet.angles.elementary import angle_from_cosine
from spherenet.angles.linear_cosine import CosineAngle, LinearAngle
from spherenet.angles.sigmoid import DEFAULT_K, LearnableSigmoidAngle, SigmoidAngle
from spherenet.errors import InvalidArgument, InvalidArgumentType

__all__ = [
    "ANGLES",
    "DEFAULT_K",
    "OPERATORS",
    "AngleFunction",
    "CosineAngle",
    "CustomAngle",
    "LearnableSigmoidAngle",
    "LearnedAngle",
    "LinearAngle",
    "SharpenedCosineAngle",
    "SigmoidAngle",
    "SquareCosineAngle",
    "angle_from_cosine",
    "make_angle",
    "make_shared_angle",
]

ANGLES: dict[str, type[AngleFunction]] = {
    angle.name: angle
    for angle in (
        LinearAngle,
        CosineAngle,
        SigmoidAngle,
        LearnableSigmoidAngle,
        SquareCosineAngle,
        SharpenedCosineAngle,
    )
}
"""The angle functions that have a name."""

OPERATORS = tuple(ANGLES)
"""Names of the angle functions."""


def make_angle(
    operator: str | AngleFunction,
    k: float | None = None,
    *,
    num_filters: int | None = None,
    device: Device = None,
    dtype: torch.dtype | None = None,
) -> AngleFunction:
    """Return the angle function for a name; an object is returned unchanged.

    Args:
        operator: One of `OPERATORS`, or an `AngleFunction` object.
        k: Parameter of the sigmoid (default 0.3), or initial value of a learned one (default 0.5). It must be None for
            other operators.
        num_filters: Number of k of a learnable sigmoid; None for one.
        device: Device of a learned k.
        dtype: Dtype of a learned k.

    Raises:
        TypeError: If operator is neither a string nor an angle function.
        ValueError: If the name is unknown or k is not allowed.
    """
    if isinstance(operator, AngleFunction):
        if k is not None:
            raise InvalidArgument("k", f"must be None when operator is an angle function object, got {k!r}.")
        return operator
    if not isinstance(operator, str):
        raise InvalidArgumentType(
            "operator",
            f"must be one of {', '.join(map(repr, OPERATORS))} or an AngleFunction object, "
            f"got {operator!r} of type {type(operator).__name__}.",
        )
    angle_class = ANGLES[require_one_of("operator", operator, OPERATORS)]
    if k is not None and not angle_class.has_k():
        raise InvalidArgument("k", f"must be None for the {operator} operator, got {k!r}.")
    angle: AngleFunction = angle_class.create(k, num_filters, device, dtype)
    return angle


def make_shared_angle(
    operator: str | AngleFunction | None, k: float | None, device: Device = None, dtype: torch.dtype | None = None
) -> AngleFunction:
    """Return one angle function with a single learned k for all layers of a network (k_sharing="network")."""
    if not isinstance(operator, str) or operator not in ANGLES or not ANGLES[operator].is_learned:
        raise InvalidArgument("k_sharing", f'must not be "network" unless operator is "learnable", got {operator!r}.')
    return make_angle(operator, k, device=device, dtype=dtype)
