"""What the parameters and the samples of distributions on hyperspheres must satisfy."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributions.constraints import Constraint

__all__ = ["concentrations", "unit_vectors"]


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
