"""The passes over memory that turn a convolution into a SphereConv, each in one loop.

    forward    c = P·r,  out = g(c)                          from the convolution's output P
    backward   D = ∂L/∂P = grad·g'(c)·r,  s = r²·Σ grad·g'(c)·c over filters
    correct    gx ← gx − x·m,  m the window sum of s

with r = 1/‖patch‖, one number a pixel. Backward knows either out, from which c = g⁻¹(out) is recovered (so nothing
but the output is kept), or c itself. Tensors are the views of `layout.py`; the channels are at dimension `at`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from spherenet.kernels import approximations as fast
from spherenet.kernels.compiled import fused
from spherenet.ops import angles
from spherenet.ops.norms import SHRINK, working_dtype

__all__ = ["ANGLES", "Steepness", "backward", "correct", "forward", "steepness", "sum_of_squares", "sums_for_k"]

ANGLES = ("linear", "cosine", "sigmoid")


class Steepness(NamedTuple):
    """What the sigmoid needs of its k, one number a filter: k, 1/(2k), τ = tanh(π/(4k)) and 1/τ."""

    k: Tensor
    half_inverse: Tensor
    tau: Tensor
    inverse_tau: Tensor


def steepness(k: Tensor) -> Steepness:
    """Return the constants of each filter's sigmoid, once, so that no pass computes them for each pixel."""
    tau = (math.pi / 4 / k).tanh()
    return Steepness(k, 0.5 / k, tau, 1 / tau)


def _cosine(product: Tensor, inverse_norm: Tensor) -> Tensor:
    # r = 0 marks a patch whose squares overflowed: cosine 0, even where the product is inf or NaN.
    wide = product.to(inverse_norm.dtype)
    return torch.where(inverse_norm == 0, 0.0, wide * inverse_norm).clamp(-1, 1)


def _floor(x: Tensor) -> float:
    """The floor of sin θ, as in `ops.angles.sine`."""
    return float(4 * torch.finfo(x.dtype).eps ** 0.5)


# --- forward ---------------------------------------------------------------------------------------------------


def _put(value: Tensor, product: Tensor, into: Tensor | None) -> None:
    (product if into is None else into).copy_(value)


def _forward_cosine(product: Tensor, inverse_norm: Tensor, into: Tensor | None, kept: Tensor | None) -> None:
    c = _cosine(product, inverse_norm)
    if kept is not None:
        kept.copy_(c)
    _put(c, product, into)


def _forward_linear(product: Tensor, inverse_norm: Tensor, into: Tensor | None, kept: Tensor | None) -> None:
    c = _cosine(product, inverse_norm)
    if kept is not None:
        kept.copy_(c)
    _put((fast.asin(c) * (2 / math.pi)).clamp(-1, 1), product, into)


def _forward_sigmoid(
    product: Tensor, inverse_norm: Tensor, into: Tensor | None, kept: Tensor | None, shape: Steepness
) -> None:
    c = _cosine(product, inverse_norm)
    if kept is not None:
        kept.copy_(c)
    _put((fast.tanh(fast.asin(c) * shape.half_inverse) * shape.inverse_tau).clamp(-1, 1), product, into)


def _cosine_in_steps(product: Tensor, inverse_norm: Tensor, kept: Tensor | None) -> Tensor:
    """Return the tensor that holds the cosines and may be overwritten: product itself, or a wider copy."""
    product.masked_fill_(inverse_norm == 0, 0)
    c = product if product.dtype == inverse_norm.dtype else product.to(inverse_norm.dtype)
    c.mul_(inverse_norm).clamp_(-1, 1)
    if kept is not None:
        kept.copy_(c)
    return c


def _forward_cosine_in_steps(product: Tensor, inverse_norm: Tensor, into: Tensor | None, kept: Tensor | None) -> None:
    _put(_cosine_in_steps(product, inverse_norm, kept), product, into)


def _forward_linear_in_steps(product: Tensor, inverse_norm: Tensor, into: Tensor | None, kept: Tensor | None) -> None:
    _put(_cosine_in_steps(product, inverse_norm, kept).asin_().mul_(2 / math.pi), product, into)


