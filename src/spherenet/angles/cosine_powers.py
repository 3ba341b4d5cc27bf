"""Angle functions that are powers of the cosine: sign(c)·c², and sign(c)·|c|^p with a learned p."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from spherenet._util.positive import PositiveParameter
from spherenet.angles.base import AngleFunction, Device, K, LearnedAngle
from spherenet.angles.elementary import ElementaryFunction, clamp_rounding, elementary, save_tensors, with_slope

__all__ = ["SharpenedCosineAngle", "SquareCosineAngle"]

LEARNED_P = PositiveParameter("p", start=2.0, smallest=0.1)
"""Learned p, which starts at the value of the published implementations of sharpened cosine similarity.

At p = 0.1, g is almost a step.
"""


class SquareCosineAngle(AngleFunction):
    """g = sign(c)·c² for c = cos θ. Angles near π/2 have values near 0."""

    name = kernel_id = "square-cosine"
    kernel_number = 3
    constant_drop = 2.0
    is_same_for_all_filters = True
    is_recoverable = False

    @staticmethod
    def value(cosine: Tensor, k: K = None) -> Tensor:
        """Return c·|c|, with c clamped to [−1, 1]."""
        cosine = clamp_rounding(cosine)
        return cosine * cosine.abs()

    def derivative(self, cosine: Tensor) -> Tensor:
        """Return dg/dc = 2|c|."""
        return 2 * cosine.clamp(-1, 1).abs()

    @staticmethod
    def inverse(value: Tensor, k: K = None) -> Tensor:
        """Return c = sign(g)·sqrt(|g|)."""
        return value.sign() * value.abs().clamp_max(1).sqrt()

    @staticmethod
    def factors(k: K) -> tuple[None, float]:
        """Return the factors of c·|c|."""
        return None, 1.0

    @staticmethod
    def shape(cosine: Tensor, inner: Any, out: Tensor | None = None) -> Tensor:
        """Return c·|c|."""
        return torch.mul(cosine, cosine.abs(), out=out)

    @staticmethod
    def multiply_by_slope_(grad: Tensor, cosine: Tensor, shape: Tensor, inner: Any) -> None:
        """Multiply grad by 2|c|."""
        grad.mul_(torch.abs(cosine, out=shape)).mul_(2)


class SharpenedCosineAngle(LearnedAngle):
    """g = sign(c)·|c|^p with a trained p ≥ 0.1, one per filter or one for all: sharpened cosine similarity.

    p = 0.1 + softplus(raw_p). p = 1 is the cosine and p = 2 its signed square. For p < 1 the derivative is infinite at
    c = 0; in it |c| is kept above 4·sqrt(ε) of the dtype, as sin θ is for the other angle functions.

    Args:
        num_filters: Number of p; None for a single one.
        p: Initial value of each p, greater than 0.1.
        device: Device of the parameter.
        dtype: Dtype of the parameter.
    """

    name = kernel_id = "sharpened-cosine"
    kernel_number = 4
    parameter = LEARNED_P
    constant_drop = 2.0
    is_recoverable = False

    def __init__(
        self,
        num_filters: int | None = None,
        p: float = LEARNED_P.start,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_filters, p, device=device, dtype=dtype)

    @property
    def p(self) -> Tensor:
        """The power, of shape [] or [filters], in float32 or float64."""
        return self.k

    @staticmethod
    def value(cosine: Tensor, k: Any) -> Tensor:
        """Return sign(c)·|c|^p for p in the place of k."""
        value: Tensor = _signed_power(cosine, k.to(cosine.dtype))
        return value

    def derivative(self, cosine: Tensor) -> Tensor:
        """Return dg/dc = p·|c|^(p − 1), bounded at c = 0."""
        return _slope(_logarithm(cosine), self.p.to(cosine.dtype))

    def inverse(self, value: Tensor, k: K = None) -> Tensor:
        """Return c = sign(g)·|g|^(1/p)."""
        return value.sign() * value.abs().clamp_max(1) ** (1 / self.p.to(value.dtype))

    def for_inference(self, cosine: Tensor) -> Tensor:
        """Return sign(c)·|c|^p without the bounded derivative."""
        return cosine.sign() * cosine.abs() ** self.p.detach().to(cosine.dtype)


def _logarithm(cosine: Tensor) -> Tensor:
    """Return log|c|, with |c| at most 1 and at least the smallest normal number, whose powers are 0 in effect."""
    return cosine.abs().clamp(torch.finfo(cosine.dtype).tiny, 1).log()


def _slope(logarithm: Tensor, p: Tensor) -> Tensor:
    """Return p·|c|^(p − 1) from log|c|. For p < 1 it is infinite at 0, and |c| is kept above 4·sqrt(ε)."""
    floor = math.log(4 * torch.finfo(logarithm.dtype).eps ** 0.5)
    return p * (torch.maximum(logarithm, torch.where(p < 1, floor, p.new_full((), -math.inf))) * (p - 1)).exp()


class _SignedPower(ElementaryFunction):
    """v = sign(c)·|c|^p:  dv = slope·dc + v·log|c|·dp, with the bounded slope.

    p broadcasts against c, so that its own arithmetic takes one operation per filter. Both derivatives use one
    logarithm, and exp, which is several times as fast as a power.
    """

    @staticmethod
    def forward(cosine: Tensor, p: Tensor) -> Tensor:
        return (cosine.abs().clamp_max(1) ** p).copysign(cosine)

    @staticmethod
    def compiled(cosine: Tensor, p: Tensor) -> Tensor:
        constant, power = cosine.detach(), p.detach()
        logarithm, value = _logarithm(constant), _SignedPower.forward(constant, power)
        value = with_slope(value, cosine, _slope(logarithm, power))
        return value + _by_power(constant, logarithm, power) * (p - power)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        save_tensors(ctx, *inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if grad is None:
            return None, None
        cosine, p = ctx.saved_tensors
        logarithm = _logarithm(cosine)
        by_cosine = grad * _slope(logarithm, p) if ctx.needs_input_grad[0] else None
        by_p = None
        if ctx.needs_input_grad[1]:
            by_p = (grad * _by_power(cosine, logarithm, p)).sum_to_size(p.shape)
        return by_cosine, by_p

    @staticmethod
    def jvp(ctx: Any, cosine_tangent: Tensor | None, p_tangent: Tensor | None) -> Tensor:
        cosine, p = ctx.saved_tensors
        logarithm, tangent = _logarithm(cosine), torch.zeros_like(cosine)
        if cosine_tangent is not None:
            tangent = tangent + cosine_tangent * _slope(logarithm, p)
        if p_tangent is not None:
            tangent = tangent + p_tangent * _by_power(cosine, logarithm, p)
        return tangent


_signed_power = elementary(_SignedPower)


def _by_power(cosine: Tensor, logarithm: Tensor, p: Tensor) -> Tensor:
    """Return ∂v/∂p = v·log|c|, 0 at c = 0."""
    return cosine.sign() * logarithm * (logarithm * p).exp()
