"""Unit weights that are kept from call to call in inference, as long as the weight has not changed.

A weight may change without a trace: `weight.data.copy_(…)` does not advance the version counter that autograd looks at.
So a kept unit weight is used only if a fingerprint of the weight's memory is still the same; computing it takes a
fraction of the time of normalizing the weight again.

SphereConv and SphereLinear: one convolution with unit weights, and what the kernels do around it.

For backward a layer keeps what a convolution keeps, the map of 1/‖patch‖, and its own output, which costs nothing when
the next layer keeps its input (BatchNorm does). The cosine is recovered from that output:

    forward    c = P·r,  out = β·(g(c) + b) + γ                 P the convolution's output, r = 1/‖patch‖
    backward   D = ∂L/∂P = grad·β·g'(c)·r,  s = r²·Σ grad·β·g'(c)·c over the filters of a group
               gx = convᵀ(D) − x·m,  m the transposed window sum of s

Three cases cannot recover the cosine. Half precision (but for g = cos) and an affine map: the cosines are kept in
float32. An output changed in place by the next layer (an in-place ReLU): noticed in backward, which then convolves
again. Double backward: the plain formula, differentiated by autograd, takes over.

A weight of two dimensions [out, in] makes the same functions a fully connected layer on rows [N, in].
`kernels/operators.py` registers them with torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spherenet.kernels import native
from spherenet.kernels.dispatch import ChangeDetector, implementation, kernels_of, needs_operators
from spherenet.kernels.interface import Affine, Angle
from spherenet.ops import sphere_conv as composite
from spherenet.ops.geometry import Geometry

__all__ = ["Call", "Kept", "SphereConvFunction", "backward", "forward", "kept_unit_weight", "parameter_gradients"]


class _Entry(NamedTuple):
    weight: weakref.ref[Tensor]
    key: tuple[object, ...]
    unit: Tensor


_kept: dict[int, _Entry] = {}


def kept_unit_weight(weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Return weight/‖w‖ per filter in `dtype`, from the last call if the weight is the same. For inference only."""
    key = (native.checksum(weight), weight.data_ptr(), weight.shape, weight.stride(), eps, dtype)
    entry = _kept.get(id(weight))
    if entry is not None and entry.weight() is weight and entry.key == key:
        return entry.unit
    unit = native.unit_weight(weight, eps, dtype)[0]
    if not unit.is_inference():  # such a tensor could not be used again outside of inference mode
        name = id(weight)
        _kept[name] = _Entry(weakref.ref(weight, lambda _: _kept.pop(name, None)), key, unit)
    return unit


_CONVOLUTION = {3: torch.conv1d, 4: torch.conv2d, 5: torch.conv3d}
_NO_AFFINE = Affine()


class Call(NamedTuple):
    """What a layer is besides its tensors.

    unit_weight: weight/‖w‖ if it is known already, in inference. angle: its k if that is a number. keep_cosine:
    whether backward will need the cosines themselves.
    """

    unit_weight: Tensor | None
    geometry: Geometry
    eps: float
    angle: Angle
    keep_cosine: bool


class Kept(NamedTuple):
    """What forward hands to backward; scale is None when the unit weight was given, cosine unless it is kept."""

    unit_weight: Tensor
    scale: Tensor | None
    inverse_norm: Tensor
    cosine: Tensor | None


def _product(x: Tensor, unit_weight: Tensor, geometry: Geometry) -> Tensor:
    if unit_weight.dim() == 2:
        return torch.nn.functional.linear(x, unit_weight)
    product: Tensor = _CONVOLUTION[x.dim()](x, unit_weight, None, *geometry)
    return product


