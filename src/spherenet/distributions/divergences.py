"""Closed forms for `torch.distributions.kl_divergence`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.distributions.kl import register_kl

from spherenet.distributions import bessel
from spherenet.distributions.base import AroundDirection, broadcast, half_squared_distance
from spherenet.distributions.power_spherical import PowerSpherical
from spherenet.distributions.uniform import HypersphericalUniform
from spherenet.distributions.von_mises_fisher import VonMisesFisher
from spherenet.errors import InvalidArgument

__all__: list[str] = []


_Divergence = TypeVar("_Divergence", bound=Callable[..., Tensor])


def _registered(p: type[Distribution], q: type[Distribution]) -> Callable[[_Divergence], _Divergence]:
    """Return torch's decorator with a type."""
    return register_kl(p, q)  # type: ignore[no-any-return, no-untyped-call]


def _require_same_dimension(p: Distribution, q: Distribution) -> None:
    if p.event_shape != q.event_shape:
        raise InvalidArgument("q", f"must have {p.event_shape[0]} dimensions as p, got {q.event_shape[0]}.")


@_registered(HypersphericalUniform, HypersphericalUniform)
def _uniform_uniform(p: HypersphericalUniform, q: HypersphericalUniform) -> Tensor:
    _require_same_dimension(p, q)
    return torch.zeros_like(p.entropy() + q.entropy())


@_registered(VonMisesFisher, HypersphericalUniform)
@_registered(PowerSpherical, HypersphericalUniform)
def _to_uniform(p: AroundDirection, q: HypersphericalUniform) -> Tensor:
    _require_same_dimension(p, q)
    divergence = p._kl_to_uniform().to(p.concentration.dtype)
    return divergence.expand(broadcast(p.batch_shape, q.batch_shape))


@_registered(HypersphericalUniform, VonMisesFisher)
@_registered(HypersphericalUniform, PowerSpherical)
def _from_uniform(p: HypersphericalUniform, q: AroundDirection) -> Tensor:
    _require_same_dimension(p, q)
    divergence = q._kl_from_uniform().to(torch.promote_types(p.entropy().dtype, q.concentration.dtype))
    return divergence.expand(broadcast(p.batch_shape, q.batch_shape))


@_registered(VonMisesFisher, VonMisesFisher)
@_registered(PowerSpherical, VonMisesFisher)
def _to_von_mises_fisher(p: AroundDirection, q: VonMisesFisher) -> Tensor:
    """Return −H(p) − E_p log q: log q is linear in x, so its mean is its value at the mean of p."""
    _require_same_dimension(p, q)
    dimension, kappa = p.dimension, q.concentration.double()
    if isinstance(p, VonMisesFisher):
        deficit = bessel.resultant_deficit(dimension, p.concentration.double())
    else:
        deficit = (dimension - 1) / (p.concentration.double() + (dimension - 1))
    # 1 − E_p μ_q·x
    missing = deficit + (1 - deficit) * half_squared_distance(p.mean_direction, q.mean_direction)
    divergence = p._kl_to_uniform() - bessel.log_mode_ratio(dimension, kappa) + kappa * missing
    # Of two almost equal distributions, rounding would leave a negative number.
    return divergence.clamp(min=0).to(torch.promote_types(p.concentration.dtype, q.concentration.dtype))
