"""The linear and the cosine angle function, which have no parameter."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from spherenet.angles.base import AngleFunction, K
from spherenet.angles.elementary import asin, clamp_rounding, multiply_by_inverse_sine_, sine

__all__ = ["CosineAngle", "LinearAngle"]


class LinearAngle(AngleFunction):
    """g = 1 − 2θ/π."""

    name = kernel_id = "linear"
    kernel_number = 1
    constant_drop = 2.0
    is_same_for_all_filters = True

    @staticmethod
    def value(cosine: Tensor, k: K = None) -> Tensor:
        """Return g = (2/π)·asin c."""
        return asin(cosine) * (2 / math.pi)

    def derivative(self, cosine: Tensor) -> Tensor:
        """Return dg/dc = (2/π)/sin θ."""
        return (2 / math.pi) / sine(cosine)

    @staticmethod
    def inverse(value: Tensor, k: K = None) -> Tensor:
        """Return c = sin(πg/2)."""
        return (value.clamp(-1, 1) * (math.pi / 2)).sin()

    def at(self, theta: Tensor) -> Tensor:
        """Return 1 − 2θ/π."""
        return 1 - theta * (2 / math.pi)

    def psi(self, cosine: Tensor, m: float) -> Tensor:
        """Return ψ_m = 1 − 2mθ/π, from 1 − 2θ/π, which has no cancellation at θ = π/2."""
        value: Tensor = self(cosine)
        return value if m == 1 else value * m - (m - 1)

    @staticmethod
    def factors(k: K) -> tuple[None, float]:
        """Return the factors of (2/π)·asin c."""
        return None, 2 / math.pi

    @staticmethod
    def shape(cosine: Tensor, inner: Any, out: Tensor | None = None) -> Tensor:
        """Return asin c."""
        return torch.asin(cosine, out=out)

    @staticmethod
    def multiply_by_slope_(grad: Tensor, cosine: Tensor, shape: Tensor, inner: Any) -> None:
        """Multiply grad by 1/sin θ."""
        multiply_by_inverse_sine_(grad, cosine, shape)


class CosineAngle(AngleFunction):
    """g = cos θ."""

    name = kernel_id = "cosine"
    kernel_number = 0
    constant_drop = 2.0
    is_identity = True
    is_same_for_all_filters = True

    @staticmethod
    def value(cosine: Tensor, k: K = None) -> Tensor:
        """Return c, clamped to [−1, 1]."""
        return clamp_rounding(cosine)

    def derivative(self, cosine: Tensor) -> Tensor:
        """Return dg/dc = 1."""
        return torch.ones_like(cosine)

    @staticmethod
    def inverse(value: Tensor, k: K = None) -> Tensor:
        """Return c = g."""
        return value.clamp(-1, 1)

    def at(self, theta: Tensor) -> Tensor:
        """Return cos θ."""
        return theta.cos()

    @staticmethod
    def factors(k: K) -> tuple[None, float]:
        """Return the factors of c."""
        return None, 1.0

    @staticmethod
    def shape(cosine: Tensor, inner: Any, out: Tensor | None = None) -> Tensor:
        """Return c."""
        return cosine

    @staticmethod
    def multiply_by_slope_(grad: Tensor, cosine: Tensor, shape: Tensor, inner: Any) -> None:
        """Leave grad as it is."""
