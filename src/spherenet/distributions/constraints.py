"""What the parameters and the samples of distributions on hyperspheres must satisfy."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributions.constraints import Constraint

from spherenet.errors import InvalidArgument, InvalidArgumentType

__all__ = ["checks_values", "concentrations", "require", "require_sample", "unit_vectors"]


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


def require_sample(value: Tensor, shape: torch.Size) -> None:
    """Raise an error unless the value consists of unit vectors whose shape broadcasts with that of one sample."""
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
