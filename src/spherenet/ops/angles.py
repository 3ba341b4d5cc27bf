"""The angle functions g(θ) of SPEC 1 (1), written as pure functions of c = cos θ.

Each g has three functions: its value, its derivative dg/dc and its inverse g ↦ c. They are written in c
because c is what a convolution yields, and because `asin c` has no cancellation at θ = π/2 where
`1 − 2θ/π` loses digits. All are odd in c, decrease in θ and map [−1, 1] onto [−1, 1].

The derivative dg/dc of a function with a slope at θ = 0 grows like 1/sin θ. The gradient that reaches a
patch does not: it is multiplied by sin θ. Both factors are computed from the same rounded c, so sin θ is
kept above a floor (`sine`), which makes the product bounded and its limit at θ = 0 and θ = π zero.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from spherenet.ops.short_derivatives import ShortDerivative, keep, short

__all__ = [
    "SMALLEST_K",
    "angle_from_cosine",
    "asin",
    "cosine",
    "cosine_derivative",
    "cosine_inverse",
    "linear",
    "linear_derivative",
    "linear_inverse",
    "sigmoid",
    "sigmoid_derivative",
    "sigmoid_inverse",
    "sine",
]

SMALLEST_K = 1e-6
"""Below this k the sigmoid is a step in every format, and 1/k² overflows float32 where k is learned."""


def sine(cosine: Tensor) -> Tensor:
    """sin θ from c = cos θ, kept above 4√ε of the dtype.

    A float cosine of a few hundred products is off by about ε, so 1 − c² is noise below some ε. The floor
    of 16 ε is far enough above the noise for the gradient bound max|dg/dθ|/‖x‖ to hold near θ = 0.
    """
    floor = 16 * torch.finfo(cosine.dtype).eps
    return ((1 - cosine) * (1 + cosine)).clamp_min(floor).sqrt()


class _BoundedAsin(ShortDerivative):
    """asin of a clamped cosine whose derivative 1/sin θ stays finite at ±1; sin θ is the floored cos of the result."""

    @staticmethod
    def forward(cosine: Tensor) -> Tensor:
        return cosine.clamp(-1, 1).asin()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        keep(ctx, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else grad / _floored_cosine(ctx.saved_tensors[0])

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent / _floored_cosine(ctx.saved_tensors[0])


def _floored_cosine(latitude: Tensor) -> Tensor:
    """sin θ from π/2 − θ, kept above its floor as in `sine`."""
    return latitude.cos().clamp_min(4 * torch.finfo(latitude.dtype).eps ** 0.5)


_bounded_asin = short(_BoundedAsin)


def asin(cosine: Tensor) -> Tensor:
    """π/2 − θ from c = cos θ; c is clamped to [−1, 1], the derivative is bounded (see the module)."""
    result: Tensor = _bounded_asin(cosine)
    return result


def angle_from_cosine(cosine: Tensor) -> Tensor:
    """θ ∈ [0, π] from c = cos θ, with the bounded derivative of `asin`."""
    return math.pi / 2 - asin(cosine)


def cosine(cosine: Tensor) -> Tensor:
    """g = cos θ: c itself, clamped to [−1, 1]."""
    return cosine.clamp(-1, 1)


def cosine_derivative(cosine: Tensor) -> Tensor:
    """dg/dc = 1."""
    return torch.ones_like(cosine)


def cosine_inverse(value: Tensor) -> Tensor:
    """c = g."""
    return value.clamp(-1, 1)


def linear(cosine: Tensor) -> Tensor:
    """g = 1 − 2θ/π = (2/π)·asin c."""
    return asin(cosine) * (2 / math.pi)


def linear_derivative(cosine: Tensor) -> Tensor:
    """dg/dc = (2/π)/sin θ."""
    return (2 / math.pi) / sine(cosine)


def linear_inverse(value: Tensor) -> Tensor:
    """c = sin(πg/2)."""
    return (value.clamp(-1, 1) * (math.pi / 2)).sin()


def _tanh(value: Tensor | float) -> Any:
    return value.tanh() if isinstance(value, Tensor) else math.tanh(value)


class _FixedSigmoid(ShortDerivative):
    """y = q·tanh(a·h) of the latitude a, with h = 1/(2k) and q = 1/tanh(π/(4k)):  dy = h·(q − y²/q)·da."""

    @staticmethod
    def forward(latitude: Tensor, k: float) -> Tensor:
        return (latitude / (2 * k)).tanh() / math.tanh(math.pi / (4 * k))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.k = inputs[1]
        keep(ctx, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return None if grad is None else grad * _FixedSigmoid.slope(ctx), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return tangent * _FixedSigmoid.slope(ctx)

    @staticmethod
    def slope(ctx: Any) -> Tensor:
        """dy/da = h·q − y²·h/q."""
        (value,) = ctx.saved_tensors
        h, tau = 0.5 / ctx.k, math.tanh(math.pi / (4 * ctx.k))
        return torch.rsub(value * value, h / tau, alpha=h * tau)


class _LearnedSigmoid(ShortDerivative):
    """y = tanh(a·h)/τ with a tensor k that broadcasts; returns y, h and τ, which its derivatives use.

    With B = 1/τ − y²τ and W = 1/τ − τ:  dy = B·(h·da + a·dh) + y·W·πh²·dk,  dh = −2h²·dk,  dτ = −τ·W·πh²·dk.
    """

    @staticmethod
    def forward(latitude: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = 0.5 / k
        tau = (h * (math.pi / 2)).tanh()
        return (latitude * h).tanh() / tau, h, tau

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
        keep(ctx, inputs[0], *output)

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, grad_h: Tensor | None, grad_tau: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        latitude, value, h, tau = ctx.saved_tensors
        inverse = tau.reciprocal()
        grad_latitude = None
        to_h, along = grad_h, None if grad_tau is None else -tau * grad_tau
        if grad is not None:
            by_argument = grad * (inverse - value * value * tau)
            grad_latitude = by_argument * h if ctx.needs_input_grad[0] else None
            if ctx.needs_input_grad[1]:
                to_h = _total((by_argument * latitude).sum_to_size(h.shape), to_h)
                along = _total((grad * value).sum_to_size(h.shape), along)
        if not ctx.needs_input_grad[1] or (to_h is None and along is None):
            return grad_latitude, None
        to_h = torch.zeros_like(h) if to_h is None else to_h
        along = torch.zeros_like(h) if along is None else along
        return grad_latitude, torch.addcmul(to_h, along, inverse - tau, value=-math.pi / 2) * h * h * -2

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor | None, k_tangent: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        latitude, value, h, tau = ctx.saved_tensors
        inverse = tau.reciprocal()
        by_argument = inverse - value * value * tau
        change = torch.zeros_like(value) if tangent is None else by_argument * h * tangent
        if k_tangent is None:
            return change, torch.zeros_like(h), torch.zeros_like(tau)
        h_tangent = -2 * h * h * k_tangent
        relative = math.pi * h * h * (inverse - tau) * k_tangent
        return change + by_argument * latitude * h_tangent + value * relative, h_tangent, -tau * relative


def _total(first: Tensor, second: Tensor | None) -> Tensor:
    return first if second is None else first + second


class _WithoutRoundingAboveOne(ShortDerivative):
    """Clamp what only rounding carries beyond ±1: the derivative is 1.

    The result is a tensor that no derivative needs, so that the next layer may change it in place.
    """

    @staticmethod
    def forward(value: Tensor) -> Tensor:
        return value.clamp(-1, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent.clone()


_fixed_sigmoid, _learned_sigmoid = short(_FixedSigmoid), short(_LearnedSigmoid)
_without_rounding_above_one = short(_WithoutRoundingAboveOne)


def sigmoid(cosine: Tensor, k: Tensor | float) -> Tensor:
    """g = C(k)·(1−e^u)/(1+e^u) with u = θ/k − π/(2k), as tanh(asin(c)/(2k)) / tanh(π/(4k)).

    k is a positive number or a positive tensor that broadcasts against `cosine`.
    """
    latitude = asin(cosine)
    value = _learned_sigmoid(latitude, k)[0] if isinstance(k, Tensor) else _fixed_sigmoid(latitude, k)
    result: Tensor = _without_rounding_above_one(value)
    return result


def sigmoid_derivative(cosine: Tensor, k: Tensor | float) -> Tensor:
    """dg/dc = C(k)·sech²(asin(c)/(2k)) / (2k·sin θ)."""
    # 1/cosh² keeps its relative accuracy where 1 − tanh² is rounding noise; cosh overflows to inf, not to NaN.
    steepness = 1 / (asin(cosine) / (2 * k)).cosh().square()
    result: Tensor = steepness / (2 * k * _tanh(math.pi / (4 * k)) * sine(cosine))
    return result


def sigmoid_inverse(value: Tensor, k: Tensor | float) -> Tensor:
    """c = sin(2k·atanh(g·tanh(π/(4k)))); where tanh saturates, the largest c that the format can tell apart."""
    below_one = 1 - torch.finfo(value.dtype).eps
    scaled = (value * _tanh(math.pi / (4 * k))).clamp(-below_one, below_one)
    latitude: Tensor = 2 * k * scaled.atanh()
    return latitude.clamp(-math.pi / 2, math.pi / 2).sin()
