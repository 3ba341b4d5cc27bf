"""Bessel functions for the von Mises–Fisher distribution, without overflow, underflow or cancellation.

With v = d / 2 − 1, a uniform unit vector x in d dimensions and a fixed unit vector μ,

    M_d(κ) = E exp(κ μ·x) = Γ(v + 1) (2 / κ)^v I_v(κ).

M_d is 1 at κ = 0 and grows slower than e^κ, so that log M_d(κ) and κ − log M_d(κ) are harmless where I_v itself
underflows or overflows. Both, and 1 − I_{v+1}(κ) / I_v(κ) with its derivative, are computed by the uniform asymptotic
expansion of DLMF 10.41 for orders of at least 32, and from there by downward recurrence for smaller ones.

Everything is computed in float64 and rounded to the dtype of the input. The relative error is at most 1e-12 in float64
and 1e-6 in float32 for dimensions 2 to 4,096 and κ from 0 to 1e6.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from spherenet.errors import InvalidArgument

__all__ = [
    "length_per_kappa",
    "log_bessel_i",
    "log_generating_function",
    "log_mode_ratio",
    "resultant_deficit",
    "resultant_length",
    "resultant_slope",
]

SMALLEST_ORDER = 32
"""Smallest order for which the asymptotic expansion is used."""

TERMS = 14
"""Number of its terms; the next one is below 1e-16 for the smallest order."""


class _Values(NamedTuple):
    """Functions of κ in float64."""

    log_m: Tensor
    """log M_d(κ)"""
    log_mode_ratio: Tensor
    """κ − log M_d(κ)"""
    deficit: Tensor
    """1 − A(κ), where A(κ) = I_{v+1}(κ) / I_v(κ)"""
    slope: Tensor
    """A'(κ)"""


@lru_cache(maxsize=1)
def _expansion() -> list[list[Fraction]]:
    """Return D_k for k = 1, …, TERMS, where Σ D_k(p) / N^k = log Σ u_k(p) / N^k with the u_k of DLMF 10.41.10.

    Entry i of D_k is its coefficient of p^(k + 2i).
    """
    terms = [[Fraction(1)]]
    for k in range(TERMS):
        following = [Fraction(0)] * (k + 2)
        for i, coefficient in enumerate(terms[k]):
            n = k + 2 * i
            following[i] += coefficient * (Fraction(n, 2) + Fraction(1, 8 * (n + 1)))
            following[i + 1] -= coefficient * (Fraction(n, 2) + Fraction(5, 8 * (n + 3)))
        terms.append(following)
    logarithm: list[list[Fraction]] = [[]]
    for k in range(1, TERMS + 1):
        coefficients = list(terms[k])
        for j in range(1, k):
            for a, left in enumerate(logarithm[j]):
                for b, right in enumerate(terms[k - j]):
                    coefficients[a + b] -= Fraction(j, k) * left * right
        logarithm.append(coefficients)
    return logarithm[1:]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # compilers need not look into fractions
def _polynomials(twice_order: int) -> tuple[list[float], list[float], list[float]]:
    """Return the coefficients of (E(p) − E(1)) / (1 − p), E'(p) and E''(p), where E(p) = Σ D_k(p) / N^k."""
    return _computed_polynomials(twice_order)


@lru_cache(maxsize=64)
def _computed_polynomials(twice_order: int) -> tuple[list[float], list[float], list[float]]:
    order = Fraction(twice_order, 2)
    total = [Fraction(0)] * (3 * TERMS + 1)
    for k, coefficients in enumerate(_expansion(), 1):
        for i, coefficient in enumerate(coefficients):
            total[k + 2 * i] += coefficient / order**k
    first = [n * coefficient for n, coefficient in enumerate(total)][1:]
    second = [n * coefficient for n, coefficient in enumerate(first)][1:]
    # p^n − 1 = −(1 − p)(1 + p + … + p^(n − 1))
    quotient = [-sum(total[j + 1 :], Fraction(0)) for j in range(3 * TERMS)]
    floats = [[float(value) for value in values] for values in (quotient, first, second)]
    return floats[0], floats[1], floats[2]


