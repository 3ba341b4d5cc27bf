"""SphereConv from differentiable torch operations: the reference for the fused kernels (docs/concepts.md, Eq. 1 to 3).

    out = β·(h(‖x‖)·g(θ) + b) + γ                                           h = 1 unless a magnitude function is given

One convolution with unit weights gives ‖x‖·cos θ; multiplying by 1/‖patch‖ leaves cos θ, and g follows elementwise. The
formula takes more time and memory than the kernels, but it can be differentiated any number of times, in both modes,
vectorized and traced.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from spherenet._util.validation import require_memory
from spherenet.angles import AngleFunction
from spherenet.angles.elementary import ElementaryFunction, elementary, save_tensors
from spherenet.magnitudes import Magnitude
from spherenet.ops.geometry import Geometry, convolve, convolve_backward, spread, window_sum
from spherenet.ops.norms import SHRINK, working_dtype
from spherenet.ops.operation import Operation, Parameters

__all__ = [
    "apply_affine",
    "apply_angle",
    "center_weight",
    "cosines",
    "cosines_from_sums",
    "magnitudes_from",
    "repeat_per_filter",
    "sphere_conv",
    "sum_per_group",
    "swap_channels",
    "unit_weight",
]

FLAT = 2.0**-32
"""Contrast (Σx² − (Σx)²/n)/Σx² below which a centered patch has no direction that float32 can represent."""


def sphere_conv(x: Tensor, weight: Tensor, operation: Operation, parameters: Parameters) -> Tensor:
    """Return β·(h·g(θ) + b) + γ for a batch x [N, C, *spatial] and weights [O, C/groups, *kernel].

    A weight [out, in] makes it a fully connected layer on rows [N, in], and a transposed geometry a transposed
    convolution with weights [C, O/groups, *kernel]. Autocast must be off, and the padding must be given in numbers.
    """
    angle, geometry, eps, center, magnitude = operation
    require_memory(x, weight)
    unit = unit_weight(weight, operation).to(x.dtype)
    cosine, norm = _centered_cosines(x, unit, geometry, eps) if center == "patch" else _cosines(x, unit, geometry, eps)
    value = apply_angle(cosine, angle, parameters.k)
    if magnitude is not None:
        value = value * magnitudes_from(norm, magnitude, parameters.radius, cosine.shape[1])
    return apply_affine(value, parameters).to(x.dtype)


def unit_weight(weight: Tensor, operation: Operation) -> Tensor:
    """Return weight/‖weight‖ per filter in the working dtype, centered if necessary; 0 if the norm is not finite."""
    geometry, centered = operation.geometry, operation.center is not None
    kernels = swap_channels(weight, geometry.groups) if geometry.transposed else weight
    unit: Tensor = _unit_weight(center_weight(kernels) if centered else kernels, operation.eps)[0]
    return swap_channels(unit, geometry.groups) if geometry.transposed else unit


def swap_channels(weight: Tensor, groups: int) -> Tensor:
    """Return a weight [C, O/groups, *kernel] as [O, C/groups, *kernel] and the other way around."""
    return torch.unflatten(weight, 0, (groups, -1)).transpose(1, 2).flatten(0, 1)


def center_weight(weight: Tensor) -> Tensor:
    """Return the weight with the mean of each kernel removed, in the working dtype (Eq. 14)."""
    wide = weight.to(working_dtype(weight.dtype))
    return wide - wide.mean(tuple(range(1, weight.dim())), keepdim=True)


def magnitudes_from(norm: Tensor, magnitude: Magnitude, radius: Tensor | float | None, filters: int) -> Tensor:
    """Return h of norms [N, groups, *spatial]; a norm that overflowed (inf) counts as 0."""
    norm = torch.where(norm.isinf(), 0, norm)
    if radius is None:
        radius = magnitude.radius
    if isinstance(radius, Tensor):
        norm = repeat_per_filter(norm, filters)
        radius = radius.to(norm.dtype).reshape(-1, *(1,) * (norm.dim() - 2))
    return repeat_per_filter(magnitude.value(norm, radius), filters)


def _centered_cosines(x: Tensor, unit: Tensor, geometry: Geometry, eps: float) -> tuple[Tensor, Tensor]:
    """Return the cosines of centered patches and their norms sqrt(Σx² − (Σx)²/n + eps) (Eq. 14)."""
    wide = x if x.device.type == "mps" else x.double()
    squares = window_sum(sum_per_group(wide * wide, geometry.groups), geometry)
    sums = window_sum(sum_per_group(wide, geometry.groups), geometry, of_squares=False)
    product = convolve(x, unit, geometry).to(working_dtype(x.dtype))
    return cosines_from_sums(product, squares, sums, unit.numel() // product.shape[1], eps)


def cosines_from_sums(product: Tensor, squares: Tensor, sums: Tensor, size: int, eps: float) -> tuple[Tensor, Tensor]:
    """Return the cosines of centered patches, and their norms, from Σx² and Σx of each patch.

    The difference is computed in float64, because it cancels for patches of low contrast. A flat patch has the norm
    sqrt(eps) and the cosine 0, with the gradient of the formula. A patch whose squares would overflow in the working
    dtype has the cosine 0 and the norm inf.

    Args:
        product: Products of the patches with centered unit kernels [N, O, *out], in the working dtype.
        squares: Sums of squares [N, groups, *out], in float64 if the device supports it.
        sums: Sums [N, groups, *out], in the same dtype.
        size: Number of entries of a patch.
        eps: Number added under the square root.
    """
    variation = squares - sums * sums / size
    flat = variation <= FLAT * squares
    overflow = squares >= torch.finfo(product.dtype).max / SHRINK**2  # as without centering
    norm = (torch.where(flat | overflow, 0, variation) + eps).sqrt().to(product.dtype)
    norm = torch.where(overflow, math.inf, norm)
    # Products that overflowed are masked before the division, because the gradient of inf/inf is NaN.
    product = torch.where(repeat_per_filter(overflow, product.shape[1]), 0, product)
    product = torch.where(repeat_per_filter(flat, product.shape[1]), product - product.detach(), product)
    return product / repeat_per_filter(norm, product.shape[1]), norm


class _UnitWeight(ElementaryFunction):
    """u = w·s and s = 1/‖w‖ per filter:  du = s·(dw − u(u·dw)),  ds = −s²·(u·dw)."""

    @staticmethod
    def forward(weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        wide = weight.to(working_dtype(weight.dtype))
        shrunk = wide * SHRINK
        squares = (shrunk * shrunk).sum(tuple(range(1, weight.dim())), keepdim=True)
        scale = squares.add(eps * SHRINK**2).rsqrt() * SHRINK
        return wide * scale, scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.dtype = inputs[0].dtype
        save_tensors(ctx, *output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_scale: Tensor | None) -> tuple[Tensor | None, None]:
        unit, scale = ctx.saved_tensors
        along = None if grad is None else (unit * grad).sum(tuple(range(1, unit.dim())), keepdim=True)
        if grad_scale is not None:
            along = grad_scale * scale if along is None else along + grad_scale * scale
        if along is None:
            return None, None
        tangential = -unit * along if grad is None else torch.addcmul(grad, unit, along, value=-1)
        return (tangential * scale).to(ctx.dtype), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> tuple[Tensor, Tensor]:
        unit, scale = ctx.saved_tensors
        tangent = tangent.to(unit.dtype)
        along = (unit * tangent).sum(tuple(range(1, unit.dim())), keepdim=True)
        return scale * (tangent - unit * along), -scale * scale * along


_unit_weight = elementary(_UnitWeight)


def repeat_per_filter(maps: Tensor, filters: int) -> Tensor:
    """Return a map [N, groups, *spatial] repeated for the filters of each group, unless it broadcasts."""
    return maps if maps.shape[1] == 1 else maps.repeat_interleave(filters // maps.shape[1], 1)


def sum_per_group(maps: Tensor, groups: int) -> Tensor:
    """Return the sum of maps [N, channels, *spatial] over the channels of each group."""
    if groups == 1:
        return maps.sum(1, keepdim=True)
    return maps.reshape(maps.shape[0], groups, maps.shape[1] // groups, *maps.shape[2:]).sum(2)


class _Cosines(ElementaryFunction):
    """c = P/n and n = ‖patch‖, with P the convolution of x with unit weights.

    With W the sum over a window:  dc = (dP − c·dn)/n,  dn = W(x·dx)/n. No power of n occurs, which would overflow
    before n does. If a norm overflows, n = inf and c = 0, even if P is inf or NaN.
    """

    @staticmethod
    def forward(x: Tensor, unit: Tensor, geometry: Geometry, eps: float) -> tuple[Tensor, Tensor]:
        product = convolve(x, unit, geometry)
        shrunk = x.to(working_dtype(x.dtype)) * SHRINK
        window = window_sum(sum_per_group(shrunk * shrunk, geometry.groups), geometry)
        norm = window.add(eps * SHRINK**2).sqrt() / SHRINK
        of_filters = repeat_per_filter(norm, product.shape[1])
        return product.masked_fill(of_filters == math.inf, 0) / of_filters, norm

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, unit, ctx.geometry, _ = inputs
        save_tensors(ctx, x, unit, *output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_norm: Tensor | None) -> tuple[Any, ...]:
        x, unit, cosine, norm = ctx.saved_tensors
        geometry, groups = ctx.geometry, ctx.geometry.groups
        grad_x = grad_unit = s = None
        if grad is not None:
            of_product = grad / repeat_per_filter(norm, cosine.shape[1])
            grad_x, grad_unit = convolve_backward(of_product.to(x.dtype), x, unit, geometry, *ctx.needs_input_grad[:2])
            if ctx.needs_input_grad[0]:
                s = sum_per_group(of_product * cosine, groups) / norm
        if grad_norm is not None:
            of_norm = grad_norm / norm
            s = -of_norm if s is None else s - of_norm
        if s is not None and ctx.needs_input_grad[0]:
            m = repeat_per_filter(spread(s, (x.shape[0], groups, *x.shape[2:]), geometry), x.shape[1])
            grad_x = -x * m if grad_x is None else torch.addcmul(grad_x.to(m.dtype), x.to(m.dtype), m, value=-1)
            grad_x = grad_x.to(x.dtype)
        return grad_x, grad_unit, None, None

    @staticmethod
    def jvp(ctx: Any, x_tangent: Tensor | None, unit_tangent: Tensor | None, *_: None) -> tuple[Tensor, Tensor]:
        x, unit, cosine, norm = ctx.saved_tensors
        product, norm_tangent = torch.zeros_like(cosine), torch.zeros_like(norm)
        if unit_tangent is not None:
            product = product + convolve(x, unit_tangent, ctx.geometry)
        if x_tangent is not None:
            along = sum_per_group(x.to(norm.dtype) * x_tangent, ctx.geometry.groups)
            norm_tangent = window_sum(along, ctx.geometry, of_squares=False) / norm
            product = product + convolve(x_tangent, unit, ctx.geometry)
            product = product - cosine * repeat_per_filter(norm_tangent, cosine.shape[1])
        return product / repeat_per_filter(norm, cosine.shape[1]), norm_tangent


_cosines = elementary(_Cosines)


def cosines(x: Tensor, unit: Tensor, operation: Operation) -> Tensor:
    """Return cos θ between each patch of x and each unit kernel, in the working dtype; see `sphere_conv`."""
    formula = _centered_cosines if operation.center == "patch" else _cosines
    cosine: Tensor = formula(x, unit, operation.geometry, operation.eps)[0]
    return cosine


def apply_angle(cosine: Tensor, angle: AngleFunction, k: Tensor | float | None) -> Tensor:
    """Return g of cosines [N, O, *spatial].

    Args:
        cosine: Cosines in the working dtype.
        angle: g, or its class if that defines `value`.
        k: Parameter of g, a number or a tensor with one element or one per filter.
    """
    if not angle.has_formula:
        value: Tensor = angle(cosine.movedim(1, -1)).movedim(-1, 1)
        return value
    if isinstance(k, Tensor):
        k = k.to(cosine.dtype)
        k = k.reshape(-1, *(1,) * (cosine.dim() - 2)) if k.dim() == 1 and cosine.dim() > 2 else k
    return angle.value(cosine, k)


def apply_affine(value: Tensor, parameters: Parameters) -> Tensor:
    """Return β·(value + bias) + γ for maps [N, O, *spatial]."""
    if not parameters.has_affine:
        return value
    _, bias, beta, gamma, _ = parameters
    value = value.movedim(1, -1)
    value = value if bias is None else value + bias
    value = value if beta is None else value * beta
    value = value if gamma is None else value + gamma
    return value.movedim(-1, 1)
