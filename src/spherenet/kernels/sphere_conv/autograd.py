"""SphereConv and SphereLinear by fused kernels: one convolution with unit weights, and kernels before and after it.

For backward a layer saves its input and weight like a convolution, the map of 1/‖patch‖, and its own output, which
takes no additional memory if the next layer saves its input (BatchNorm does). The cosine is recovered from the output:

    forward    c = P·r,  out = β·(h·g(c) + b) + γ               P the convolution's output, r = 1/‖patch‖, h = h(1/r)
    backward   D = ∂L/∂P = grad·β·h·g'(c)·r,  s = r·Σ grad·β·(r·h·g'(c)·c − h'·g(c)) over the filters of a group
               gx = convᵀ(D) − x·m + n,  m and n the transposed window sums of s and of s·mean(patch)

h = 1 unless the layer has a magnitude function (Eq. 15), and n = 0 unless its patches are centered (Eq. 14).

There are three cases in which the cosine cannot be recovered. In half precision (unless g = cos), with an affine map or
a magnitude function, the cosines are saved; on CPUs in half precision P instead, which has half their size. If the next
layer changes the output in place (an in-place ReLU), backward detects it and convolves again. For double backward,
autograd differentiates the plain formula.

A weight of two dimensions [out, in] makes the same functions a fully connected layer on rows [N, in].
`kernels/sphere_conv/operators.py` registers them with torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spherenet.angles.elementary import gradients_of
from spherenet.kernels.dispatch import ChangeDetector, is_traced, kernels_of, needs_operators
from spherenet.kernels.sphere_conv import native
from spherenet.kernels.sphere_conv.layouts import is_dense
from spherenet.ops import sphere_conv as plain
from spherenet.ops.geometry import convolve, convolve_backward
from spherenet.ops.sphere_conv import Affine, Operation

__all__ = [
    "Saved",
    "SphereConvFunction",
    "backward",
    "cached_unit_weight",
    "forward",
    "parameter_gradients",
    "per_filter",
]

K = Tensor | float | None


class _CacheEntry(NamedTuple):
    weight: weakref.ref[Tensor]
    key: tuple[object, ...]
    unit: Tensor


_unit_weights: dict[int, _CacheEntry] = {}


def cached_unit_weight(weight: Tensor, eps: float, dtype: torch.dtype, centered: bool) -> Tensor:
    """Return weight/‖w‖ per filter in `dtype` for inference, from the last call if the weight has not changed.

    `weight.data.copy_(…)` does not advance the version counter of autograd. Therefore the result is reused only if a
    checksum of the weight's memory is the same, too, which takes a fraction of the time of normalizing it again. The
    result is not kept for a weight that is not dense, e.g. a slice of another tensor.
    """
    if not is_dense(weight):
        return native.unit_weight(weight, eps, dtype, centered)[0]
    version = None if weight.is_inference() else weight._version
    key = (native.checksum(weight), version, weight.data_ptr(), weight.shape, weight.stride(), eps, dtype, centered)
    entry = _unit_weights.get(id(weight))
    if entry is not None and entry.weight() is weight and entry.key == key:
        return entry.unit
    unit = native.unit_weight(weight, eps, dtype, centered)[0]
    if not unit.is_inference():  # such a tensor cannot be used outside of inference mode
        address = id(weight)
        reference = weakref.ref(weight, lambda _: _unit_weights.pop(address, None))
        _unit_weights[address] = _CacheEntry(reference, key, unit)
    return unit


def per_filter(value: Tensor | float | None, weight: Tensor) -> Tensor | None:
    """Return a number per filter as the kernels take it: a tensor [filters]."""
    if value is None or isinstance(value, Tensor):
        return value if value is None or value.shape == weight.shape[:1] else value.expand(weight.shape[0])
    return torch.full((weight.shape[0],), value, dtype=weight.dtype, device=weight.device)


class Saved(NamedTuple):
    """Results of forward that backward needs; scale is None if the unit weight was given, cosine unless it is saved.

    In half precision the native kernels save P in place of the cosine.
    """

    unit_weight: Tensor
    scale: Tensor | None
    inverse_norm: Tensor
    cosine: Tensor | None
    mean: Tensor | None = None
    """Means of the patches if they are centered."""


def forward(
    x: Tensor,
    weight: Tensor,
    k: K,
    bias: Tensor | None,
    beta: Tensor | None,
    gamma: Tensor | None,
    operation: Operation,
    unit_weight: Tensor | None = None,
    radius: K = None,
) -> tuple[Tensor, Saved]:
    """Return the output and what backward needs.

    Args:
        x: Batch [N, C, *spatial] or rows [N, in].
        weight: Kernels.
        k: Parameter of g, a number or a tensor with one element or one per filter.
        bias: One number per filter.
        beta: One number per filter.
        gamma: One number per filter.
        operation: What the layer computes.
        unit_weight: weight/‖w‖ if it is known, in inference.
        radius: Radius of the magnitude function, a number or a tensor with one element or one per filter.
    """
    kernels = kernels_of(operation.implementation)
    affine = None if bias is None and beta is None and gamma is None else Affine(bias, beta, gamma)
    scale = None
    if unit_weight is None:
        unit_weight, scale = kernels.unit_weight(weight, operation.eps, x.dtype, operation.center is not None)
    product = convolve(x, unit_weight, operation.geometry)
    out, *maps = kernels.forward(product, x, operation, k, affine, radius)
    return out, Saved(unit_weight, scale, *maps)


def backward(
    grad: Tensor,
    x: Tensor,
    k: K,
    affine: Affine | None,
    saved: Saved,
    saved_map: Tensor,
    operation: Operation,
    weight_dtype: torch.dtype,
    needs: Sequence[bool],
    radius: K = None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, weight, k, bias, beta, gamma and radius, None for those that are not needed.

    Args:
        grad: Gradient of the output.
        x: Input of forward.
        k: Parameter of g.
        affine: The affine map after g.
        saved: Results of forward.
        saved_map: `saved.cosine` if operation.save_cosine, otherwise the output.
        operation: What the layer computes.
        weight_dtype: Dtype of the weight.
        needs: Whether each of the seven gradients is needed.
        radius: Radius of the magnitude function.
    """
    kernels = kernels_of(operation.implementation)
    geometry = operation.geometry
    unit_weight, scale, inverse_norm, _, mean = saved
    needs_x, needs_weight, needs_k, *needs_affine, needs_radius = needs
    grad_product, correction, sums = kernels.backward(
        grad, saved_map, inverse_norm, x, operation, k, affine, needs_x, needs_k or needs_radius, any(needs_affine),
        mean, radius,
    )  # fmt: skip
    grad_x, grad_unit = convolve_backward(grad_product, x, unit_weight, geometry, needs_x, needs_weight)
    if needs_x:
        grad_x = kernels.correct(grad_x, x, correction, geometry.groups)
    grad_weight = None
    if needs_weight:
        centered = operation.center is not None
        grad_weight = kernels.unit_weight_backward(grad_unit, unit_weight, scale, weight_dtype, centered)
    if sums is None:
        return grad_x, grad_weight, None, None, None, None, None
    return grad_x, grad_weight, *parameter_gradients(sums, needs, k, affine or Affine(), radius)


