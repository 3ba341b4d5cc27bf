"""SphereConv as torch operators: `spherenet::sphere_conv` and `spherenet::sphere_conv_backward`.

They carry the functions of `kernels/sphere_conv.py` through torch's dispatcher, for tools that watch or trace every
operation: FLOP counters, FakeTensor, opcheck. Their arguments are flat because a schema knows no structures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import conv_flop_count, register_flop_formula

from spherenet.kernels import sphere_conv
from spherenet.kernels.dispatch import below_autograd
from spherenet.kernels.interface import Affine, Angle, is_rows
from spherenet.kernels.sphere_conv import Call, Kept, SphereConvFunction
from spherenet.ops.geometry import Geometry
from spherenet.ops.norms import working_dtype

__all__ = ["backward", "backward_operator", "forward", "forward_operator"]

_ARGUMENTS = "int[] stride, int[] padding, int[] dilation, int groups, float eps, str angle, float fixed_k"
_library: Any = torch.library.Library("spherenet", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "sphere_conv(Tensor x, Tensor weight, Tensor? k, Tensor? bias, Tensor? beta, Tensor? gamma, Tensor? unit_weight, "
    f"{_ARGUMENTS}, bool keep_cosine) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "sphere_conv_backward(Tensor grad, Tensor x, Tensor unit_weight, Tensor scale, Tensor? k, Tensor? bias, "
    "Tensor? beta, Tensor? gamma, Tensor known, Tensor inverse_norm, "
    f"{_ARGUMENTS}, bool known_is_cosine, ScalarType weight_dtype, bool[] needs) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
forward_operator = torch.ops.spherenet.sphere_conv.default
backward_operator = torch.ops.spherenet.sphere_conv_backward.default


# --- from structures to flat arguments and back ------------------------------------------------------------------


def _flat(call: Call) -> tuple[Any, ...]:
    name, k = call.angle
    return (*call.geometry, call.eps, name, k if isinstance(k, float) else 0.0)


def _call(unit_weight: Tensor | None, flat: Sequence[Any], keep_cosine: bool) -> Call:
    *geometry, groups, eps, name, fixed_k = flat
    stride, padding, dilation = map(tuple, geometry)
    angle = Angle(name, fixed_k if name == "sigmoid" else None)
    return Call(unit_weight, Geometry(stride, padding, dilation, groups), eps, angle, keep_cosine)


def forward(
    x: Tensor,
    weight: Tensor,
    k: Tensor | None,
    bias: Tensor | None,
    beta: Tensor | None,
    gamma: Tensor | None,
    call: Call,
) -> tuple[Tensor, Kept]:
    """`sphere_conv.forward` through the operator."""
    with below_autograd():
        out, *kept = forward_operator(x, weight, k, bias, beta, gamma, call.unit_weight, *_flat(call), call.keep_cosine)
    unit_weight, scale, inverse_norm, cosine = kept
    return out, Kept(unit_weight if call.unit_weight is None else call.unit_weight, scale, inverse_norm, cosine)


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
    """`sphere_conv.backward` through the operator."""
    found = backward_operator(
        grad, x, kept.unit_weight, kept.scale, k, *affine, known, kept.inverse_norm, *_flat(call), known_is_cosine,
        weight_dtype, list(needs),
    )  # fmt: skip
    return tuple(gradient if need else None for gradient, need in zip(found, needs, strict=True))


# --- implementations, and what they return for tensors without data -----------------------------------------------


def _forward(x: Tensor, weight: Tensor, k: Any, bias: Any, beta: Any, gamma: Any, unit_weight: Any, *rest: Any) -> Any:
    out, kept = sphere_conv.run_forward(x, weight, k, bias, beta, gamma, _call(unit_weight, rest[:-1], rest[-1]))
    # An operator may not return its inputs, and always returns tensors: what is not there is empty.
    unit = kept.unit_weight if unit_weight is None else None
    return out, *(x.new_empty(0) if value is None else value for value in (unit, *kept[1:]))


def _fake_forward(x: Tensor, weight: Tensor, k: Any, bias: Any, beta: Any, gamma: Any, given: Any, *rest: Any) -> Any:
    stride, padding, dilation, groups, *_, keep_cosine = rest
    unit = torch.empty_like(weight, dtype=x.dtype)
    out = sphere_conv._product(x, unit, Geometry(tuple(stride), tuple(padding), tuple(dilation), groups))
    work = working_dtype(x.dtype)
    inverse_norm = out.new_empty((out.shape[0], groups, *out.shape[2:]), dtype=work)
    if groups > 1 and out.dim() > 2 and is_rows(out):
        inverse_norm = inverse_norm.movedim(1, -1).contiguous().movedim(-1, 1)
    cosine = torch.empty_like(out, dtype=work) if keep_cosine else x.new_empty(0)
    if given is not None:
        return out, x.new_empty(0), x.new_empty(0), inverse_norm, cosine
    return out, unit, weight.new_empty(weight.shape[0], dtype=working_dtype(weight.dtype)), inverse_norm, cosine


def _backward(
    grad: Tensor, x: Tensor, unit_weight: Tensor, scale: Tensor, k: Any, bias: Any, beta: Any, gamma: Any,
    known: Tensor, inverse_norm: Tensor, *rest: Any,
) -> Any:  # fmt: skip
    *flat, known_is_cosine, weight_dtype, needs = rest
    kept = Kept(unit_weight, scale, inverse_norm, known)
    affine, call = Affine(bias, beta, gamma), _call(None, flat, False)
    found = sphere_conv.run_backward(grad, x, k, affine, kept, known, known_is_cosine, call, weight_dtype, needs)
    return tuple(x.new_empty(0) if gradient is None else gradient for gradient in found)


def _fake_backward(
    grad: Tensor, x: Tensor, unit_weight: Tensor, scale: Tensor, k: Any, bias: Any, beta: Any, gamma: Any,
    known: Tensor, inverse_norm: Tensor, *rest: Any,
) -> Any:  # fmt: skip
    weight_dtype, needs = rest[-2:]
    like = (torch.empty_like(x), torch.empty_like(unit_weight, dtype=weight_dtype))
    rest = tuple(x.new_empty(0) if value is None else torch.empty_like(value) for value in (k, bias, beta, gamma))
    return tuple(value if need else x.new_empty(0) for value, need in zip((*like, *rest), needs, strict=True))


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
        """Return what the operator returns; only its first output has a gradient."""
        tensors: Any = inputs[:6]
        call = _call(inputs[6], inputs[7:-1], inputs[-1])
        with below_autograd():
            outputs: tuple[Tensor, ...] = forward_operator(*inputs)
        unit_weight, scale, inverse_norm, cosine = outputs[1:]
        kept = Kept(unit_weight if call.unit_weight is None else call.unit_weight, scale, inverse_norm, cosine)
        SphereConvFunction.save(ctx, outputs[0], kept, *tensors, call)
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


# --- what counts floating point operations ----------------------------------------------------------------------


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
