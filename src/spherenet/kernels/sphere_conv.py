"""SphereConv and SphereLinear as two torch operators, `spherenet::sphere_conv` and its backward.

Forward is one convolution with unit weights, a window sum over one map a group, and one pass over the convolution's
output. For backward it keeps what a convolution keeps, the map of 1/‖patch‖, and its own output, which costs nothing
where the next layer keeps its input (BatchNorm does). The cosine is recovered from that output.

Every pass works in place where the buffer is ours, because fresh memory costs more than the arithmetic in it: on the
convolution's output, on the input gradient that it returned, and on a scratch map that is kept from call to call.

Three cases cannot recover the cosine. Half precision: the cosines are kept in float32. An output changed in place by
the next layer (an in-place ReLU): noticed in backward, which then convolves again. Double backward: the plain formula
of `ops.composite`, differentiated by autograd, takes over.

A weight of two dimensions [out, in] makes the same operators a fully connected layer on rows [N, in].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from spherenet.kernels import passes
from spherenet.kernels.layout import Layout
from spherenet.kernels.scratch import scratch_like
from spherenet.kernels.window import spread, window_sum
from spherenet.ops import composite
from spherenet.ops.norms import SHRINK, working_dtype

__all__ = ["sphere_conv"]


def _inverse_norm(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    eps: float,
) -> Tensor:
    """1/‖patch‖ as a map [N, groups, *out]; 0 where Σx² overflowed."""
    x, layout = Layout.of(x, groups)
    squares = passes.sum_of_squares(layout.view(x), layout.channels_at)
    maps = layout.map(squares, (x.shape[0], groups, *x.shape[2:]))
    sums = window_sum(maps, kernel_size, stride, padding, dilation).add(eps * SHRINK**2)
    return sums.rsqrt_().mul_(SHRINK).contiguous()  # as the fake kernel promises; a copy with groups only


def _steepness(layout: Layout, k: Tensor | None, dtype: torch.dtype) -> passes.Steepness | None:
    if k is None:
        return None
    return passes.Steepness(*(layout.filters(value) for value in passes.steepness(k.to(dtype))))


@torch.library.custom_op("spherenet::sphere_conv", mutates_args=())
def sphere_conv(
    x: Tensor,
    unit_weight: Tensor,
    k: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    eps: float,
    angle: str,
    keep_cosine: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """g(θ) for a batch x [N, C, *spatial] and unit kernels [O, C/groups, *kernel] (SPEC 1 (1)).

    k: one number a filter for the sigmoid, None for linear and cosine. Returns the output, 1/‖patch‖
    [N, groups, *out] and the cosines (empty unless they are kept).
    """
    geometry = (stride, padding, dilation, groups)
    with torch.no_grad():
        out, layout = Layout.of(composite.conv_product(x, unit_weight, *geometry), groups)
        inverse_norm = _inverse_norm(x, unit_weight.shape[2:], *geometry, eps)
        cosine = torch.empty_like(out, dtype=inverse_norm.dtype) if keep_cosine else inverse_norm.new_empty(0)
        passes.forward(
            angle,
            layout.view(out),
            layout.pixels(inverse_norm),
            layout.view(cosine) if keep_cosine else None,
            _steepness(layout, k, inverse_norm.dtype),
        )
    return out, inverse_norm, cosine


@sphere_conv.register_fake
def _(x, unit_weight, k, stride, padding, dilation, groups, eps, angle, keep_cosine):  # type: ignore[no-untyped-def]
    out = composite.conv_product(x, unit_weight, stride, padding, dilation, groups)
    inverse_norm = out.new_empty((out.shape[0], groups, *out.shape[2:]), dtype=working_dtype(x.dtype))
    kept = torch.empty_like(out, dtype=inverse_norm.dtype) if keep_cosine else inverse_norm.new_empty(0)
    return out, inverse_norm, kept


@torch.library.custom_op("spherenet::sphere_conv_backward", mutates_args=())
def sphere_conv_backward(
    grad: Tensor,
    x: Tensor,
    unit_weight: Tensor,
    k: Tensor | None,
    known: Tensor,
    inverse_norm: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    angle: str,
    known_is_cosine: bool,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of the unit kernels and of k, each empty unless `needs` asks for it."""
    grad_x, grad_weight, grad_k = (x.new_empty(0) for _ in range(3))
    with torch.no_grad():
        known, layout = Layout.of(known.detach(), groups)
        grad = layout.dense(grad)
        shape = _steepness(layout, k, inverse_norm.dtype)
        if needs[2]:
            assert shape is not None
            assert k is not None
            (of_grad, over), (of_known, _) = layout.images(grad), layout.images(known)
            grad_k = passes.gradient_of_k(of_grad, of_known, known_is_cosine, over, shape).reshape(-1).to(k.dtype)
        if not (needs[0] or needs[1]):
            return grad_x, grad_weight, grad_k
        into = scratch_like(grad)
        s = passes.backward(
            angle,
            layout.view(grad),
            layout.view(known),
            known_is_cosine,
            layout.pixels(inverse_norm),
            layout.view(into),
            layout.channels_at,
            shape,
        )
        if unit_weight.dim() == 2:
            grad_x = into @ unit_weight if needs[0] else grad_x
            grad_weight = into.t() @ x if needs[1] else grad_weight
        else:
            wanted, none = (needs[0], needs[1], False), (0,) * (x.dim() - 2)
            found = torch.ops.aten.convolution_backward(
                into, x, unit_weight, None, stride, padding, dilation, False, none, groups, wanted
            )
            grad_x, grad_weight = (found[0] if needs[0] else grad_x), (found[1] if needs[1] else grad_weight)
        if needs[0]:
            m = spread(
                layout.map(s, tuple(inverse_norm.shape)),
                (x.shape[0], groups, *x.shape[2:]),
                unit_weight.shape[2:],
                stride,
                padding,
                dilation,
            )
            grad_x, layout_x = Layout.of(grad_x, groups)
            passes.correct(layout_x.view(grad_x), layout_x.view(layout_x.dense(x)), layout_x.pixels(m))
    return grad_x, grad_weight, grad_k


