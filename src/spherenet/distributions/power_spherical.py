"""The power spherical distribution."""

from __future__ import annotations

import numpy as np
import torch
from torch import Size, Tensor

from spherenet.distributions.base import AroundDirection, half_squared_distance, log_surface

__all__ = ["PowerSpherical"]

SHIFTS = 16
"""Steps by which arguments of the gamma function are raised before Stirling's series."""

STIRLING = [1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156]
"""Coefficients of x^(1 − 2k) in log Γ(x), k = 1, …, 7."""


_nodes, _weights = np.polynomial.legendre.leggauss(8)
QUADRATURE = list(zip(((_nodes + 1) / 2).tolist(), (_weights / 2).tolist(), strict=True))
"""Nodes and weights of Gauss–Legendre on [0, 1]; up to κ = (d − 1)/4 their relative error is below 1e-15."""


class PowerSpherical(AroundDirection):
    """The power spherical distribution: p(x) ∝ (1 + μ·x)^κ for unit vectors x (De Cao and Aziz, 2020).

    (1 + μ·x) / 2 has the beta distribution with parameters (d − 1) / 2 + κ and (d − 1) / 2, so that samples need no
    rejection and are exactly reparametrized.

    Args:
        mean_direction: Unit vectors μ [..., d] with d ≥ 2.
        concentration: κ ≥ 0, finite, with a shape that broadcasts with [...]; 0 is the uniform distribution.
        validate_args: Whether values are checked: by default, but not in compiled code. The default of
            `torch.distributions` is not asked, because torch.compile changes it for the whole process.

    Raises:
        TypeError: The mean direction is not a tensor of floating point numbers.
        ValueError: A mean direction has less than 2 entries or another norm than 1, a concentration is negative or not
            finite, or the shapes do not fit.
    """

    @property
    def mean_resultant_length(self) -> Tensor:
        """Mean of μ·x: κ / (κ + d − 1)."""
        return self.concentration / (self.concentration + (self.dimension - 1))

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of unit vectors [..., d]; −inf opposite to the mean direction for κ > 0."""
        self._validate_sample(value)
        kappa, direction = self.concentration.double(), self.mean_direction.double()
        distance, opposite = (half_squared_distance(value, center) / 2 for center in (direction, -direction))
        is_near = distance < opposite
        # log((1 + μ·x) / 2) by the distance that is smaller, and therefore more exact.
        near = torch.special.xlog1py(kappa, -distance.where(is_near, 0))
        far = torch.special.xlogy(kappa, opposite.where(~is_near, 1))
        mode = self._log_mode_ratio() - log_surface(self.dimension)
        return (mode + torch.where(is_near, near, far)).to(self.concentration.dtype)

    def _log_mode_ratio(self) -> Tensor:
        """Return the log of the density at its mode, relative to the uniform density."""
        kappa, half = self.concentration.double(), (self.dimension - 1) / 2
        return _log_gamma_ratio(kappa + half, half) - _log_gamma_ratio(torch.full_like(kappa, half), half)

    def _variances(self) -> tuple[Tensor, Tensor]:
        kappa, free = self.concentration.double(), self.dimension - 1
        along = free * (2 * kappa + free) / ((kappa + free).square() * (kappa + free + 1))
        # 1 − E (μ·x)², divided among the other directions
        across = (free * (2 * kappa + free) / (kappa + free).square() - along) / free
        return along, across

    def _kl_to_uniform(self) -> Tensor:
        kappa, half = self.concentration.double(), (self.dimension - 1) / 2
        large = self._log_mode_ratio() - kappa * _digamma_difference(kappa + half, half)
        small = sum(weight * node * self._curvature(node) for node, weight in QUADRATURE)
        return torch.where(kappa < half / 2, kappa.square() * small, large)

    def _kl_from_uniform(self) -> Tensor:
        kappa, half = self.concentration.double(), (self.dimension - 1) / 2
        large = kappa * _digamma_difference(torch.full_like(kappa, half), half) - self._log_mode_ratio()
        small = sum(weight * (1 - node) * self._curvature(node) for node, weight in QUADRATURE)
        return torch.where(kappa < half / 2, kappa.square() * small, large)

    def _curvature(self, node: float) -> Tensor:
        """Return −F''(node·κ) of F(κ) = `_log_mode_ratio`.

        The divergences are the remainders of first-order expansions of F, whose differences cancel for small κ. As
        integrals, ∫ t·(−F''(t)) dt and ∫ (κ − t)·(−F''(t)) dt from 0 to κ, they are sums of positive numbers.
        """
        half = (self.dimension - 1) / 2
        return _trigamma_difference(node * self.concentration.double() + half, half)

    def _angles(self, shape: Size) -> Tensor:
        half = (self.dimension - 1) / 2
        shapes = (self.concentration.double() + half).expand(shape)
        near, far = torch._standard_gamma(shapes), torch._standard_gamma(torch.full_like(shapes, half))
        return 2 * torch.atan((far / near).sqrt())


def _log_gamma_ratio(x: Tensor, rise: float) -> Tensor:
    """Return log Γ(x + rise) − log Γ(x) for x > 0 without the cancellation of large logarithms."""
    result = torch.zeros_like(x)
    for shift in range(SHIFTS):
        result = result - torch.log1p(rise / (x + shift))
    low, high = x + SHIFTS, x + (SHIFTS + rise)
    result = result + (low - 0.5) * torch.log1p(rise / low) + rise * (high.log() - 1)
    for k, coefficient in enumerate(STIRLING):
        power = 2 * k + 1
        result = result + coefficient * (high**-power - low**-power)
    return result


def _digamma_difference(x: Tensor, rise: float) -> Tensor:
    """Return ψ(x + rise) − ψ(x), the derivative of `_log_gamma_ratio`, for x > 0."""
    result = torch.zeros_like(x)
    for shift in range(SHIFTS):
        result = result + (rise / (x + shift)) / (x + (shift + rise))
    low, high = x + SHIFTS, x + (SHIFTS + rise)
    result = result + torch.log1p(rise / low) + 0.5 * (rise / low) / high
    for k, coefficient in enumerate(STIRLING):
        power = 2 * k + 1
        result = result - power * coefficient * (high ** -(power + 1) - low ** -(power + 1))
    return result


def _trigamma_difference(x: Tensor, rise: float) -> Tensor:
    """Return ψ'(x) − ψ'(x + rise), minus the derivative of `_digamma_difference`, for x > 0."""
    result = torch.zeros_like(x)
    for shift in range(SHIFTS):
        low, high = x + shift, x + (shift + rise)
        result = result + (rise / low / high) * (1 / low + 1 / high)
    low, high = x + SHIFTS, x + (SHIFTS + rise)
    result = result + (rise / low / high) * (1 + (1 / low + 1 / high) / 2)
    for k, coefficient in enumerate(STIRLING):
        power = 2 * k + 1
        result = result + power * (power + 1) * coefficient * (low ** -(power + 2) - high ** -(power + 2))
    return result
