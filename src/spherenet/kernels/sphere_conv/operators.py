"""SphereConv as torch operators: `spherenet::sphere_conv` and `spherenet::sphere_conv_backward`.

They pass the functions of `kernels/sphere_conv/autograd.py` through torch's dispatcher, for tools that watch or trace
every operation: FLOP counters, FakeTensor, opcheck. Their arguments are flat, because a schema has no structures.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import conv_flop_count, register_flop_formula

from spherenet.angles import ANGLES
from spherenet.kernels.dispatch import below_autograd, current_backend
from spherenet.kernels.sphere_conv import autograd as sphere_conv
from spherenet.kernels.sphere_conv.autograd import K, Saved, SphereConvFunction
from spherenet.kernels.sphere_conv.layouts import is_rows
from spherenet.ops.geometry import Geometry, convolve
from spherenet.ops.norms import working_dtype
from spherenet.ops.sphere_conv import Affine, Operation

__all__ = ["backward", "backward_operator", "forward", "forward_operator"]

_OPTIONS = (
    "int[] stride, int[] padding, int[] dilation, int groups, float eps, str angle, float constant_k, bool save_cosine"
)
_library: Any = torch.library.Library("spherenet", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "sphere_conv(Tensor x, Tensor weight, Tensor? k, Tensor? bias, Tensor? beta, Tensor? gamma, Tensor? unit_weight, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "sphere_conv_backward(Tensor grad, Tensor x, Tensor unit_weight, Tensor scale, Tensor? k, Tensor? bias, "
    f"Tensor? beta, Tensor? gamma, Tensor saved_map, Tensor inverse_norm, {_OPTIONS}, ScalarType weight_dtype, "
    "bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
forward_operator = torch.ops.spherenet.sphere_conv.default
backward_operator = torch.ops.spherenet.sphere_conv_backward.default


# --- from structures to flat arguments and back ------------------------------------------------------------------


def _flat(operation: Operation, k: K) -> tuple[Any, ...]:
    _, stride, padding, dilation, groups, _ = operation.geometry
    constant_k = k if isinstance(k, float) else 0.0
    name = operation.angle.kernel_id
    return stride, padding, dilation, groups, operation.eps, name, constant_k, operation.save_cosine


@lru_cache(maxsize=16)
def _angle_class(kernel_id: str) -> Any:
    return next(angle_class for angle_class in ANGLES.values() if angle_class.kernel_id == kernel_id)


def _operation(x: Tensor, weight: Tensor, flat: Sequence[Any]) -> tuple[Operation, float | None]:
    """Return the operation and the constant parameter of g from flat arguments."""
    stride, padding, dilation, groups, eps, kernel_id, constant_k, save_cosine = flat
    geometry = Geometry(tuple(weight.shape[2:]), tuple(stride), tuple(padding), tuple(dilation), groups)
    angle, name = _angle_class(kernel_id), current_backend()
    if name not in ("native", "triton"):
        name = "triton" if x.is_cuda else "native"
    return Operation(angle, geometry, eps, name, save_cosine), constant_k if angle.has_k() else None


def forward(
    x: Tensor,
    weight: Tensor,
    k: K,
    bias: Tensor | None,
    beta: Tensor | None,
    gamma: Tensor | None,
    operation: Operation,
    unit_weight: Tensor | None = None,
) -> tuple[Tensor, Saved]:
    """Call `sphere_conv.forward` through the operator."""
    tensors = (x, weight, k if isinstance(k, Tensor) else None, bias, beta, gamma, unit_weight)
    with below_autograd():
        out, unit, scale, inverse_norm, cosine = forward_operator(*tensors, *_flat(operation, k))
    return out, Saved(unit if unit_weight is None else unit_weight, scale, inverse_norm, cosine)


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
) -> tuple[Tensor | None, ...]:
    """Call `sphere_conv.backward` through the operator."""
    gradients = backward_operator(
        grad, x, saved.unit_weight, saved.scale, k if isinstance(k, Tensor) else None, *(affine or Affine()), saved_map,
        saved.inverse_norm, *_flat(operation, k), weight_dtype, list(needs),
    )  # fmt: skip
    return tuple(gradient if need else None for gradient, need in zip(gradients, needs, strict=True))


# --- implementations, and their results for tensors without data ---------------------------------------------------


def _forward(x: Tensor, weight: Tensor, k: Any, bias: Any, beta: Any, gamma: Any, unit_weight: Any, *flat: Any) -> Any:
    operation, constant_k = _operation(x, weight, flat)
    k = constant_k if k is None else k
    out, saved = sphere_conv.forward(x, weight, k, bias, beta, gamma, operation, unit_weight)
    # An operator may not return its inputs and always returns tensors; absent results are empty.
    unit = saved.unit_weight if unit_weight is None else None
    return out, *(x.new_empty(0) if value is None else value for value in (unit, *saved[1:4]))


def _fake_forward(
    x: Tensor, weight: Tensor, k: Any, bias: Any, beta: Any, gamma: Any, unit_weight: Any, *flat: Any
) -> Any:
    operation, _ = _operation(x, weight, flat)
    groups = operation.geometry.groups
    unit = torch.empty_like(weight, dtype=x.dtype)
    out = convolve(x, unit, operation.geometry)
    work = working_dtype(x.dtype)
    inverse_norm = out.new_empty((out.shape[0], groups, *out.shape[2:]), dtype=work)
    if groups > 1 and out.dim() > 2 and is_rows(out):
        inverse_norm = inverse_norm.movedim(1, -1).contiguous().movedim(-1, 1)
    # The native kernels save the output of the convolution in half precision.
    saved_dtype = x.dtype if operation.implementation == "native" else work
    cosine = torch.empty_like(out, dtype=saved_dtype) if operation.save_cosine else x.new_empty(0)
    if unit_weight is not None:
        return out, x.new_empty(0), x.new_empty(0), inverse_norm, cosine
    return out, unit, weight.new_empty(weight.shape[0], dtype=working_dtype(weight.dtype)), inverse_norm, cosine


def _backward(
    grad: Tensor, x: Tensor, unit_weight: Tensor, scale: Tensor, k: Any, bias: Any, beta: Any, gamma: Any,
    saved_map: Tensor, inverse_norm: Tensor, *rest: Any,
) -> Any:  # fmt: skip
    *flat, weight_dtype, needs = rest
    operation, constant_k = _operation(x, unit_weight, flat)
    affine = None if bias is None and beta is None and gamma is None else Affine(bias, beta, gamma)
    saved = Saved(unit_weight, scale, inverse_norm, saved_map)
    k = constant_k if k is None else k
    needs = (*needs, False)  # operators have no radius
    gradients = sphere_conv.backward(grad, x, k, affine, saved, saved_map, operation, weight_dtype, needs)
    return tuple(x.new_empty(0) if gradient is None else gradient for gradient in gradients[:6])


def _fake_backward(
    grad: Tensor, x: Tensor, unit_weight: Tensor, scale: Tensor, k: Any, bias: Any, beta: Any, gamma: Any,
    saved_map: Tensor, inverse_norm: Tensor, *rest: Any,
) -> Any:  # fmt: skip
    weight_dtype, needs = rest[-2:]
    like = (torch.empty_like(x), torch.empty_like(unit_weight, dtype=weight_dtype))
    parameters = tuple(x.new_empty(0) if value is None else torch.empty_like(value) for value in (k, bias, beta, gamma))
    return tuple(value if need else x.new_empty(0) for value, need in zip((*like, *parameters), needs, strict=True))


for _name, _run, _fake in (
    ("sphere_conv", _forward, _fake_forward),
    ("sphere_conv_backward", _backward, _fake_backward),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"spherenet::{_name}", _fake, lib=_library)


class _OperatorFunction(torch.autograd.Function):
    """Autograd of the operator itself: `SphereConvFunction` with flat arguments and all outputs."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        """Return the outputs of the operator; only the first has a gradient."""
        x, weight, k, bias, beta, gamma, unit_weight, *flat = inputs
        operation, constant_k = _operation(x, weight, flat)
        with below_autograd():
            outputs: tuple[Tensor, ...] = forward_operator(*inputs)
        out, unit, *rest = outputs
        saved = Saved(unit if unit_weight is None else unit_weight, *rest)
        arguments = (x, weight, constant_k if k is None else k, bias, beta, gamma, None, operation)
        SphereConvFunction.forward(ctx, *arguments, results=(out, saved))
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
        """Return the gradients of x, weight, k, bias, beta and gamma."""
        return (*SphereConvFunction.backward(ctx, grad)[:6], *(None,) * 9)


def _with_autograd(*inputs: Any) -> Any:
    if torch.is_grad_enabled() and any(value is not None and value.requires_grad for value in inputs[:6]):
        return _OperatorFunction.apply(*inputs)  # type: ignore[no-untyped-call]
    with below_autograd():
        return forward_operator(*inputs)


_library.impl("sphere_conv", _with_autograd, "Autograd")


# --- numbers of floating point operations --------------------------------------------------------------------------


@register_flop_formula(torch.ops.spherenet.sphere_conv)
def _flops(x: Any, weight: Any, *_: Any, out_shape: Any, **__: Any) -> int:
    return _product_flops(x, weight, out_shape[0])


@register_flop_formula(torch.ops.spherenet.sphere_conv_backward)
def _backward_flops(grad: Any, x: Any, weight: Any, *rest: Any, out_shape: Any, **_: Any) -> int:
    needs = rest[-1]
    return _product_flops(x, weight, grad) * (bool(needs[0]) + bool(needs[1]))


def _product_flops(x: Sequence[int], weight: Sequence[int], out: Sequence[int]) -> int:
    if len(weight) == 2:
        return 2 * x[0] * weight[0] * weight[1]
    return int(conv_flop_count(list(x), list(weight), list(out), transposed=False))