def _polynomial(coefficients: list[float], p: Tensor) -> Tensor:
    result = torch.full_like(p, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = result * p + coefficient
    return result


def _values(dimension: int, kappa: Tensor) -> _Values:
    """Return the functions of κ; `kappa` is float64 and not negative."""
    steps = max(0, math.ceil(SMALLEST_ORDER - (dimension / 2 - 1)))
    twice_order = dimension - 2 + 2 * steps
    n = twice_order / 2
    quotient, first, second = _polynomials(twice_order)
    root = torch.hypot(torch.full_like(kappa, n), kappa)
    p = n / root
    excess = kappa * (kappa / (root + n))  # root − n
    logs = n * torch.log1p(excess / (2 * n)) + 0.5 * torch.log1p(excess / n)
    logs = logs - (excess / root) * _polynomial(quotient, p)
    log_m = excess - logs
    log_mode_ratio = n * ((excess + kappa) / (root + kappa)) + logs
    share, bent = kappa / root, _polynomial(first, p)
    correction = share * ((0.5 + p * bent) / root)
    deficit = (n + n * (n / (root + kappa))) / (n + root) + correction
    ratio = kappa / (n + root) - correction
    slope = n / (n + root) + 0.5 * (share**2 - p**2) / root
    slope = slope - p / root * (bent * (1 - 3 * share**2) - _polynomial(second, p) * p * share**2)
    slope = slope / root
    for step in reversed(range(steps)):
        twice = dimension + 2 * step  # 2 (order + 1)
        growth = torch.log1p(kappa * ratio / twice)
        log_m, log_mode_ratio = log_m + growth, log_mode_ratio - growth
        bottom = twice + kappa * ratio
        slope = (twice - kappa * slope * kappa) / bottom / bottom
        ratio, deficit = kappa / bottom, (twice - kappa * deficit) / bottom
    return _Values(log_m, log_mode_ratio, deficit, slope)


class _OfKappa(Function):
    """A field of `_Values`, with the derivative of `_derivative`."""

    @staticmethod
    def forward(ctx: Any, kappa: Tensor, dimension: int, name: str) -> Tensor:
        ctx.save_for_backward(kappa)
        ctx.dimension, ctx.name = dimension, name
        return _values(dimension, kappa)[_Values._fields.index(name)]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (kappa,) = ctx.saved_tensors
        return gradients[0] * _derivative(ctx.name, ctx.dimension, kappa), None, None


def _derivative(name: str, d: int, kappa: Tensor) -> Tensor:
    """Return the derivative of a field of `_Values` by κ, which can be differentiated again."""
    if name == "log_m":
        return resultant_length(d, kappa)
    if name == "log_mode_ratio":
        return resultant_deficit(d, kappa)
    if name == "deficit":
        return -resultant_slope(d, kappa)
    # A' = q (1 − κ (A − B)) with q = A / κ = 1 / (d + κ B), where B is A for two more dimensions.
    q, b = length_per_kappa(d, kappa), resultant_length(d + 2, kappa)
    change, b_change = resultant_slope(d, kappa), resultant_slope(d + 2, kappa)
    difference = resultant_deficit(d, kappa) - resultant_deficit(d + 2, kappa)
    q_change = -(q**2) * (b + kappa * b_change)
    return q_change * (1 + kappa * difference) + q * (difference + kappa * (b_change - change))


def _of_kappa(name: str, dimension: int, kappa: Tensor) -> Tensor:
    value: Tensor = _OfKappa.apply(kappa.double(), dimension, name)  # type: ignore[no-untyped-call]
    return value.to(kappa.dtype)


def log_generating_function(dimension: int, kappa: Tensor) -> Tensor:
    """Return log E exp(κ μ·x) for uniform unit vectors x: 0 at κ = 0."""
    return _of_kappa("log_m", dimension, kappa)


def log_mode_ratio(dimension: int, kappa: Tensor) -> Tensor:
    """Return κ − log E exp(κ μ·x): the log of the density at its mode, relative to the uniform density."""
    return _of_kappa("log_mode_ratio", dimension, kappa)


def resultant_deficit(dimension: int, kappa: Tensor) -> Tensor:
    """Return 1 − I_{d/2}(κ) / I_{d/2−1}(κ), accurate also where the ratio rounds to 1."""
    return _of_kappa("deficit", dimension, kappa)


def resultant_length(dimension: int, kappa: Tensor) -> Tensor:
    """Return I_{d/2}(κ) / I_{d/2−1}(κ), the length of the mean of a von Mises–Fisher distribution."""
    exact = kappa.double()
    return (exact * length_per_kappa(dimension, exact)).to(kappa.dtype)


def resultant_slope(dimension: int, kappa: Tensor) -> Tensor:
    """Return the derivative of `resultant_length`, which is also the variance of μ·x."""
    return _of_kappa("slope", dimension, kappa)


def length_per_kappa(dimension: int, kappa: Tensor) -> Tensor:
    """Return A / κ, which is 1 / d at κ = 0."""
    return 1 / (dimension + kappa * (1 - resultant_deficit(dimension + 2, kappa)))


def log_bessel_i(order: float, x: Tensor) -> Tensor:
    """Return log I_v(x) of the modified Bessel function of the first kind, with gradients for x.

    The error is at most 1e-12 of the largest of |log I_v(x)|, |v log(x / 2)|, log Γ(v + 1) and 1.

    Args:
        order: v: a multiple of 1/2 that is not negative, d / 2 − 1 for d dimensions.
        x: Numbers that are not negative; the result at 0 is −inf, or 0 for order 0.

    Raises:
        ValueError: The order is negative or not a multiple of 1/2.
    """
    if not (math.isfinite(order) and order >= 0 and float(2 * order).is_integer()):
        raise InvalidArgument("order", f"must be a multiple of 1/2 and not negative, got {order}.")
    exact = x.double()
    power = torch.special.xlogy(order, exact / 2) if order else torch.zeros_like(exact)
    return (log_generating_function(round(2 * order) + 2, exact) + power - math.lgamma(order + 1)).to(x.dtype)
