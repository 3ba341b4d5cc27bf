"""SphereConv from torch's own differentiable operations: the reference for the fused kernels.

Slower and with more memory than `kernels`, but it can be differentiated any number of times, in both directions,
mapped and traced. One convolution with unit weights gives ‖x‖·cos θ; multiplying by 1/‖patch‖ leaves cos θ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from spherenet import angles
from spherenet.elementary import ShortDerivative, keep, short
from spherenet.ops.geometry import spread, window_sum
from spherenet.ops.norms import SHRINK, working_dtype

__all__ = ["apply_affine", "apply_angle", "conv_product", "cosines", "unit_weight"]

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def conv_product(
    x: Tensor, unit_weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> Tensor:
    """‖x‖·cos θ: an ordinary convolution, or a matrix product for a weight of two dimensions."""
    if unit_weight.dim() == 2:
        return F.linear(x, unit_weight)
    return _CONV[unit_weight.dim() - 2](x, unit_weight, None, stride, padding, dilation, groups)


class _UnitWeight(ShortDerivative):
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
        keep(ctx, *output)

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


_unit_weight = short(_UnitWeight)


def unit_weight(weight: Tensor, eps: float) -> Tensor:
    """Return weight/‖weight‖ per filter [O, ...] in the working dtype; 0 if the norm is not finite."""
    unit: Tensor = _unit_weight(weight, eps)[0]
    return unit


def _per_filter(maps: Tensor, filters: int) -> Tensor:
    """Repeat a map [N, groups, *spatial] for the filters of each group, unless it broadcasts by itself."""
    return maps if maps.shape[1] == 1 else maps.repeat_interleave(filters // maps.shape[1], 1)


def _per_group(maps: Tensor, groups: int) -> Tensor:
    """Sum maps [N, channels, *spatial] over the channels of each group."""
    if groups == 1:
        return maps.sum(1, keepdim=True)
    return maps.reshape(maps.shape[0], groups, maps.shape[1] // groups, *maps.shape[2:]).sum(2)


class _Cosines(ShortDerivative):
    """c = P·r and r = 1/‖patch‖, with P the convolution of x with unit weights.

    With W the sum over a window:  dc = r·dP + (c/r)·dr,  dr = −r³·W(x·dx). An overflowed norm leaves no direction:
    r = 0 and c = 0, even if P is inf or NaN.
    """

    @staticmethod
    def forward(
        x: Tensor,
        unit: Tensor,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        product = conv_product(x, unit, stride, padding, dilation, groups)
        shrunk = x.to(working_dtype(x.dtype)) * SHRINK
        squares = _per_group(shrunk * shrunk, groups)
        window = window_sum(squares, unit.shape[2:], stride, padding, dilation)
        inverse_norm = window.add(eps * SHRINK**2).rsqrt() * SHRINK
        of_filters = _per_filter(inverse_norm, unit.shape[0])
        return torch.where(of_filters == 0, of_filters, product * of_filters), inverse_norm

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, unit, *ctx.geometry, _ = inputs
        keep(ctx, x, unit, *output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_norm: Tensor | None) -> tuple[Any, ...]:
        x, unit, cosine, inverse_norm = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.geometry
        grad_x = grad_unit = s = None
        if grad is not None:
            of_product = grad * _per_filter(inverse_norm, unit.shape[0])
            grad_x, grad_unit = _product_gradients(of_product.to(x.dtype), x, unit, ctx)
            if ctx.needs_input_grad[0]:
                s = _per_group(of_product * cosine, groups) * inverse_norm
        if grad_norm is not None:
            of_norm = grad_norm * inverse_norm**3
            s = of_norm if s is None else s + of_norm
        if s is not None and ctx.needs_input_grad[0]:
            m = spread(s, (x.shape[0], groups, *x.shape[2:]), unit.shape[2:], stride, padding, dilation)
            m = _per_filter(m, x.shape[1])
            grad_x = -x * m if grad_x is None else torch.addcmul(grad_x.to(m.dtype), x.to(m.dtype), m, value=-1)
            grad_x = grad_x.to(x.dtype)
        return grad_x, grad_unit, None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, x_tangent: Tensor | None, unit_tangent: Tensor | None, *_: None) -> tuple[Tensor, Tensor]:
        x, unit, cosine, inverse_norm = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.geometry
        product = torch.zeros_like(cosine)
        norm_tangent = torch.zeros_like(inverse_norm)
        of_filters = _per_filter(inverse_norm, unit.shape[0])
        if unit_tangent is not None:
            product = product + conv_product(x, unit_tangent, *ctx.geometry)
        if x_tangent is not None:
            product = product + conv_product(x_tangent, unit, *ctx.geometry)
            wide = x.to(inverse_norm.dtype) * x_tangent
            along = window_sum(_per_group(wide, groups), unit.shape[2:], stride, padding, dilation, of_squares=False)
            norm_tangent = -along * inverse_norm**3
            return (
                of_filters * product - cosine * _per_filter(along * inverse_norm**2, unit.shape[0]),
                norm_tangent,
            )
        return of_filters * product, norm_tangent


def _product_gradients(grad: Tensor, x: Tensor, unit: Tensor, ctx: Any) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the convolution, or matrix product, as torch's own backward computes them."""
    needs_x, needs_unit = ctx.needs_input_grad[:2]
    if unit.dim() == 2:
        return grad @ unit if needs_x else None, grad.t() @ x if needs_unit else None
    stride, padding, dilation, groups = ctx.geometry
    none = (0,) * (x.dim() - 2)
    grad_x, grad_unit, _ = torch.ops.aten.convolution_backward(
        grad, x, unit, None, stride, padding, dilation, False, none, groups, (needs_x, needs_unit, False)
    )
    return grad_x if needs_x else None, grad_unit if needs_unit else None


_cosines = short(_Cosines)


def cosines(
    x: Tensor,
    unit_weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    eps: float,
) -> Tensor:
    """cos θ between each patch of x [N, C, *spatial] and each unit kernel [O, C/groups, *kernel], in float32 at least.

    For a weight [out, in] the patches are the rows of x [N, in]. Autocast must be off.
    """
    cosine: Tensor = _cosines(x, unit_weight, tuple(stride), tuple(padding), tuple(dilation), groups, eps)[0]
    return cosine


def apply_angle(cosine: Tensor, angle: str, k: Tensor | float | None) -> Tensor:
    """g of cosines [N, O, *spatial] for one of the built-in angle functions; k: a number, or a tensor per filter."""
    if angle == "sigmoid":
        assert k is not None
        if isinstance(k, Tensor):
            k = k.to(cosine.dtype)
            k = k.reshape(-1, *(1,) * (cosine.dim() - 2)) if k.dim() == 1 and cosine.dim() > 2 else k
        return angles.sigmoid(cosine, k)
    by_name: dict[str, Callable[[Tensor], Tensor]] = {"linear": angles.linear, "cosine": angles.cosine}
    return by_name[angle](cosine)


def apply_affine(
    value: Tensor, bias: Tensor | None, beta: Tensor | float | None, gamma: Tensor | float | None
) -> Tensor:
    """β·(value + bias) + γ for maps [N, O, *spatial] and one number per filter."""
    if bias is None and beta is None and gamma is None:
        return value
    value = value.movedim(1, -1)
    value = value if bias is None else value + bias
    value = value if beta is None else value * beta
    value = value if gamma is None else value + gamma
    return value.movedim(-1, 1)
