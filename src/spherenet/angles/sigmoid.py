"""The sigmoid angle function, with a fixed and with a learned k."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spherenet._util.validation import require_integer, require_positive
from spherenet.angles.base import AngleFunction, Device
from spherenet.angles.elementary import asin, clamp_rounding, multiply_by_inverse_sine_, sine, tanh, tanh_ratio

__all__ = ["DEFAULT_K", "DEFAULT_LEARNED_K", "SMALLEST_K", "LearnableSigmoidAngle", "SigmoidAngle", "require_k"]

DEFAULT_K = 0.3
"""Default k of the sigmoid: the paper's choice for its larger experiments."""

DEFAULT_LEARNED_K = 0.5
"""Default initial value of a learned k (the paper's value)."""

SMALLEST_K = 1e-6
"""Below this k the sigmoid is a step in every dtype, and 1/k² overflows float32 if k is learned."""

SMALLEST_LEARNED_K = 0.01
"""Lower bound of a learned k: the sigmoid is a step there, and a smaller k would have no gradient."""


def require_k(value: object) -> float:
    """Return k of a sigmoid if it is a finite number of at least `SMALLEST_K`, or raise an error."""
    number = require_positive("k", value)
    if number < SMALLEST_K:
        raise ValueError(f"k must be at least {SMALLEST_K:g}, got {value!r}: below it the sigmoid is a step.")
    return number


class _Sigmoid(AngleFunction):
    """g = tanh(asin(c)/(2k)) / tanh(π/(4k)) for any k."""

    kernel_id = "sigmoid"
    constant_drop = 2.0
    takes_k = True
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
    is_same_for_all_filters = True
    k: float

    def __init__(self, k: float = DEFAULT_K) -> None:
        super().__init__()
        self.k = require_k(k)

    @classmethod
    def create(
        cls, k: float | None, num_filters: int | None, device: Device, dtype: torch.dtype | None
    ) -> SigmoidAngle:
        """Return an object with k, or with the default."""
        return cls(DEFAULT_K if k is None else k)

    def extra_repr(self) -> str:
        """Return k."""
        return f"k={self.k:g}"


class LearnableSigmoidAngle(_Sigmoid):
    """The sigmoid with a trained k > 0, one per filter or one for all.

    k = 0.01 + softplus(raw_k) is positive by construction. Pass one object to several layers to share its k.

    Args:
        num_filters: Number of k; None for a single one.
        k: Initial value of each k, greater than 0.01.
        device: Device of the parameter.
        dtype: Dtype of the parameter.
    """

    name = "learnable"
    is_learned = True

    def __init__(
        self,
        num_filters: int | None = None,
        k: float = DEFAULT_LEARNED_K,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.initial_k = require_k(k)
        if self.initial_k <= SMALLEST_LEARNED_K:
            raise ValueError(f"k must be greater than {SMALLEST_LEARNED_K:g} if it is learned, got {k!r}.")
        shape = () if num_filters is None else (require_integer("num_filters", num_filters, minimum=0),)
        self.raw_k = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    @classmethod
    def create(
        cls, k: float | None, num_filters: int | None, device: Device, dtype: torch.dtype | None
    ) -> LearnableSigmoidAngle:
        """Return an object with one k per filter."""
        return cls(num_filters, DEFAULT_LEARNED_K if k is None else k, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Set every k to its initial value."""
        excess = self.initial_k - SMALLEST_LEARNED_K
        # The inverse of softplus in a form that neither overflows nor cancels.
        nn.init.constant_(self.raw_k, excess + math.log(-math.expm1(-excess)))

    @property
    def k(self) -> Tensor:  # type: ignore[override]
        """The positive k, of shape [] or [filters], in float32 or float64."""
        raw = self.raw_k.float() if self.raw_k.dtype in (torch.bfloat16, torch.float16) else self.raw_k
        return SMALLEST_LEARNED_K + F.softplus(raw)

    @property
    def is_same_for_all_filters(self) -> bool:
        """Whether there is a single k."""
        return self.raw_k.dim() == 0

    def extra_repr(self) -> str:
        """Return the number of k and their initial value."""
        shared = "shared" if self.raw_k.dim() == 0 else f"{self.raw_k.numel()} filters"
        return f"{shared}, initial_k={self.initial_k:g}"
