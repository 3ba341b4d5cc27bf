"""What a sphere layer computes, as one object and one bundle of tensors; checks of both and of the input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from spherenet._util.validation import require_floating, require_one_of
from spherenet.angles import AngleFunction
from spherenet.errors import InvalidArgument, InvalidArgumentType
from spherenet.magnitudes import Magnitude
from spherenet.ops.geometry import Geometry
from spherenet.ops.norms import DEFAULT_EPS, autocast_is_on

__all__ = [
    "CENTERS",
    "Operation",
    "Parameters",
    "check_dtypes",
    "check_shapes",
    "dequantized",
    "require_center",
    "require_per_filter",
]

CENTERS = ("weight", "patch")
"""What may be centered (Eq. 14)."""


class Operation(NamedTuple):
    """What a sphere layer computes, apart from its tensors: out = β·(h(‖x‖)·g(θ) + b) + γ."""

    angle: AngleFunction
    """g, or its class if that defines `value`."""

    geometry: Geometry = Geometry()
    """How the kernels move over the input; empty for a fully connected layer."""

    eps: float = DEFAULT_EPS
    """Added under both square roots of the norms."""

    center: str | None = None
    """Whether kernels ("weight"), or kernels and patches ("patch"), are centered (Eq. 14)."""

    magnitude: Magnitude | None = None
    """h (Eq. 15); None for h = 1."""


class Parameters(NamedTuple):
    """Tensors of a sphere layer besides its weight: one number, or one per filter; None for those that are absent."""

    k: Tensor | float | None = None
    """Parameter of g."""

    bias: Tensor | None = None
    beta: Tensor | float | None = None
    gamma: Tensor | float | None = None

    radius: Tensor | float | None = None
    """Radius of h."""

    @property
    def has_affine(self) -> bool:
        """Whether there is a bias, β or γ."""
        return not (self.bias is None and self.beta is None and self.gamma is None)


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


def dequantized(weight: Tensor) -> Tensor:
    """Return the rounded values of a quantized weight as a plain tensor, and any other weight as it is.

    torchao replaces the weight of a layer by a subclass that knows linear functions only. A sphere layer also needs the
    norms of its kernels, so it computes from the values, in their floating point dtype.
    """
    if type(weight) is nn.Parameter or type(weight) is Tensor:
        return weight
    method = type(weight).dequantize
    return weight if method is Tensor.dequantize else method(weight)


def check_dtypes(input: Tensor, weight: Tensor) -> None:
    """Raise TypeError unless input and weight are floating point tensors of the same dtype, or autocast is on."""
    require_floating("input", input)
    require_floating("weight", weight)
    if input.dtype != weight.dtype and not autocast_is_on(input):
        raise InvalidArgumentType("input", f"must have the dtype of weight, {weight.dtype}, got {input.dtype}.")


def check_shapes(input: Sequence[int], weight: Sequence[int], geometry: Geometry) -> None:
    """Raise ValueError if the input, batched or not, does not fit the weight."""
    spatial_dims = len(weight) - 2
    if spatial_dims == 0:
        if len(input) < 1 or input[-1] != weight[1]:
            raise InvalidArgument(
                "input",
                f"must have {weight[1]} features in its last dimension for a weight of shape {list(weight)}, "
                f"got shape {list(input)}.",
            )
        return
    if len(input) not in (spatial_dims + 1, spatial_dims + 2):
        raise InvalidArgument(
            "input",
            f"must have {spatial_dims + 1} (unbatched) or {spatial_dims + 2} (batched) dimensions, "
            f"got {len(input)}: shape {list(input)}.",
        )
    groups, channels = geometry.groups, input[-spatial_dims - 1]
    expected = weight[0] if geometry.transposed else weight[1] * groups
    if channels != expected:
        grouped = "" if geometry.transposed else f" and groups={groups}"
        raise InvalidArgument(
            "input",
            f"must have {expected} channels for a weight of shape {list(weight)}{grouped}, "
            f"got {channels}: shape {list(input)}.",
        )


def require_per_filter(filters: int, **parameters: Tensor | float | None) -> None:
    """Raise ValueError if a parameter is a tensor that has neither one value nor one per filter.

    The kernels read one value per filter without another check.
    """
    for name, value in parameters.items():
        if isinstance(value, Tensor) and (value.dim() > 1 or value.numel() not in (1, filters)):
            raise InvalidArgument(
                name, f"must have one value or {filters}, one per filter, got shape {list(value.shape)}."
            )
