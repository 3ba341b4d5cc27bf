"""What distributions around a mean direction have in common, and what their parameters and samples must satisfy."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Size, Tensor
from torch.distributions import Distribution
from torch.distributions.constraints import Constraint

from spherenet._util.validation import require_memory
from spherenet.errors import InvalidArgument, InvalidArgumentType

__all__ = [
    "AroundDirection",
    "broadcast",
    "checks_values",
    "concentrations",
    "half_squared_distance",
    "log_surface",
    "require",
    "require_sample",
    "uniform_directions",
    "unit_vectors",
]


def checks_values(validate_args: bool | None) -> bool:
    """Return whether a distribution checks values: by default, but not in compiled code.

    The default of torch.distributions is not asked: torch.compile sets it to False for the whole process.
    """
    return not torch.compiler.is_compiling() if validate_args is None else validate_args


def require(argument: str, value: Tensor, constraint: Constraint) -> None:
    """Raise InvalidArgument with the first value that does not satisfy the constraint, if there is one."""
    allowed: Tensor = constraint.check(value)  # type: ignore[no-untyped-call]
    if not allowed.all():
        first = value[~allowed][0]
        given = f"norm {torch.linalg.vector_norm(first.double()):g}" if constraint.event_dim else f"{first:g}"
        raise InvalidArgument(argument, f"must be {constraint}, got {given}.")


def require_sample(value: Tensor, shape: torch.Size, validate: bool | None) -> None:
    """Raise an error for freed memory and, if `validate`, unless the value consists of unit vectors of a fitting shape.

    The shape must broadcast with that of one sample.
    """
    if isinstance(value, Tensor):
        require_memory(value)
    if not validate:
        return
    if not isinstance(value, Tensor):
        raise InvalidArgumentType("value", f"must be a tensor, got {type(value).__name__}.")
    ends = value.shape[-len(shape) :]
    fits = value.dim() > 0 and value.shape[-1] == shape[-1]
    if not fits or any(1 not in pair and pair[0] != pair[1] for pair in zip(ends[::-1], shape[::-1], strict=False)):
        raise InvalidArgument(
            "value", f"must have a shape that broadcasts with {list(shape)}, got {list(value.shape)}."
        )
    require("value", value, unit_vectors)


class _UnitVectors(Constraint):
    """Vectors of norm 1, up to 1e-5 or the square root of the dtype's precision, whichever is larger."""

    event_dim = 1

    def check(self, value: Tensor) -> Tensor:
        """Return whether each value is allowed."""
        tolerance = max(1e-5, torch.finfo(value.dtype).eps ** 0.5) if value.is_floating_point() else 0
        norm: Tensor = torch.linalg.vector_norm(value.double(), dim=-1)
        return (norm - 1).abs() <= tolerance

    def __repr__(self) -> str:
        return "unit vectors"


class _Concentrations(Constraint):
    """Finite numbers that are not negative."""

    def check(self, value: Tensor) -> Tensor:
        """Return whether each value is allowed."""
        return value.isfinite() & (value >= 0)

    def __repr__(self) -> str:
        return "finite and not negative"


unit_vectors = _UnitVectors()
concentrations = _Concentrations()


