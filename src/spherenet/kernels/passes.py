"""The passes over memory that turn a convolution into a SphereConv, each in one loop.

    forward    c = P·r,  out = g(c)                          in place on the convolution's output P
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

__all__ = ["ANGLES", "Steepness", "backward", "correct", "forward", "gradient_of_k", "steepness",
           "sum_of_squares"]  # fmt: skip

ANGLES = ("linear", "cosine", "sigmoid")


class Steepness(NamedTuple):
    """What the sigmoid needs of its k, one number a filter.

    k, 1/(2k), τ = tanh(π/(4k)), 1/τ, and what τ contributes to ∂g/∂k: π(1−τ²)/(4k²τ).
    """

    k: Tensor
    half_inverse: Tensor
    tau: Tensor
    inverse_tau: Tensor
    from_tau: Tensor


def steepness(k: Tensor) -> Steepness:
    """Return the constants of each filter's sigmoid, once, so that no pass computes them for each pixel."""
    u = math.pi / 4 / k
    tau = u.tanh()
    # 1 − τ² as 1/cosh²: τ rounds to 1 for small k.
    return Steepness(k, 0.5 / k, tau, 1 / tau, u / (k * tau * u.cosh().square()))


def _cosine(product: Tensor, inverse_norm: Tensor) -> Tensor:
    # r = 0 marks a patch whose squares overflowed: cosine 0, even where the product is inf or NaN.
    wide = product.to(inverse_norm.dtype)
    return torch.where(inverse_norm == 0, 0.0, wide * inverse_norm)


def _with_sign(value: Tensor, of: Tensor) -> Tensor:
    """value, negated where `of` is negative: all functions here are odd, and `copysign` is not vectorised."""
    return torch.where(of < 0, -value, value)


def _floor(x: Tensor) -> float:
    """The floor of sin θ, as in `ops.angles.sine`."""
    return float(4 * torch.finfo(x.dtype).eps ** 0.5)


# --- forward ---------------------------------------------------------------------------------------------------


def _forward_cosine(product: Tensor, inverse_norm: Tensor, kept: Tensor | None) -> None:
    c = _cosine(product, inverse_norm).clamp(-1, 1)
    if kept is not None:
        kept.copy_(c)
    product.copy_(c)


def _forward_linear(product: Tensor, inverse_norm: Tensor, kept: Tensor | None) -> None:
    c = _cosine(product, inverse_norm)
    size = c.abs().clamp_max(1)
    if kept is not None:
        kept.copy_(_with_sign(size, c))
    product.copy_(_with_sign(fast.asin(size) * (2 / math.pi), c))


def _forward_sigmoid(product: Tensor, inverse_norm: Tensor, kept: Tensor | None, shape: Steepness) -> None:
    c = _cosine(product, inverse_norm)
    size = c.abs().clamp_max(1)
    if kept is not None:
        kept.copy_(_with_sign(size, c))
    g = (fast.tanh(fast.asin(size) * shape.half_inverse) * shape.inverse_tau).clamp_max(1)
    product.copy_(_with_sign(g, c))


def _cosine_in_steps(product: Tensor, inverse_norm: Tensor, kept: Tensor | None) -> Tensor:
    """Return the tensor that holds the cosines and may be overwritten: product itself, or a wider copy."""
    product.masked_fill_(inverse_norm == 0, 0)
    c = product if product.dtype == inverse_norm.dtype else product.to(inverse_norm.dtype)
    c.mul_(inverse_norm).clamp_(-1, 1)
    if kept is not None:
        kept.copy_(c)
    return c


def _forward_cosine_in_steps(product: Tensor, inverse_norm: Tensor, kept: Tensor | None) -> None:
    product.copy_(_cosine_in_steps(product, inverse_norm, kept))


def _forward_linear_in_steps(product: Tensor, inverse_norm: Tensor, kept: Tensor | None) -> None:
    product.copy_(_cosine_in_steps(product, inverse_norm, kept).asin_().mul_(2 / math.pi))


def _forward_sigmoid_in_steps(product: Tensor, inverse_norm: Tensor, kept: Tensor | None, shape: Steepness) -> None:
    c = _cosine_in_steps(product, inverse_norm, kept)
    product.copy_(c.asin_().mul_(shape.half_inverse).tanh_().mul_(shape.inverse_tau).clamp_(-1, 1))


_FORWARD = {
    "cosine": fused(_forward_cosine, _forward_cosine_in_steps),
    "linear": fused(_forward_linear, _forward_linear_in_steps),
    "sigmoid": fused(_forward_sigmoid, _forward_sigmoid_in_steps),
}


