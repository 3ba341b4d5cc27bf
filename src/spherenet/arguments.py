"""Arguments that all functions and layers share: operator with its parameter k, and center."""

from __future__ import annotations

from torch import Tensor

from spherenet._util.validation import require_floating, require_one_of
from spherenet.angles import ANGLES, AngleFunction, make_angle
from spherenet.errors import InvalidArgument
from spherenet.kernels.dispatch import can_read_values
from spherenet.ops.norms import working_dtype
from spherenet.ops.operation import CENTERS

__all__ = ["require_center", "resolve_angle"]


def require_center(center: str | None, kernel_entries: int | None) -> str | None:
    """Return the argument `center` if it is allowed for kernels of this size; None for a size that is not known."""
    if center is None:
        return None
    require_one_of("center", center, (None, *CENTERS))
    if kernel_entries == 1:
        raise InvalidArgument(
            "center", f"must be None for kernels with a single entry, which is its own mean, got {center!r}."
        )
    return center


_NAMED = {name: make_angle(name) for name, angle_class in ANGLES.items() if not angle_class.is_learned}


def resolve_angle(
    operator: str | AngleFunction, k: float | Tensor | None
) -> tuple[AngleFunction, Tensor | float | None]:
    """Return the angle function and its parameter for the arguments `operator` and `k` of a function."""
    if not isinstance(operator, str) or operator not in ANGLES:
        angle = make_angle(operator, k)  # type: ignore[arg-type]
        return angle, angle.k
    if operator not in _NAMED:
        instead = '"sigmoid" and k' if ANGLES[operator].has_k() else f"a {ANGLES[operator].__name__} object"
        owned = "k" if ANGLES[operator].has_k() else "parameters"
        raise InvalidArgument(
            "operator", f'must not be "{operator}" in a function, which owns no {owned}: pass {instead}.'
        )
    angle = _NAMED[operator]
    if k is None:
        return angle, angle.k
    if angle.parameter is None:
        raise InvalidArgument("k", f"must be None for the {operator} operator, got {k!r}.")
    if not isinstance(k, Tensor):
        return angle, angle.parameter.require(k)
    require_floating("k", k)
    # If values cannot be read, a wrong k shows as NaN.
    smallest = angle.parameter.smallest
    if can_read_values(k) and not bool(((k >= smallest) & k.isfinite()).all()):
        raise InvalidArgument("k", f"must be finite and at least {smallest:g} everywhere, got {k.detach()}.")
    return angle, k.to(working_dtype(k.dtype))