def parameter_gradients(
    sums: Tensor, needs: Sequence[bool], k: K, affine: Affine, radius: K = None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of k, bias, beta, gamma and radius from four sums per filter.

    The sums are Σ grad, Σ grad·h·g, Σ grad·h·∂g/∂k and Σ grad·g·∂h/∂ρ; the last is absent without a radius.
    """
    bias, beta, gamma = affine
    grad_bias = grad_beta = grad_gamma = None
    by_parameter: list[Tensor | None] = []
    for row, need, parameter in ((2, needs[2], k), (3, len(needs) > 6 and needs[6], radius)):
        gradient = None
        if need and isinstance(parameter, Tensor):
            gradient = sums[row] if beta is None else sums[row] * beta
            if parameter.numel() == 1:
                gradient = gradient.sum().reshape(parameter.shape)
            gradient = gradient.to(parameter.dtype)
        by_parameter.append(gradient)
    if needs[3] and bias is not None:
        grad_bias = (sums[0] if beta is None else sums[0] * beta).to(bias.dtype)
    if needs[4] and isinstance(beta, Tensor):
        grad_beta = (sums[1] if bias is None else sums[1] + sums[0] * bias).to(beta.dtype)
    if needs[5] and isinstance(gamma, Tensor):
        grad_gamma = sums[0].to(gamma.dtype)
    grad_k, grad_radius = by_parameter
    return grad_k, grad_bias, grad_beta, grad_gamma, grad_radius


class SphereConvFunction(torch.autograd.Function):
    """Forward and backward for autograd.

    The kernels are called directly. Under a dispatch mode (a FLOP counter, a tracer) and for tensor subclasses the call
    passes through torch's dispatcher instead, which takes as long as a small layer.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any, results: tuple[Tensor, Saved] | None = None) -> Tensor:
        """Return the output; inputs are x, weight, k, bias, beta, gamma, radius and the operation.

        `results` are those of `forward` if the caller has computed them.
        """
        x, weight, k, bias, beta, gamma, radius, operation = inputs
        if results is not None:
            out, saved = results
        elif needs_operators(x, weight):
            from spherenet.kernels.sphere_conv import operators

            out, saved = operators.forward(x, weight, k, bias, beta, gamma, operation)
        else:
            out, saved = forward(x, weight, k, bias, beta, gamma, operation, None, radius)
        ctx.set_materialize_grads(False)
        ctx.operation, ctx.detector = operation, None
        tensors = [value if isinstance(value, Tensor) else None for value in (k, radius)]
        ctx.constants = k, radius
        saved_map = saved.cosine
        if not operation.save_cosine:
            saved_map = out
            if type(out) is Tensor:
                saved_map, ctx.detector = out.data, ChangeDetector(out)
        ctx.save_for_backward(x, weight, *tensors, bias, beta, gamma, saved_map, *saved[:3], saved.mean)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        """Return the gradients of x, weight, k, bias, beta, gamma and radius."""
        if grad is None:
            return (None,) * 8
        x, weight, k, radius, bias, beta, gamma, saved_map, unit_weight, scale, inverse_norm, mean = ctx.saved_tensors
        operation, needs = ctx.operation, ctx.needs_input_grad[:7]
        k, radius = (
            constant if value is None else value for value, constant in zip((k, radius), ctx.constants, strict=True)
        )
        affine = None if bias is None and beta is None and gamma is None else Affine(bias, beta, gamma)
        through_operators = needs_operators(grad, x)
        is_extended = operation.center is not None or operation.magnitude is not None  # the operators do not know these
        # create_graph=True, a batch of gradients, or a layer without operators under a dispatch mode
        if torch.is_grad_enabled() or is_traced(grad) or (through_operators and is_extended):

            def formula(x: Tensor, weight: Tensor, k: K, bias: Any, beta: Any, gamma: Any, radius: K) -> list[Tensor]:
                affine = Affine(bias, beta, gamma)
                return [plain.sphere_conv(x, weight, k, affine, operation, radius).to(grad.dtype)]

            gradients = gradients_of(formula, (x, weight, k, bias, beta, gamma, radius), [grad])
            return (*(value if need else None for value, need in zip(gradients, needs, strict=True)), None)
        if ctx.detector is not None and ctx.detector.changed:
            center_patch = operation.center == "patch"
            saved_map = plain.cosines(x, unit_weight, operation.geometry, operation.eps, center_patch=center_patch)
            operation = operation._replace(save_cosine=True)
        saved = Saved(unit_weight, scale, inverse_norm, saved_map, mean)
        if through_operators:
            from spherenet.kernels.sphere_conv import operators

            six = operators.backward(grad, x, k, affine, saved, saved_map, operation, weight.dtype, needs[:6])
            return (*six, None, None)
        return (*backward(grad, x, k, affine, saved, saved_map, operation, weight.dtype, needs, radius), None)