@sphere_conv_backward.register_fake
def _(grad, x, unit_weight, k, known, inverse_norm, stride, padding, dilation, groups, angle, known_is_cosine, needs):  # type: ignore[no-untyped-def]
    return (
        torch.empty_like(x) if needs[0] else x.new_empty(0),
        torch.empty_like(unit_weight) if needs[1] else x.new_empty(0),
        torch.empty_like(k) if needs[2] else inverse_norm.new_empty(0),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, unit_weight, k, *geometry, ctx.eps, ctx.angle, ctx.keeps_cosine = inputs
    ctx.geometry = tuple(geometry)  # stride, padding, dilation, groups
    out, inverse_norm, cosine = output
    ctx.mark_non_differentiable(inverse_norm, cosine)
    ctx.set_materialize_grads(False)
    ctx.witness = None
    known = cosine if ctx.keeps_cosine else out
    if known is out and type(out) is torch.Tensor:
        # `data` is kept rather than out, because autograd refuses a saved tensor that was changed in place, and an
        # in-place ReLU after a convolution is what everybody writes. A twin of out that shares its version counter,
        # but none of its memory, tells backward whether that happened.
        known = out.data
        ctx.witness = out.detach()
        if _get_current_dispatch_mode() is None:  # tools that watch every operation do not know this one
            ctx.witness.data = out.new_empty(0)
        ctx.version = ctx.witness._version
    ctx.save_for_backward(x, unit_weight, k, inverse_norm, known)


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    unused = (None,) * 7
    if grad is None:
        return (None, None, None, *unused)
    x, unit_weight, k, inverse_norm, known = ctx.saved_tensors
    needs = ctx.needs_input_grad[:3]
    if torch.is_grad_enabled():
        return (*_differentiable_gradients(ctx, grad, x, unit_weight, k, needs), *unused)
    known_is_cosine = ctx.keeps_cosine
    if ctx.witness is not None and ctx.witness._version != ctx.version:
        known = _cosines_again(ctx, x, unit_weight)
        known_is_cosine = True
    found = sphere_conv_backward(
        grad, x, unit_weight, k, known, inverse_norm, *ctx.geometry, ctx.angle, known_is_cosine, list(needs)
    )
    return (*(gradient if need else None for gradient, need in zip(found, needs, strict=True)), *unused)


def _cosines_again(ctx: Any, x: Tensor, unit_weight: Tensor) -> Tensor:
    stride, padding, dilation, groups = ctx.geometry
    return composite.cosines(x, unit_weight, stride, padding, dilation, groups, ctx.eps)


def _differentiable_gradients(
    ctx: Any, grad: Tensor, x: Tensor, unit_weight: Tensor, k: Tensor | None, needs: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients as a graph of their own, for double backward."""
    cosine = _cosines_again(ctx, x, unit_weight)
    out = composite.apply_angle(cosine, ctx.angle, k).to(grad.dtype)
    wanted = [value for value, need in zip((x, unit_weight, k), needs, strict=True) if need and value is not None]
    gradients = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    return [next(gradients) if need else None for need in needs]


sphere_conv.register_autograd(_backward, setup_context=_setup_context)
