"""The sigmoid angle function, with a fixed and with a learned k."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from spherenet._util.positive import PositiveParameter
from spherenet.angles.base import AngleFunction, Device, LearnedAngle
from spherenet.angles.elementary import asin, clamp_rounding, multiply_by_inverse_sine_, sine, tanh, tanh_ratio

__all__ = ["DEFAULT_K", "LearnableSigmoidAngle", "SigmoidAngle"]

FIXED_K = PositiveParameter("k", start=0.3, smallest=1e-6, reason="below it the sigmoid is a step")
"""k of the sigmoid. 0.3 is the paper's choice for its larger experiments; below 1e-6, 1/k² overflows float32."""

LEARNED_K = PositiveParameter("k", start=0.5, smallest=0.01)
"""Learned k, which starts at the paper's value. Below 0.01 the sigmoid is a step, and k would have no gradient."""

DEFAULT_K = FIXED_K.start
"""Default k of the sigmoid."""


class _Sigmoid(AngleFunction):
    """g = tanh(asin(c)/(2k)) / tanh(π/(4k)) for any k."""

    kernel_id = "sigmoid"
    kernel_number = 2
    constant_drop = 2.0
    k: Tensor | float

    @staticmethod
    def value(cosine: Tensor, k: Any) -> Tensor:
        """Return g = C(k)·(1−e^u)/(1+e^u) with u = θ/k − π/(2k), as tanh(asin(c)/(2k)) / tanh(π/(4k))."""
        return clamp_rounding(tanh_ratio(asin(cosine), k))

    def derivative(self, cosine: Tensor) -> Tensor:
        """Return dg/dc = C(k)·sech²(asin(c)/(2k)) / (2k·sin θ)."""
        # 1/cosh² keeps its relative accuracy where 1 − tanh² is rounding noise; cosh overflows to inf, not to NaN.
        k = self.k
        steepness = 1 / (asin(cosine) / (2 * k)).cosh().square()
        derivative: Tensor = steepness / (2 * k * tanh(math.pi / (4 * k)) * sine(cosine))
        return derivative

    @staticmethod
    def inverse(value: Tensor, k: Any) -> Tensor:
        """Return c = sin(2k·atanh(g·tanh(π/(4k)))); if tanh saturates, the largest c that the dtype distinguishes."""
        below_one = 1 - torch.finfo(value.dtype).eps
        scaled = (value * tanh(math.pi / (4 * k))).clamp(-below_one, below_one)
        latitude: Tensor = 2 * k * scaled.atanh()
        return latitude.clamp(-math.pi / 2, math.pi / 2).sin()

    def at(self, theta: Tensor) -> Tensor:
        """Return tanh((π/2 − θ)/(2k)) / tanh(π/(4k))."""
        return tanh_ratio(math.pi / 2 - theta, self.k)

    @staticmethod
    def factors(k: Any) -> tuple[Any, Any]:
        """Return 1/(2k) and 1/tanh(π/(4k))."""
        return 0.5 / k, 1 / tanh(math.pi / (4 * k))

    @staticmethod
    def shape(cosine: Tensor, inner: Any, out: Tensor | None = None) -> Tensor:
        """Return tanh(inner·asin c)."""
        return torch.tanh(torch.mul(torch.asin(cosine, out=out), inner, out=out), out=out)

    @staticmethod
    def multiply_by_slope_(grad: Tensor, cosine: Tensor, shape: Tensor, inner: Any) -> None:
        """Multiply grad by (1 − tanh²)·inner/sin θ."""
        grad.mul_(torch.addcmul(cosine.new_ones(()), shape, shape, value=-1, out=shape)).mul_(inner)
        multiply_by_inverse_sine_(grad, cosine, shape)


class SigmoidAngle(_Sigmoid):
    """g = tanh(asin(c)/(2k)) / tanh(π/(4k)) with a fixed k: a step for small k, linear for large k.

    Args:
        k: Finite number greater than 0.
    """

    name = "sigmoid"
    parameter = FIXED_K
    is_same_for_all_filters = True
    k: float

    def __init__(self, k: float = DEFAULT_K) -> None:
        super().__init__()
        self.k = FIXED_K.require(k)

    def extra_repr(self) -> str:
        """Return k."""
        return f"k={self.k:g}"


class LearnableSigmoidAngle(LearnedAngle, _Sigmoid):  # type: ignore[misc]
    """The sigmoid with a trained k > 0, one per filter or one for all.

    k = 0.01 + softplus(raw_k) is positive by construction. Pass one object to several layers to share its k.

    Args:
        num_filters: Number of k; None for a single one.
        k: Initial value of each k, greater than 0.01.
        device: Device of the parameter.
        dtype: Dtype of the parameter.
    """

    name = "learnable"
    parameter = LEARNED_K

    def __init__(
        self,
        num_filters: int | None = None,
        k: float = LEARNED_K.start,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_filters, k, device=device, dtype=dtype)
