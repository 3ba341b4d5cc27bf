"""Plain 3×3 convolutions on CPUs by Winograd's algorithm: what sphere layers are compared with on equal terms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spherenet.kernels import library
from spherenet.kernels.dispatch import readable
from spherenet.kernels.sphere_conv import winograd
from spherenet.kernels.sphere_conv.layouts import dense_like
from spherenet.ops.geometry import Geometry

__all__ = ["plain_conv"]


def plain_conv(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor | None:
    """Return the convolution of a batch [N, C, H, W], or None if torch's direct algorithm serves it.

    A NaN or an infinity reaches all outputs of its tiles, up to 4×4 outputs beside those whose patch contains it.
    """
    if torch.compiler.is_compiling() or not x.is_cpu or weight.dtype != x.dtype or not library.available():
        return None
    if torch._C._is_any_autocast_enabled() or not readable(x, weight, bias):
        return None
    plan = winograd.plan_for(x, weight.shape[0], geometry)
    if plan is None:
        return None
    out: Tensor = _PlainConv.apply(x, weight, bias, geometry, plan)  # type: ignore[no-untyped-call]
    return out


class _PlainConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, plan: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry, ctx.plan = geometry, plan
        layer = winograd.Layer(bias=None if bias is None else bias.contiguous())
        return dense_like(winograd.forward(x, weight, plan, layer).out, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_bias = grad.sum((0, 2, 3)) if needs_bias else None
        if torch.is_grad_enabled() or not readable(grad, x):  # create_graph=True, a batch of gradients, a mode
            grad_x, grad_weight, _ = torch.ops.aten.convolution_backward.default(
                grad, x, weight, None, (1, 1), ctx.geometry.padding, (1, 1), False, (0, 0), 1,
                (needs_x, needs_weight, False),
            )  # fmt: skip
            return grad_x, grad_weight, grad_bias, None, None
        gradients = winograd.backward(grad, x, weight, ctx.plan, winograd.Needs(needs_x, needs_weight))
        grad_x = None if gradients.x is None else dense_like(gradients.x, x)
        return grad_x, gradients.weight, grad_bias, None, None