def broadcast(*shapes: Size) -> Size:
    """Return the shape to which all shapes broadcast."""
    return Size(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def log_surface(dimension: int) -> float:
    """Return the log of the surface 2 π^(d/2) / Γ(d/2) of the unit sphere in d dimensions."""
    return math.log(2) + dimension / 2 * math.log(math.pi) - math.lgamma(dimension / 2)


def half_squared_distance(left: Tensor, right: Tensor) -> Tensor:
    """Return ‖l − r‖² / 2, which is 1 − l·r for unit vectors, without its cancellation and its rounding."""
    return (left.double() - right.double()).square().sum(-1) / 2


def uniform_directions(shape: Size, like: Tensor) -> Tensor:
    """Return normalized normal numbers in float64 on the device of `like`."""
    return F.normalize(torch.randn(shape, dtype=torch.float64, device=like.device), dim=-1)


class AroundDirection(Distribution):
    """A distribution whose density depends on μ·x only.

    Computed in float64 and rounded to the dtype of the parameters.
    """

    arg_constraints: ClassVar[dict[str, Constraint]] = {
        "mean_direction": unit_vectors,
        "concentration": concentrations,
    }
    support = unit_vectors
    has_rsample = True

    mean_direction: Tensor
    concentration: Tensor

    def __init__(
        self, mean_direction: Tensor, concentration: Tensor | float, validate_args: bool | None = None
    ) -> None:
        if not isinstance(mean_direction, Tensor) or not mean_direction.is_floating_point():
            given = mean_direction.dtype if isinstance(mean_direction, Tensor) else type(mean_direction).__name__
            raise InvalidArgumentType("mean_direction", f"must be a tensor of floating point numbers, got {given}.")
        if mean_direction.dim() == 0 or mean_direction.shape[-1] < 2:
            raise InvalidArgument(
                "mean_direction",
                f"must have at least 2 entries in its last dimension, got shape {list(mean_direction.shape)}.",
            )
        if not isinstance(concentration, Tensor):
            dtype, device = mean_direction.dtype, mean_direction.device
            try:
                concentration = torch.as_tensor(concentration, dtype=dtype, device=device)
            except (TypeError, ValueError, RuntimeError):
                raise InvalidArgumentType(
                    "concentration", f"must be a number or a tensor, got {concentration!r}."
                ) from None
        if concentration.is_complex():
            raise InvalidArgumentType("concentration", f"must be real, got {concentration.dtype}.")
        require_memory(mean_direction, concentration)
        dtype = torch.promote_types(mean_direction.dtype, concentration.dtype)
        try:
            batch_shape = broadcast(mean_direction.shape[:-1], concentration.shape)
        except RuntimeError:
            raise InvalidArgument(
                "concentration",
                f"must have a shape that broadcasts with {list(mean_direction.shape[:-1])}, "
                f"got {list(concentration.shape)}.",
            ) from None
        self.mean_direction = mean_direction.to(dtype).expand(*batch_shape, -1)
        self.concentration = concentration.to(dtype).expand(batch_shape)
        super().__init__(batch_shape, mean_direction.shape[-1:], validate_args=False)
        self._validate_args = checks_values(validate_args)
        if self._validate_args:
            require("mean_direction", self.mean_direction, unit_vectors)
            require("concentration", self.concentration, concentrations)

    def _validate_sample(self, value: Tensor) -> None:
        self._require_memory()
        require_sample(value, self._batch_shape + self._event_shape, self._validate_args)

    def _require_memory(self) -> None:
        """Raise RuntimeError if the memory of a parameter was freed after the distribution was created."""
        require_memory(self.mean_direction, self.concentration)

    @property
    def dimension(self) -> int:
        """Number of entries of a sample: d on the sphere of d − 1 dimensions."""
        return self._event_shape[0]

    @property
    def mean(self) -> Tensor:
        """Mean of the samples: the mean direction times `mean_resultant_length`."""
        self._require_memory()
        return self.mean_resultant_length.unsqueeze(-1) * self.mean_direction

    @property
    def mode(self) -> Tensor:
        """Direction of the largest density."""
        return self.mean_direction

    @property
    def variance(self) -> Tensor:
        """Variance of each entry of the samples."""
        self._require_memory()
        along, across = (value.to(self.concentration.dtype).unsqueeze(-1) for value in self._variances())
        share = self.mean_direction.square()
        return along * share + across * (1 - share).clamp(min=0)

    @property
    @abstractmethod
    def mean_resultant_length(self) -> Tensor:
        """Mean of μ·x: 0 for concentration 0, toward 1 for large ones."""

    @abstractmethod
    def _variances(self) -> tuple[Tensor, Tensor]:
        """Return the variances along the mean direction and in each direction across it."""

    @abstractmethod
    def _angles(self, shape: Size) -> Tensor:
        """Return random angles to the mean direction in float64, with gradients for the concentration."""

    @abstractmethod
    def _kl_to_uniform(self) -> Tensor:
        """Return the divergence from this to the uniform distribution in float64."""

    @abstractmethod
    def _kl_from_uniform(self) -> Tensor:
        """Return the divergence from the uniform distribution to this in float64."""

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Return samples [*sample_shape, *batch_shape, d] with gradients for the parameters.

        A sample is cos θ μ + sin θ v: θ is a random angle, and v a random direction across μ, whose gradient for μ is
        that of the projection of a fixed random vector.
        """
        self._require_memory()
        shape = self._extended_shape(sample_shape)
        direction = self.mean_direction.double()
        across = uniform_directions(shape, direction)
        for _ in range(2):  # twice, because the first projection of a vector close to the direction is inexact
            across = F.normalize(across - (across * direction).sum(-1, keepdim=True) * direction, dim=-1)
        angle = self._angles(shape[:-1]).unsqueeze(-1)
        return (angle.cos() * direction + angle.sin() * across).to(self.mean_direction.dtype)

    def entropy(self) -> Tensor:
        """Return the differential entropy: that of the uniform distribution less the divergence to it."""
        self._require_memory()
        return (log_surface(self.dimension) - self._kl_to_uniform()).to(self.concentration.dtype)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Any:
        """Return the distribution with a larger batch shape, without copies of the parameters."""
        new: Any = self._get_checked_instance(AroundDirection, _instance)  # type: ignore[no-untyped-call]
        batch_shape = Size(batch_shape)
        new.mean_direction = self.mean_direction.expand(batch_shape + self._event_shape)
        new.concentration = self.concentration.expand(batch_shape)
        Distribution.__init__(new, batch_shape, self._event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new