def _forward_sigmoid_in_steps(
    product: Tensor, inverse_norm: Tensor, into: Tensor | None, kept: Tensor | None, shape: Steepness
) -> None:
    c = _cosine_in_steps(product, inverse_norm, kept)
    _put(c.asin_().mul_(shape.half_inverse).tanh_().mul_(shape.inverse_tau).clamp_(-1, 1), product, into)


_FORWARD = {
    "cosine": fused(_forward_cosine, _forward_cosine_in_steps),
    "linear": fused(_forward_linear, _forward_linear_in_steps),
    "sigmoid": fused(_forward_sigmoid, _forward_sigmoid_in_steps),
}


def forward(
    angle: str,
    product: Tensor,
    inverse_norm: Tensor,
    into: Tensor | None,
    kept: Tensor | None,
    shape: Steepness | None,
) -> None:
    """Turn products into outputs, in place or into `into`; write the cosines to `kept` where one is given.

    Without `into` the products are overwritten; with it they may be.
    """
    _FORWARD[angle](product, inverse_norm, into, kept, *(() if shape is None else (shape,)))


# --- backward --------------------------------------------------------------------------------------------------


def _finish(grad: Tensor, slope: Tensor | float, c: Tensor, inverse_norm: Tensor, into: Tensor, at: int) -> Tensor:
    """Write D into `into` and return s; the last lines of every backward pass."""
    u = grad.to(inverse_norm.dtype) * slope
    into.copy_(u * inverse_norm)
    return (u * c).sum(at, keepdim=True) * inverse_norm.square()


def _backward_cosine(grad: Tensor, known: Tensor, inverse_norm: Tensor, into: Tensor, at: int, is_c: bool) -> Tensor:
    return _finish(grad, 1.0, known.to(inverse_norm.dtype), inverse_norm, into, at)


def _backward_linear(grad: Tensor, known: Tensor, inverse_norm: Tensor, into: Tensor, at: int, is_c: bool) -> Tensor:
    if is_c:
        return _finish(grad, angles.linear_derivative(known), known, inverse_norm, into, at)
    c = fast.sin_of_acute(known * (math.pi / 2))
    sine = fast.sin_of_acute((1 - known.abs()) * (math.pi / 2)).clamp_min(_floor(known))
    return _finish(grad, (2 / math.pi) / sine, c, inverse_norm, into, at)


def _saturating(known: Tensor, shape: Steepness) -> Tensor:
    """T = tanh(asin(c)/(2k)) from out, kept off ±1, where atanh ends."""
    limit = 1 - torch.finfo(known.dtype).eps
    return (known * shape.tau).clamp(-limit, limit)


def _backward_sigmoid(
    grad: Tensor, known: Tensor, inverse_norm: Tensor, into: Tensor, at: int, is_c: bool, shape: Steepness
) -> Tensor:
    steep = shape.half_inverse * shape.inverse_tau
    if is_c:
        t = fast.tanh(fast.asin(known) * shape.half_inverse)
        return _finish(grad, (1 - t * t) * steep / angles.sine(known), known, inverse_norm, into, at)
    t = _saturating(known, shape)
    latitude = (shape.k * ((1 + t) / (1 - t)).log()).clamp(-math.pi / 2, math.pi / 2)
    sine = fast.sin_of_acute(math.pi / 2 - latitude.abs()).clamp_min(_floor(known))
    c = fast.sin_of_acute(latitude)
    return _finish(grad, (1 - t * t) * steep / sine, c, inverse_norm, into, at)


def _backward_linear_in_steps(
    grad: Tensor, known: Tensor, inverse_norm: Tensor, into: Tensor, at: int, is_c: bool
) -> Tensor:
    c = known if is_c else angles.linear_inverse(known)
    sine = angles.sine(c) if is_c else (known.mul(math.pi / 2).cos_().clamp_min_(_floor(known)))
    return _finish(grad, sine.reciprocal_().mul_(2 / math.pi), c, inverse_norm, into, at)


