"""`SphereOptions`: the one list of the options of sphere layers.

Layers, networks, conversions, saved conversions and training configurations take their options from here. To add an
option, add it to both classes below and use it in `SphereLayer._set_up_sphere`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypedDict, cast

import torch

from spherenet._util.validation import OPTION_DEFAULTS, require_number, require_one_of, require_positive
from spherenet.angles import AngleFunction, make_shared_angle
from spherenet.errors import InvalidArgument, InvalidArgumentType
from spherenet.magnitudes import Magnitude
from spherenet.ops.norms import DEFAULT_EPS
from spherenet.ops.operation import CENTERS

__all__ = ["FIRST_PATCH", "NetworkKeywords", "SphereKeywords", "SphereOptions"]

FIRST_PATCH = "first-patch"
"""Center of a network whose first sphere layer alone has the center "patch"."""


@dataclass(frozen=True)
class SphereOptions:
    """Options of sphere layers. What depends on the layer is checked by the layer.

    Pass them to `to_sphere` or `create_model`, or to a layer as `SphereConv2d(3, 64, 3, **options.keywords())`.

    Args:
        operator: Name of an operator or an `AngleFunction` object, as in `SphereConv2d`.
        k: Parameter of the sigmoid, or initial value of a learned one.
        k_sharing: One learned k per "filter", per "layer", or for all layers of a "network".
        rescale: None, "learned" or a pair of numbers (β, γ).
        eps: Number added under both square roots of the norms.
        center: None, "weight" or "patch"; "auto" lets a network or a conversion decide; "first-patch" is "patch" in the
            first layer of a network and None in the others.
        magnitude: Name of a magnitude function or a `Magnitude` object; None for h = 1.
        radius: Radius of the magnitude function: a number, "learned" or "learned:10".

    Raises:
        TypeError: If an option has the wrong type.
        ValueError: If an option is not allowed.
    """

    operator: str | AngleFunction = "cosine"
    k: float | None = None
    k_sharing: str = "filter"
    rescale: str | Sequence[float] | None = None
    eps: float = DEFAULT_EPS
    center: str | None = None
    magnitude: str | Magnitude | None = None
    radius: float | str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "eps", require_positive("eps", self.eps))
        object.__setattr__(self, "rescale", _checked_rescale(self.rescale))

    @classmethod
    def collect(
        cls,
        operator: str | AngleFunction | SphereOptions | None,
        k: float | None,
        center: str | None,
        options: NetworkKeywords,
    ) -> SphereOptions:
        """Return the options from the keyword arguments of a network or a conversion, or from a single object."""
        if not isinstance(operator, SphereOptions):
            return cls(operator, k, center=center, **options)  # type: ignore[arg-type]
        others = {"k": k} | {"center": None if center == "auto" else center} | options
        for name, value in others.items():
            if value is not None:
                raise InvalidArgumentType(
                    name, f"must be left out if operator is a SphereOptions object, got {value!r}."
                )
        return operator

    def require_unused(self) -> None:
        """Raise ValueError if an option is given that a plain layer does not have."""
        for name in ("k", "rescale", "center", "magnitude", "radius"):
            value = getattr(self, name)
            if value is not None:
                raise InvalidArgument(name, f"must be None if operator is None (plain convolution), got {value!r}.")
        if self.k_sharing == "network":
            make_shared_angle(None, None)  # its error

    def keywords(self) -> SphereKeywords:
        """Return the options as keyword arguments of a layer."""
        return cast(SphereKeywords, {field.name: getattr(self, field.name) for field in fields(self)})

    def for_network(self, center: str | None, *, has_first: bool = False) -> SphereOptions:
        """Return the options for the layers of a network, where "auto" stands for `center`.

        `has_first` states whether there is a first layer, so that the center "first-patch" is allowed.
        """
        require_one_of("k_sharing", self.k_sharing, ("filter", "layer", "network"))
        require_one_of("center", self.center, (None, "none", "auto", *CENTERS, *([FIRST_PATCH] if has_first else [])))
        chosen = {"auto": center, "none": None}
        return replace(self, center=chosen[self.center]) if self.center in chosen else self

    def for_kernel(self, entries: int) -> SphereOptions:
        """Return the options for kernels of this size: a kernel with a single entry is not centered."""
        return replace(self, center=None) if entries == 1 else self

    def share_angle(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> SphereOptions:
        """Return the options with one angle function for all layers if k_sharing is "network"."""
        if self.k_sharing != "network":
            return self
        angle = make_shared_angle(self.operator, self.k, device, dtype)
        return replace(self, operator=angle, k=None, k_sharing="layer")


class NetworkKeywords(TypedDict, total=False):
    """Keyword arguments with the same meaning for layers, networks and conversions; `SphereOptions` documents them."""

    k_sharing: str
    rescale: str | Sequence[float] | None
    eps: float
    magnitude: str | Magnitude | None
    radius: float | str | None


class SphereKeywords(NetworkKeywords, total=False):
    """Keyword arguments of all sphere layers; `SphereConv2d` documents them."""

    operator: str | AngleFunction
    k: float | None
    center: str | None


OPTION_DEFAULTS[NetworkKeywords] = OPTION_DEFAULTS[SphereKeywords] = {
    field.name: field.default for field in fields(SphereOptions)
}


def _checked_rescale(rescale: str | Sequence[float] | None) -> str | tuple[float, float] | None:
    if rescale is None or rescale == "learned":
        return rescale
    if isinstance(rescale, str) or not isinstance(rescale, Sequence) or len(rescale) != 2:
        raise InvalidArgument(
            "rescale", f'must be None, "learned" or a pair of numbers (beta, gamma), got {rescale!r}.'
        )
    return require_number("rescale[0]", rescale[0]), require_number("rescale[1]", rescale[1])
