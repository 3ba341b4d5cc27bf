"""SphereConv and SphereLinear as two torch operators, `spherenet::sphere_conv` and its backward.

Forward is one convolution with unit weights, a window sum over one map a group, and one pass over the convolution's
output. For backward it keeps what a convolution keeps, the map of 1/‖patch‖, and its own output, which costs nothing
where the next layer keeps its input (BatchNorm does). The cosine is recovered from that output.

On the CPU both go through the batch in pieces that stay in cache: what a pass reads was just written, no map but the
result is ever whole, and the pages of no other map are asked of the system. This is what pays for the extra passes.

Three cases cannot recover the cosine. Half precision: the cosines are kept in float32. An output changed in place by
the next layer (an in-place ReLU): noticed in backward, which then convolves again. Double backward: the plain formula
of `ops.composite`, differentiated by autograd, takes over.

A weight of two dimensions [out, in] makes the same operators a fully connected layer on rows [N, in].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from spherenet.kernels import passes
from spherenet.kernels.layout import Layout
from spherenet.kernels.window import spread, window_sum
from spherenet.ops import composite
from spherenet.ops.norms import SHRINK, working_dtype

__all__ = ["PIECE_BYTES", "sphere_conv"]

PIECE_BYTES = 8 << 20
"""How much of a map is worked on at a time on the CPU: small enough for its caches and for the heap's reuse of memory
(maps above 32 MB are mapped anew by the system, page by page), large enough for an efficient convolution."""


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
    return window_sum(maps, kernel_size, stride, padding, dilation).add(eps * SHRINK**2).rsqrt_().mul_(SHRINK)


def _pieces(x: Tensor, unit_weight: Tensor) -> Iterator[slice]:
    """Slices of the batch to be computed one after the other: on the CPU as many images as stay in cache."""
    images = len(x)
    if x.device.type == "cpu" and x.numel() > 0:
        # The output of a stride-1 layer is the larger map when it has more filters than the input has channels.
        image_bytes = x.element_size() * x[0].numel() * max(1, unit_weight.shape[0] // x.shape[1])
        images = max(1, PIECE_BYTES // image_bytes)
    for start in range(0, max(len(x), 1), max(images, 1)):
        yield slice(start, min(start + images, len(x)))


def _detached(x: Tensor, unit_weight: Tensor, k: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    # The compiler looks at what a tensor is part of; its kernels must not depend on that.
    return x.detach(), unit_weight.detach(), None if k is None else k.detach()


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
    x, unit_weight, k = _detached(x, unit_weight, k)
    geometry = (stride, padding, dilation, groups)
    out = inverse_norm = cosine = x.new_empty(0)
    with torch.no_grad():
        for piece in _pieces(x, unit_weight):
            product, layout = Layout.of(composite.conv_product(x[piece], unit_weight, *geometry), groups)
            norms = _inverse_norm(x[piece], unit_weight.shape[2:], *geometry, eps)
            if piece.start == 0:
                in_place = x.device.type != "cpu"
                out = product if in_place else layout.empty_like(product, len(x))
                cosine = layout.empty_like(product, len(x), norms.dtype) if keep_cosine else norms.new_empty(0)
                inverse_norm = norms.new_empty(len(x), *norms.shape[1:])
            inverse_norm[piece] = norms
            passes.forward(
                angle,
                layout.view(product),
                layout.pixels(norms),
                None if in_place else layout.view(out[piece]),
                layout.view(cosine[piece]) if keep_cosine else None,
                _steepness(layout, k, norms.dtype),
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
    x, unit_weight, k = _detached(x, unit_weight, k)
    with torch.no_grad():
        known, layout = Layout.of(known.detach(), groups)
        grad = layout.dense(grad)
        grad_x, grad_weight, grad_k = (x.new_empty(0) for _ in range(3))
        for piece in _pieces(x, unit_weight):
            found_x, found_weight, found_k = _backward_of_piece(
                grad[piece], x[piece], unit_weight, k, known[piece], inverse_norm[piece],
                (stride, padding, dilation, groups), angle, known_is_cosine, needs, layout,
            )  # fmt: skip
            if piece.start == 0:
                grad_weight, grad_k = found_weight, found_k
                in_place = x.device.type != "cpu"
                if needs[0]:
                    x_layout = Layout.of(found_x[0], groups)[1]
                    grad_x = found_x[0] if in_place else x_layout.empty_like(found_x[0], len(x))
            else:
                grad_weight += found_weight
                grad_k += found_k
            if needs[0]:
                gradient, m = found_x
                passes.correct(
                    x_layout.view(gradient),
                    x_layout.view(x_layout.dense(x[piece])),
                    x_layout.pixels(m),
                    None if in_place else x_layout.view(grad_x[piece]),
                )
    return grad_x, grad_weight, grad_k if k is None else grad_k.to(k.dtype)


def _backward_of_piece(
    grad: Tensor,
    x: Tensor,
    unit_weight: Tensor,
    k: Tensor | None,
    known: Tensor,
    inverse_norm: Tensor,
    geometry: tuple[Sequence[int], Sequence[int], Sequence[int], int],
    angle: str,
    known_is_cosine: bool,
    needs: Sequence[bool],
    layout: Layout,
) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """For some images: the gradient of x with constant norms and the map m that corrects it, of weights, of k."""
    stride, padding, dilation, groups = geometry
    nothing = x.new_empty(0)
    shape = _steepness(layout, k, inverse_norm.dtype)
    flat_grad, flat_known = layout.view(grad), layout.view(known)
    grad_k = nothing
    if needs[2]:
        assert shape is not None
        grad_k = passes.sums_for_k(flat_grad, flat_known, known_is_cosine, layout.channels_at, shape).reshape(-1)
    if not (needs[0] or needs[1]):
        return (nothing, nothing), nothing, grad_k
    into = torch.empty_like(grad)
    s = passes.backward(
        angle,
        flat_grad,
        flat_known,
        known_is_cosine,
        layout.pixels(inverse_norm),
        layout.view(into),
        layout.channels_at,
        shape,
    )
    if unit_weight.dim() == 2:
        grad_x = into @ unit_weight if needs[0] else nothing
        grad_weight = into.t() @ x if needs[1] else nothing
    else:
        found = torch.ops.aten.convolution_backward(
            into, x, unit_weight, None, *geometry[:3], False, (0,) * (x.dim() - 2), groups, (needs[0], needs[1], False)
        )
        grad_x, grad_weight = (found[0] if needs[0] else nothing), (found[1] if needs[1] else nothing)
    m = nothing
    if needs[0]:
        s_map = layout.map(s, tuple(inverse_norm.shape))
        m = spread(s_map, (x.shape[0], groups, *x.shape[2:]), unit_weight.shape[2:], stride, padding, dilation)
    return (grad_x, m), grad_weight, grad_k


@sphere_conv_backward.register_fake
def _(grad, x, unit_weight, k, known, inverse_norm, stride, padding, dilation, groups, angle, known_is_cosine, needs):  # type: ignore[no-untyped-def]
    return (
        torch.empty_like(x) if needs[0] else x.new_empty(0),
        torch.empty_like(unit_weight) if needs[1] else x.new_empty(0),
        torch.empty_like(k) if needs[2] else inverse_norm.new_empty(0),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, unit_weight, k, *geometry, ctx.eps, ctx.angle, ctx.keeps_cosine = inputs
    ctx.geometry = tuple(geometry)
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
        known = composite.cosines(x, unit_weight, *ctx.geometry, eps=ctx.eps)
        known_is_cosine = True
    found = sphere_conv_backward(
        grad, x, unit_weight, k, known, inverse_norm, *ctx.geometry, ctx.angle, known_is_cosine, list(needs)
    )
    return (*(gradient if need else None for gradient, need in zip(found, needs, strict=True)), *unused)


def _differentiable_gradients(
    ctx: Any, grad: Tensor, x: Tensor, unit_weight: Tensor, k: Tensor | None, needs: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients as a graph of their own, for double backward."""
    cosine = composite.cosines(x, unit_weight, *ctx.geometry, eps=ctx.eps)
    out = composite.apply_angle(cosine, ctx.angle, k).to(grad.dtype)
    wanted = [value for value, need in zip((x, unit_weight, k), needs, strict=True) if need and value is not None]
    gradients = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    return [next(gradients) if need else None for need in needs]


sphere_conv.register_autograd(_backward, setup_context=_setup_context)