def forward(
    x: Tensor,
    weight: Tensor,
    k: Tensor | None,
    bias: Tensor | None,
    beta: Tensor | None,
    gamma: Tensor | None,
    call: Call,
) -> tuple[Tensor, Kept]:
    """Return out and what backward needs; k is the sigmoid's if it is a tensor.

    The kernels are called directly. Only when somebody watches every operation (a FLOP counter, a tracer) does the call
    go through torch's dispatcher, which costs as much as a small layer.
    """
    if needs_operators(x, weight):
        from spherenet.kernels import operators

        return operators.forward(x, weight, k, bias, beta, gamma, call)
    return run_forward(x, weight, k, bias, beta, gamma, call)


def run_forward(
    x: Tensor,
    weight: Tensor,
    k: Tensor | None,
    bias: Tensor | None,
    beta: Tensor | None,
    gamma: Tensor | None,
    call: Call,
) -> tuple[Tensor, Kept]:
    """`forward` by the kernels themselves."""
    kernels = kernels_of(implementation(x))
    unit_weight, geometry, eps, angle, keep_cosine = call
    if k is not None:
        angle = Angle(angle.name, k)
    affine = _affine(bias, beta, gamma)
    scale = None
    if unit_weight is None:
        unit_weight, scale = kernels.unit_weight(weight, eps, x.dtype)
    product = _product(x, unit_weight, geometry)
    out, inverse_norm, cosine = kernels.forward(product, x, weight.shape[2:], geometry, eps, angle, affine, keep_cosine)
    return out, Kept(unit_weight, scale, inverse_norm, cosine)


def _affine(bias: Tensor | None, beta: Tensor | None, gamma: Tensor | None) -> Affine:
    return _NO_AFFINE if bias is None and beta is None and gamma is None else Affine(bias, beta, gamma)