def forward(angle: str, product: Tensor, inverse_norm: Tensor, kept: Tensor | None, shape: Steepness | None) -> None:
    """Turn products into outputs in place; write the cosines to `kept` where one is given."""
    _FORWARD[angle](product, inverse_norm, kept, *(() if shape is None else (shape,)))


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
    size = known.abs()
    c = _with_sign(fast.sin(size * (math.pi / 2)), known)
    sine = fast.sin((1 - size) * (math.pi / 2)).clamp_min(_floor(known))
    return _finish(grad, (2 / math.pi) / sine, c, inverse_norm, into, at)


def _saturating(known: Tensor, shape: Steepness) -> Tensor:
    """|T| = tanh(|asin c|/(2k)) from out, kept off 1, where atanh ends."""
    return (known.abs() * shape.tau).clamp_max(1 - torch.finfo(known.dtype).eps)


def _backward_sigmoid(
    grad: Tensor, known: Tensor, inverse_norm: Tensor, into: Tensor, at: int, is_c: bool, shape: Steepness
) -> Tensor:
    steep = shape.half_inverse * shape.inverse_tau
    if is_c:
        t = fast.tanh(fast.asin(known.abs()) * shape.half_inverse)
        return _finish(grad, (1 - t * t) * steep / angles.sine(known), known, inverse_norm, into, at)
    t = _saturating(known, shape)
    latitude = shape.k * ((1 + t) / (1 - t)).log()
    # Rounding may carry the latitude past π/2 by a last digit; the floor of the sine holds there.
    sine = fast.sin(math.pi / 2 - latitude).clamp_min(_floor(known))
    c = _with_sign(fast.sin(latitude), known)
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
        latitude = t.atanh().mul_(2 * shape.k).clamp_max_(math.pi / 2)
        c, sine = latitude.sin().copysign_(known), latitude.cos().clamp_min_(_floor(known))
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


def _gradient_of_k(grad: Tensor, known: Tensor, over: int, is_c: bool, shape: Steepness) -> Tensor:
    if is_c:
        v = fast.asin(known.abs()) * shape.half_inverse
        t = fast.tanh(v)
    else:
        t = _saturating(known, shape)
        v = ((1 + t) / (1 - t)).log() * 0.5
    by_size = t * shape.from_tau - v * (1 - t * t) * (2 * shape.half_inverse)
    return (grad.to(t.dtype) * _with_sign(by_size, known)).sum(over)


def _gradient_of_k_in_steps(grad: Tensor, known: Tensor, over: int, is_c: bool, shape: Steepness) -> Tensor:
    v = known.abs().asin_().mul_(shape.half_inverse) if is_c else _saturating(known, shape).atanh_()
    t = v.tanh()
    by_size = v.mul_(t.square().neg_().add_(1)).mul_(-2 * shape.half_inverse).addcmul_(t, shape.from_tau)
    return by_size.mul_(known.sign()).mul_(grad).sum(over)


_GRADIENT_OF_K = fused(_gradient_of_k, _gradient_of_k_in_steps)


def gradient_of_k(grad: Tensor, known: Tensor, is_c: bool, over: int, shape: Steepness) -> Tensor:
    """∂L/∂k of each filter, from views [N, …] with the pixels of an image at dimension `over`.

    With v = asin(c)/(2k), T = tanh v, τ = tanh(π/(4k)):  τ·∂g/∂k = −v(1−T²)/k + T·π(1−τ²)/(4k²τ).
    Each image is summed by itself first: many short sums run in parallel, one long sum would not.
    """
    of_images: Tensor = _GRADIENT_OF_K(grad, known, over, is_c, shape)
    return of_images.sum(0) * shape.inverse_tau.reshape(of_images.shape[1:])


# --- norms -----------------------------------------------------------------------------------------------------


def _sum_of_squares(x: Tensor, at: int) -> Tensor:
    return (x.to(working_dtype(x.dtype)) * SHRINK).square().sum(at, keepdim=True)


sum_of_squares = fused(_sum_of_squares, _sum_of_squares)
"""Σ (SHRINK·x)² over the channels, which are kept with size 1."""


def _correct(gradient: Tensor, x: Tensor, m: Tensor) -> None:
    gradient.copy_(gradient.to(m.dtype) - x.to(m.dtype) * m)


def _correct_in_steps(gradient: Tensor, x: Tensor, m: Tensor) -> None:
    gradient.copy_(gradient.to(m.dtype).addcmul_(x.to(m.dtype), m, value=-1))


correct = fused(_correct, _correct_in_steps)
"""gradient ← gradient − x·m in place: what the length of the patch contributes to the gradient of x."""
