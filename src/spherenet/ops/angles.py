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


class _BoundedAsin(torch.autograd.Function):
    """asin of a clamped cosine whose derivative 1/sin θ stays finite at ±1; differentiable any number of times."""

    generate_vmap_rule = True

    @staticmethod
    def forward(cosine: Tensor) -> Tensor:
        return cosine.clamp(-1, 1).asin()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (cosine,) = ctx.saved_tensors
        return grad_output / sine(cosine)


class _BoundedAsinForward(_BoundedAsin):
    """The same with a forward-mode derivative, which torch.compile does not admit."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        (cosine,) = ctx.saved_tensors
        return tangent / sine(cosine)


def asin(cosine: Tensor) -> Tensor:
    """π/2 − θ from c = cos θ; c is clamped to [−1, 1], the derivative is bounded (see the module)."""
    function = _BoundedAsin if torch.compiler.is_compiling() else _BoundedAsinForward
    result: Tensor = function.apply(cosine)  # type: ignore[no-untyped-call]
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


def sigmoid(cosine: Tensor, k: Tensor | float) -> Tensor:
    """g = C(k)·(1−e^u)/(1+e^u) with u = θ/k − π/(2k), as tanh(asin(c)/(2k)) / tanh(π/(4k)).

    k is a positive number or a positive tensor that broadcasts against `cosine`.
    """
    value: Tensor = (asin(cosine) / (2 * k)).tanh() / _tanh(math.pi / (4 * k))
    return value.clamp(-1, 1)


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