def _backward_sigmoid_in_steps(
    grad: Tensor, known: Tensor, inverse_norm: Tensor, into: Tensor, at: int, is_c: bool, shape: Steepness
) -> Tensor:
    steep = shape.half_inverse * shape.inverse_tau
    if is_c:
        t, c = known.asin().mul_(shape.half_inverse).tanh_(), known
        sine = angles.sine(c)
    else:
        t = _saturating(known, shape)
        latitude = t.atanh().mul_(2 * shape.k).clamp_(-math.pi / 2, math.pi / 2)
        c, sine = latitude.sin(), latitude.cos().clamp_min_(_floor(known))
    return _finish(grad, t.square().neg_().add_(1).mul_(steep).div_(sine), c, inverse_norm, into, at)


_BACKWARD = {
    "cosine": fused(_backward_cosine, _backward_cosine),
    "linear": fused(_backward_linear, _backward_linear_in_steps),
    "sigmoid": fused(_backward_sigmoid, _backward_sigmoid_in_steps),
}


def backward(
    angle: str,
    grad: Tensor,
    known: Tensor,
    is_c: bool,
    inverse_norm: Tensor,
    into: Tensor,
    at: int,
    shape: Steepness | None,
) -> Tensor:
    """Write the gradient of the products into `into`; return s, one number a pixel (and group)."""
    s: Tensor = _BACKWARD[angle](grad, known, inverse_norm, into, at, is_c, *(() if shape is None else (shape,)))
    return s


# --- the gradient of k -----------------------------------------------------------------------------------------


def _sums_for_k(
    grad: Tensor, known: Tensor, is_c: bool, over: tuple[int, ...], shape: Steepness
) -> tuple[Tensor, Tensor]:
    if is_c:
        v = fast.asin(known) * shape.half_inverse
        t = fast.tanh(v)
    else:
        t = _saturating(known, shape)
        v = ((1 + t) / (1 - t)).log() * 0.5
    wide = grad.to(t.dtype)
    return (wide * v * (1 - t * t)).sum(over), (wide * t).sum(over)


def _sums_for_k_in_steps(
    grad: Tensor, known: Tensor, is_c: bool, over: tuple[int, ...], shape: Steepness
) -> tuple[Tensor, Tensor]:
    v = known.asin().mul_(shape.half_inverse) if is_c else _saturating(known, shape).atanh_()
    t = v.tanh()
    wide = grad.to(t.dtype)
    return (v.mul_(1 - t.square()).mul_(wide)).sum(over), t.mul_(wide).sum(over)


_SUMS_FOR_K = fused(_sums_for_k, _sums_for_k_in_steps)


def sums_for_k(grad: Tensor, known: Tensor, is_c: bool, at: int, shape: Steepness) -> Tensor:
    """∂L/∂k of each filter.

    With v = asin(c)/(2k), T = tanh v, τ = tanh(π/(4k)):  ∂g/∂k = −v(1−T²)/(kτ) + T·π(1−τ²)/(4k²τ²).
    """
    over = (0,) if at == -1 else (0, grad.dim() - 1)
    first, second = _SUMS_FOR_K(grad, known, is_c, over, shape)
    k, tau = shape.k.reshape(first.shape), shape.tau.reshape(first.shape)
    # 1 − τ² as 1/cosh²: τ rounds to 1 for small k.
    from_tau: Tensor = second * (math.pi / 4) / (k * tau * (math.pi / 4 / k).cosh()).square()
    return from_tau - first / (k * tau)


# --- norms -----------------------------------------------------------------------------------------------------


def _sum_of_squares(x: Tensor, at: int) -> Tensor:
    return (x.to(working_dtype(x.dtype)) * SHRINK).square().sum(at, keepdim=True)


sum_of_squares = fused(_sum_of_squares, _sum_of_squares)
"""Σ (SHRINK·x)² over the channels, which are kept with size 1."""


def _correct(gradient: Tensor, x: Tensor, m: Tensor, into: Tensor | None) -> None:
    _put(gradient.to(m.dtype) - x.to(m.dtype) * m, gradient, into)


def _correct_in_steps(gradient: Tensor, x: Tensor, m: Tensor, into: Tensor | None) -> None:
    _put(gradient.to(m.dtype).addcmul_(x.to(m.dtype), m, value=-1), gradient, into)


correct = fused(_correct, _correct_in_steps)
"""gradient − x·m, in place or into `into`: what the length of the patch contributes to the gradient of x."""
