"""Cheaper forms of asin, sin and tanh for arguments ≥ 0 in float32, used by the compiled passes.

The library's own vector asin and tanh cost more than the memory traffic of a pass. Errors, bounded over the whole
range of the arguments in `tests/kernels/test_approximations.py`:

    asin on [0, 1]     3e-7 relative
    sin on [0, π/2]    2e-7 relative
    tanh               2e-7 absolute: all of a float32 near 1, fewer digits near 0 (but 0 is exact)

tanh repeats its argument once, because the compiler writes an argument out wherever it is used: as a quotient of
polynomials it is a little faster, but takes ten times as long to compile. For float64 use torch's functions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["asin", "sin", "tanh"]

# Minimax fits by benchmarks/fit_approximations.py, lowest power first.
# asin(t) = t + t·z·Q(z), z = t² ≤ ¼
_ASIN = (0.1666675248, 0.07495297643, 0.0454703759, 0.02417951499, 0.04216630789)
# sin(h) = h + h·z·S(z), z = h² ≤ (π/2)²
_SIN = (-0.1666665955, 0.008333066246, -0.0001980960289, 2.605780622e-06)


def _horner(z: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    value = z * coefficients[-1] + coefficients[-2]
    for coefficient in reversed(coefficients[:-2]):
        value = value * z + coefficient
    return value


def asin(x: Tensor) -> Tensor:
    """asin of x ∈ [0, 1]; above ½ by asin x = π/2 − 2·asin sqrt((1−x)/2), which has no cancellation."""
    outer = x > 0.5
    z = torch.where(outer, (1 - x) * 0.5, x * x)
    t = torch.where(outer, z.sqrt(), x)
    inner = t + t * z * _horner(z, _ASIN)
    return torch.where(outer, math.pi / 2 - 2 * inner, inner)


def sin(h: Tensor) -> Tensor:
    """sin of h ∈ [0, π/2]."""
    z = h * h
    return h + h * z * _horner(z, _SIN)


def tanh(v: Tensor) -> Tensor:
    """tanh of v ≥ 0 as 1 − 2/(1 + e^{2v}); e^{2v} may overflow, which gives 1."""
    return 1 - 2 / (1 + (2 * v).exp())
