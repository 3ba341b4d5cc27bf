"""Magnitude functions h of the patch norm, which multiply an angle function: f(w, x) = h(‖x‖)·g(θ) (Eq. 15).

SphereConv is h = 1. To add an h, subclass `Magnitude` and register its name in `MAGNITUDES`.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import ClassVar

import torch
from torch import Tensor, nn

from spherenet._util.positive import PositiveParameter
from spherenet._util.validation import NotScriptable, require_number, require_one_of, require_positive
from spherenet.angles.elementary import tanh_of_norm
from spherenet.errors import InvalidArgument

__all__ = [
    "MAGNITUDES",
    "BallMagnitude",
    "LinearMagnitude",
    "LogMagnitude",
    "Magnitude",
    "MixedMagnitude",
    "SegmentedMagnitude",
    "TanhMagnitude",
    "make_magnitude",
]

RADIUS = PositiveParameter("radius", start=1.0, smallest=1e-3)
"""Radius ρ. Below the bound of a learned one, every patch of a usual network lies outside of the ball."""


class Magnitude(NotScriptable, nn.Module):
    """Base class of magnitude functions h.

    Args:
        radius: Radius ρ > 0, or its initial value if it is learned.
        num_filters: Number of learned radii, one per filter; None for a fixed radius.
        alpha: Slope α.
        beta: Second slope β.

    Subclasses implement `value(norm, radius)` for norms and radii that broadcast against each other.
    """

    name: str = "custom"
    """Name of the magnitude function."""

    kernel_id: ClassVar[int | None] = None
    """Number of h in the native kernels (csrc/api.h); None if they do not know it."""

    has_radius: ClassVar[bool] = False
    """Whether h depends on a radius."""

    raw_radius: nn.Parameter | None

    def __init__(
        self,
        radius: float = RADIUS.start,
        num_filters: int | None = None,
        alpha: float = 1.0,
        beta: float = 0.0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.initial_radius = require_positive("radius", radius)
        self.alpha, self.beta = require_number("alpha", alpha), require_number("beta", beta)
        if not self.has_radius and (num_filters is not None or self.initial_radius != 1):
            got = "'learned'" if num_filters is not None else repr(radius)
            raise InvalidArgument("radius", f"must be None for the magnitude {self.name!r}, which has none, got {got}.")
        if num_filters is None:
            self.register_parameter("raw_radius", None)
            return
        self.raw_radius = RADIUS.create(num_filters, RADIUS.require_initial(radius), device, dtype)

    def reset_parameters(self) -> None:
        """Set every learned radius to its initial value."""
        if self.raw_radius is not None:
            RADIUS.reset(self.raw_radius, self.initial_radius)

    @property
    def radius(self) -> Tensor | float:
        """Radius ρ: a number, or one value per filter in float32 or float64 if it is learned."""
        return self.initial_radius if self.raw_radius is None else RADIUS.value(self.raw_radius)

    @property
    def fixed_radius(self) -> float | None:
        """The radius if there is one that is not learned."""
        return self.initial_radius if self.has_radius and self.raw_radius is None else None

    def forward(self, norm: Tensor) -> Tensor:
        """Return h for norms whose last dimension is 1 or the number of filters."""
        return self.value(norm, self.radius)

    def value(self, norm: Tensor, radius: Tensor | float) -> Tensor:
        """Return h for an explicit radius that broadcasts against the norms."""
        raise NotImplementedError(f"{type(self).__name__} must define value(norm, radius).")

    def extra_repr(self) -> str:
        """Return the options for the printed module."""
        learned = "" if self.raw_radius is None else "learned:"
        radius = f"radius={learned}{self.initial_radius:g}"
        return ", ".join([radius] * self.has_radius + [f"alpha={self.alpha:g}, beta={self.beta:g}"])


class BallMagnitude(Magnitude):
    """h = min(1, ‖x‖/ρ)."""

    name, kernel_id, has_radius = "ball", 1, True

    def value(self, norm: Tensor, radius: Tensor | float) -> Tensor:
        """Return h for each norm."""
        return (norm / radius).clamp_max(1)


class TanhMagnitude(Magnitude):
    """h = tanh(‖x‖/ρ)."""

    name, kernel_id, has_radius = "tanh", 2, True

    def value(self, norm: Tensor, radius: Tensor | float) -> Tensor:
        """Return h for each norm."""
        return tanh_of_norm(norm / radius)


class LinearMagnitude(Magnitude):
    """h = α‖x‖. With g = cos θ this is a convolution with kernels of unit norm."""

    name, kernel_id = "linear", 3

    def value(self, norm: Tensor, radius: Tensor | float) -> Tensor:
        """Return h for each norm."""
        return self.alpha * norm


class SegmentedMagnitude(Magnitude):
    """h = α‖x‖ below ρ and β‖x‖ + (α − β)ρ above it."""

    name, kernel_id, has_radius = "segmented", 4, True

    def value(self, norm: Tensor, radius: Tensor | float) -> Tensor:
        """Return h for each norm."""
        above = self.beta * norm + (self.alpha - self.beta) * radius
        return torch.where(norm < radius, self.alpha * norm, above)


class LogMagnitude(Magnitude):
    """h = α·log(1 + ‖x‖)."""

    name, kernel_id = "log", 5

    def value(self, norm: Tensor, radius: Tensor | float) -> Tensor:
        """Return h for each norm."""
        return self.alpha * norm.log1p()


class MixedMagnitude(Magnitude):
    """h = α‖x‖ + β·log(1 + ‖x‖)."""

    name, kernel_id = "mixed", 6

    def value(self, norm: Tensor, radius: Tensor | float) -> Tensor:
        """Return h for each norm."""
        return self.alpha * norm + self.beta * norm.log1p()


MAGNITUDES: dict[str, type[Magnitude]] = {
    cls.name: cls
    for cls in (BallMagnitude, TanhMagnitude, LinearMagnitude, SegmentedMagnitude, LogMagnitude, MixedMagnitude)
}
"""Magnitude functions by name; "sphere" (h = 1) is no magnitude function."""


def make_magnitude(
    magnitude: str | Magnitude | None,
    radius: float | str | None = None,
    *,
    num_filters: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Magnitude | None:
    """Return the magnitude function of a layer, None for h = 1.

    Args:
        magnitude: Name of h, an object, or None or "sphere" for h = 1.
        radius: Radius ρ as a number, "learned" for one learned radius per filter that starts at 1, "learned:10" for
            one that starts at 10, or None for 1.
        num_filters: Number of filters, for a learned radius.
        device: Device of a learned radius.
        dtype: Data type of a learned radius.
    """
    if magnitude is None or magnitude == "sphere" or isinstance(magnitude, Magnitude):
        if radius is not None:
            shown = magnitude.name if isinstance(magnitude, Magnitude) else "sphere"
            raise InvalidArgument("radius", f"must be None for the magnitude {shown!r}, got {radius!r}.")
        return magnitude if isinstance(magnitude, Magnitude) else None
    cls = MAGNITUDES[require_one_of("magnitude", magnitude, ["sphere", *MAGNITUDES])]
    if radius is not None and not cls.has_radius:
        raise InvalidArgument("radius", f"must be None for the magnitude {cls.name!r}, which has none, got {radius!r}.")
    if isinstance(radius, str):
        return cls(_initial_radius(radius), num_filters, device=device, dtype=dtype)
    return cls() if radius is None else cls(radius=radius)


def _initial_radius(radius: str) -> float:
    """Return the initial value of a learned radius: 1 for "learned", 10 for "learned:10"."""
    word, colon, initial = radius.partition(":")
    try:
        if word == "learned":
            return float(initial) if colon else 1.0
    except ValueError:
        pass
    hint = " Did you mean 'learned'?" if word != "learned" and get_close_matches(word, ["learned"]) else ""
    raise InvalidArgument(
        "radius", f"must be a number, 'learned' or 'learned:' and its initial value, got {radius!r}.{hint}"
    )
