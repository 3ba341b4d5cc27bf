"""Short polynomial forms of asin, sin and tanh for float32, made of multiplications and one sqrt or division.

The library's most accurate vector functions cost more than the memory traffic of a pass; these do not. Error, as
bounded in `tests/kernels/test_approximations.py` over all of the argument's range, relative to the value:

    asin  3e-7      sin on [0, π/2]  2e-7      tanh  5e-7

Coefficients: minimax fits by `benchmarks/fit_approximations.py`. For float64 use torch's own functions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["asin", "sin_of_acute", "tanh"]

# asin(t) = t + t·z·Q(z), z = t² ≤ ¼; lowest power first, as are all tables here.
_ASIN = (0.1666675248, 0.07495297643, 0.0454703759, 0.02417951499, 0.04216630789)
# sin(h) = h + h·z·S(z), z = h² ≤ (π/2)²
_SIN = (-0.1666665955, 0.008333066246, -0.0001980960289, 2.605780622e-06)
# tanh(v) = v·N(v²)/M(v²), |v| ≤ 9, beyond which tanh is 1 in float32
_TANH_ABOVE = (0.9999999934, 0.1308401052, 0.003103956693, 1.115431345e-05, -2.022524775e-08, 5.277959483e-11,
               -8.488740005e-14)  # fmt: skip
_TANH_BELOW = (1.0, 0.4641733762, 0.02449518028, 0.0002546145928)
_TANH_LIMIT = 9.0


def _horner(z: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    value = z * coefficients[-1] + coefficients[-2]
    for coefficient in reversed(coefficients[:-2]):
        value = value * z + coefficient
    return value


def asin(x: Tensor) -> Tensor:
    """asin of x ∈ [−1, 1]; above ½ by asin x = π/2 − 2·asin sqrt((1−x)/2), which has no cancellation."""
    size = x.abs()
    outer = size > 0.5
    z = torch.where(outer, (1 - size) * 0.5, size * size)
    t = torch.where(outer, z.sqrt(), size)
    inner = t + t * z * _horner(z, _ASIN)
    value = torch.where(outer, math.pi / 2 - 2 * inner, inner)
    return torch.where(x < 0, -value, value)


def sin_of_acute(h: Tensor) -> Tensor:
    """sin of h ∈ [−π/2, π/2]."""
    z = h * h
    return h + h * z * _horner(z, _SIN)


def tanh(v: Tensor) -> Tensor:
    """tanh of any v."""
    v = v.clamp(-_TANH_LIMIT, _TANH_LIMIT)
    z = v * v
    return v * _horner(z, _TANH_ABOVE) / _horner(z, _TANH_BELOW)