def backward(
    grad: Tensor,
    x: Tensor,
    k: Tensor | None,
    affine: Affine,
    kept: Kept,
    known: Tensor,
    known_is_cosine: bool,
    call: Call,
    weight_dtype: torch.dtype,
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, weight, k, bias, beta and gamma, None unless `needs` asks for them.

    known: out, or the cosines.
    """
    if needs_operators(grad, x):
        from spherenet.kernels import operators

        return operators.backward(grad, x, k, affine, kept, known, known_is_cosine, call, weight_dtype, needs)
    return run_backward(grad, x, k, affine, kept, known, known_is_cosine, call, weight_dtype, needs)


def run_backward(
    grad: Tensor,
    x: Tensor,
    k: Tensor | None,
    affine: Affine,
    kept: Kept,
    known: Tensor,
    known_is_cosine: bool,
    call: Call,
    weight_dtype: torch.dtype,
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """`backward` by the kernels themselves."""
    kernels = kernels_of(implementation(x))
    _, geometry, _, angle, _ = call
    unit_weight, scale, inverse_norm, _ = kept
    needs_x, needs_weight, needs_k, *needs_affine = needs
    grad_product, spread, sums = kernels.backward(
        grad, known, known_is_cosine, inverse_norm, x, unit_weight.shape[2:], geometry,
        angle if k is None else Angle(angle.name, k), affine, needs_x, needs_k, any(needs_affine),
    )  # fmt: skip
    grad_x, grad_unit = _product_backward(grad_product, x, unit_weight, geometry, needs_x, needs_weight)
    if needs_x:
        grad_x = kernels.correct(grad_x, x, spread, geometry.groups)
    grad_weight = None
    if needs_weight:
        grad_weight = kernels.unit_weight_backward(grad_unit, unit_weight, scale, weight_dtype)
    if sums is None:
        return grad_x, grad_weight, None, None, None, None
    return grad_x, grad_weight, *parameter_gradients(sums, needs, k, affine)


def _product_backward(
    grad: Tensor, x: Tensor, unit_weight: Tensor, geometry: Geometry, needs_x: bool, needs_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    if unit_weight.dim() == 2:
        return (grad @ unit_weight if needs_x else None), (grad.t() @ x if needs_weight else None)
    if not needs_x and not needs_weight:
        return None, None
    stride, padding, dilation, groups = geometry
    found: tuple[Tensor | None, ...] = torch.ops.aten.convolution_backward.default(
        grad, x, unit_weight, None, stride, padding, dilation, False, (0,) * len(stride), groups,
        (needs_x, needs_weight, False),
    )  # fmt: skip
    return found[0], found[1]


def parameter_gradients(
    sums: Tensor, needs: Sequence[bool], k: Tensor | None, affine: Affine
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of k, bias, beta and gamma from Σ grad, Σ grad·g and Σ grad·∂g/∂k of each filter."""
    bias, beta, gamma = affine
    grad_k = grad_bias = grad_beta = grad_gamma = None
    if needs[2] and k is not None:
        grad_k = sums[2] if beta is None else sums[2] * beta
        if k.numel() == 1:
            grad_k = grad_k.sum().reshape(k.shape)
        grad_k = grad_k.to(k.dtype)
    if needs[3] and bias is not None:
        grad_bias = (sums[0] if beta is None else sums[0] * beta).to(bias.dtype)
    if needs[4] and beta is not None:
        grad_beta = (sums[1] if bias is None else sums[1] + sums[0] * bias).to(beta.dtype)
    if needs[5] and gamma is not None:
        grad_gamma = sums[0].to(gamma.dtype)
    return grad_k, grad_bias, grad_beta, grad_gamma


class SphereConvFunction(torch.autograd.Function):
    """Forward and backward for autograd."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        """Return out; inputs as in `forward`."""
        out, kept = forward(*inputs)
        SphereConvFunction.save(ctx, out, kept, *inputs)
        return out

    @staticmethod
    def save(ctx: Any, out: Tensor, kept: Kept, *inputs: Any) -> None:
        """Keep what backward needs."""
        x, weight, k, bias, beta, gamma, call = inputs
        ctx.set_materialize_grads(False)
        ctx.call, ctx.detector, ctx.weight_dtype = call, None, weight.dtype
        known = kept.cosine
        if not call.keep_cosine:
            known = out
            if type(out) is Tensor:
                known, ctx.detector = out.data, ChangeDetector(out)
        ctx.save_for_backward(x, weight, k, bias, beta, gamma, known, *kept[:3])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        """Return the gradients of x, weight, k, bias, beta and gamma."""
        if grad is None:
            return (None,) * 7
        x, weight, k, bias, beta, gamma, known, unit_weight, scale, inverse_norm = ctx.saved_tensors
        needs, call = ctx.needs_input_grad[:6], ctx.call
        if torch.is_grad_enabled():
            return (*_differentiable_gradients(call, grad, (x, weight, k, bias, beta, gamma), needs), None)
        kept = Kept(unit_weight, scale, inverse_norm, known)
        known_is_cosine = call.keep_cosine
        if ctx.detector is not None and ctx.detector.changed:
            known, known_is_cosine = _cosines(x, unit_weight, call), True
        affine = _affine(bias, beta, gamma)
        return (*backward(grad, x, k, affine, kept, known, known_is_cosine, call, ctx.weight_dtype, needs), None)


def _cosines(x: Tensor, unit_weight: Tensor, call: Call) -> Tensor:
    stride, padding, dilation, groups = call.geometry
    return composite.cosines(x, unit_weight, stride, padding, dilation, groups, call.eps)


def _differentiable_gradients(
    call: Call, grad: Tensor, inputs: tuple[Tensor | None, ...], needs: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients as a graph of their own, for double backward."""
    x, weight, k, bias, beta, gamma = inputs
    assert x is not None
    assert weight is not None
    unit_weight = composite.unit_weight(weight, call.eps).to(x.dtype)
    cosine = _cosines(x, unit_weight, call)
    value = composite.apply_angle(cosine, call.angle.name, call.angle.k if k is None else k)
    out = composite.apply_affine(value, bias, beta, gamma).to(grad.dtype)
    wanted = [value for value, need in zip(inputs, needs, strict=True) if need and value is not None]
    gradients = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    return [next(gradients) if need else None for need in needs]
