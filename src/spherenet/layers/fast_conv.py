"""FastConv2d: torch's convolution on the engine of SphereConv2d, for comparisons on equal terms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spherenet._util.validation import NotScriptable
from spherenet.kernels.dispatch import convolution_plan, readable
from spherenet.kernels.library import dense_like
from spherenet.kernels.sphere_conv import winograd
from spherenet.ops.geometry import Geometry, resolve_padding

__all__ = ["FastConv2d"]


class FastConv2d(NotScriptable, nn.Conv2d):
    """`torch.nn.Conv2d` that takes Winograd's algorithm on CPUs where SphereConv2d takes it.

    Arguments, parameters and results are those of `torch.nn.Conv2d`; `spherenet.convolution` states the errors. A NaN
    or an infinity in the input reaches all outputs of its tiles, up to 4×4 more than with torch's algorithm.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the output for a batched or unbatched input."""
        if input.dim() == 4 and input.numel():
            geometry = Geometry(
                self.kernel_size, self.stride, self.padding, self.dilation, self.groups, self.padding_mode
            )
            x, geometry = resolve_padding(input, geometry) if self.kernel_size == (3, 3) else (input, geometry)
            plan = convolution_plan(x, self.weight, self.bias, geometry)
            if plan is not None and not torch.is_grad_enabled():
                return _convolution(x, self.weight, self.bias, plan)
            if plan is not None:
                out: Tensor = _PlainConv.apply(x, self.weight, self.bias, geometry, plan)  # type: ignore[no-untyped-call]
                return out
        return super().forward(input)


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, plan: Any) -> Tensor:
    layer = winograd.PLAIN if bias is None else winograd.Layer(bias=bias.contiguous())
    return dense_like(winograd.forward(x, weight, plan, layer).out, x)


class _PlainConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, plan: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry, ctx.plan = geometry, plan
        return _convolution(x, weight, bias, plan)

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
