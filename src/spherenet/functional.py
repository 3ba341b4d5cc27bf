"""SphereConv and SphereLinear as functions of weight tensors, in the manner of `torch.nn.functional`.

    out = β·(g(θ(w, x)) + b) + γ                                            SPEC 1 (1), (2)

The weights are brought to unit length first, then one ordinary convolution gives ‖x‖·cos θ; dividing by
the patch norm leaves cos θ, and g follows elementwise. Inputs may be float16, bfloat16, float32 or float64;
norms and angles of half-precision inputs are computed in float32, and the result has the dtype that the
convolution of torch would return (under autocast too).

A patch whose squares overflow (‖x‖ > 1e21 in float32) is treated as a zero patch: cosine 0, gradient 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spherenet import angles
from spherenet.angles import (
    DEFAULT_K,
    SMALLEST_K,
    AngleFunction,
    CosineAngle,
    LearnableSigmoidAngle,
    LinearAngle,
    SigmoidAngle,
    make_angle,
    require_k,
)
from spherenet.kernels.dispatch import backend, can_look_at_values, compiled_or_plain, implementation, needs_operators
from spherenet.kernels.interface import Affine, Angle
from spherenet.kernels.recurrent import recurrence
from spherenet.kernels.sphere_conv import Call, SphereConvFunction, forward, kept_unit_weight
from spherenet.ops import sphere_conv as composite
from spherenet.ops.geometry import Geometry, per_dimension, same_as_numbers
from spherenet.ops.norms import DEFAULT_EPS, autocast_is_on, without_autocast, working_dtype
from spherenet.validation import require_floating, require_one_of, require_positive

__all__ = ["backend", "sphere_conv1d", "sphere_conv2d", "sphere_conv3d", "sphere_linear"]

Rescale = Tensor | float | None
_States = tuple[Tensor, tuple[Tensor, ...]]
_FULLY_CONNECTED = Geometry()


def sphere_conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    operator: str | AngleFunction = "cosine",
    k: float | Tensor | None = None,
    beta: Rescale = None,
    gamma: Rescale = None,
    eps: float = DEFAULT_EPS,
) -> Tensor:
    """SphereConv over sequences: `torch.nn.functional.conv1d` with g(θ) in place of the inner product.

    Shapes: input [N, C, L] or [C, L]; weight [O, C/groups, K]; bias, beta, gamma and a tensor k [O] or [].
    Raises ValueError or TypeError for wrong rank, channels, dtype, operator, k or eps.
    """
    return _sphere_conv(1, input, weight, bias, stride, padding, dilation, groups, operator, k, beta, gamma, eps)


def sphere_conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    operator: str | AngleFunction = "cosine",
    k: float | Tensor | None = None,
    beta: Rescale = None,
    gamma: Rescale = None,
    eps: float = DEFAULT_EPS,
) -> Tensor:
    """SphereConv over images: `torch.nn.functional.conv2d` with g(θ) in place of the inner product.

    Shapes: input [N, C, H, W] or [C, H, W]; weight [O, C/groups, KH, KW]; bias, beta, gamma and a tensor k
    [O] or []. Raises ValueError or TypeError for wrong rank, channels, dtype, operator, k or eps.
    """
    return _sphere_conv(2, input, weight, bias, stride, padding, dilation, groups, operator, k, beta, gamma, eps)


def sphere_conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    operator: str | AngleFunction = "cosine",
    k: float | Tensor | None = None,
    beta: Rescale = None,
    gamma: Rescale = None,
    eps: float = DEFAULT_EPS,
) -> Tensor:
    """SphereConv over volumes: `torch.nn.functional.conv3d` with g(θ) in place of the inner product.

    Shapes: input [N, C, D, H, W] or [C, D, H, W]; weight [O, C/groups, KD, KH, KW]; bias, beta, gamma and a
    tensor k [O] or []. Raises ValueError or TypeError for wrong rank, channels, dtype, operator, k or eps.
    """
    return _sphere_conv(3, input, weight, bias, stride, padding, dilation, groups, operator, k, beta, gamma, eps)


def sphere_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    operator: str | AngleFunction = "cosine",
    k: float | Tensor | None = None,
    beta: Rescale = None,
    gamma: Rescale = None,
    eps: float = DEFAULT_EPS,
) -> Tensor:
    """SphereConv whose kernel covers its input (SPEC 1 (7)): `torch.nn.functional.linear` on angles.

    Shapes: input [*, in]; weight [out, in]; bias, beta, gamma and a tensor k [out] or [] → [*, out].
    Raises ValueError or TypeError for wrong rank, features, dtype, operator, k or eps.
    """
    angle = _resolve_angle(operator, k)
    eps = require_positive("eps", eps)
    _check_dtypes(input, weight)
    if weight.dim() != 2:
        raise ValueError(f"weight must have 2 dimensions [out, in], got shape {list(weight.shape)}.")
    if input.dim() < 1 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"input must have {weight.shape[1]} features in its last dimension for a weight of shape "
            f"{list(weight.shape)}, got shape {list(input.shape)}."
        )
    rows = input if input.dim() == 2 else input.reshape(-1, weight.shape[1])
    out = _evaluate(rows, weight, angle, bias, beta, gamma, _FULLY_CONNECTED, eps)
    return out if rows is input else out.reshape(*input.shape[:-1], weight.shape[0])


def _sphere_conv(
    spatial_dims: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int | Sequence[int],
    padding: str | int | Sequence[int],
    dilation: int | Sequence[int],
    groups: int,
    operator: str | AngleFunction,
    k: float | Tensor | None,
    beta: Rescale,
    gamma: Rescale,
    eps: float,
) -> Tensor:
    angle = _resolve_angle(operator, k)
    _check_dtypes(input, weight)
    check = _geometry.__wrapped__ if torch.compiler.is_compiling() else _geometry
    try:
        eps, geometry = check(spatial_dims, input.shape, weight.shape, stride, padding, dilation, groups, eps)
    except TypeError:  # lists cannot be remembered
        stride, dilation = per_dimension(stride, spatial_dims), per_dimension(dilation, spatial_dims)
        padding = padding if isinstance(padding, str) else per_dimension(padding, spatial_dims)
        eps, geometry = _geometry.__wrapped__(
            spatial_dims, input.shape, weight.shape, stride, padding, dilation, groups, eps
        )
    if isinstance(padding, str):
        input, numbers = same_as_numbers(input, weight.shape[2:], padding, geometry.dilation)
        geometry = geometry._replace(padding=numbers)
    batch = input if input.dim() == spatial_dims + 2 else input.unsqueeze(0)
    out = _evaluate(batch, weight, angle, bias, beta, gamma, geometry, eps)
    return out if batch is input else out.squeeze(0)


@lru_cache(maxsize=1024)
def _geometry(
    spatial_dims: int,
    input_shape: Sequence[int],
    weight_shape: Sequence[int],
    stride: int | Sequence[int],
    padding: str | int | Sequence[int],
    dilation: int | Sequence[int],
    groups: int,
    eps: float,
) -> tuple[float, Geometry]:
    """Check what does not depend on values, once per combination; a padding in words becomes zeros."""
    eps = require_positive("eps", eps)
    _check_shapes(input_shape, weight_shape, groups, spatial_dims)
    stride, dilation = per_dimension(stride, spatial_dims), per_dimension(dilation, spatial_dims)
    if isinstance(padding, str):
        require_one_of("padding", padding, ("same", "valid"))
        if padding == "same" and any(s != 1 for s in stride):
            raise ValueError(f'padding must not be "same" for a strided convolution, got stride={tuple(stride)}.')
        padding = 0
    return eps, Geometry(stride, per_dimension(padding, spatial_dims), dilation, groups)


def _evaluate(
    batch: Tensor,
    weight: Tensor,
    angle: _Angle,
    bias: Tensor | None,
    beta: Rescale,
    gamma: Rescale,
    geometry: Geometry,
    eps: float,
) -> Tensor:
    """β·(g(θ) + bias) + γ for a checked batch [N, C, *spatial], by the implementation that `dispatch` chooses."""
    if autocast_is_on(batch):
        if batch.dtype != torch.float64:
            batch = batch.to(torch.get_autocast_dtype(batch.device.type))
        with without_autocast(batch):
            return _evaluate(batch, weight, angle, bias, beta, gamma, geometry, eps)
    chosen = implementation(batch, has_kernel=angle.kernel is not None)
    if chosen == "plain":
        return _plain(*angle, batch, weight, bias, beta, gamma, geometry, eps)
    if chosen == "compiled":
        return compiled_or_plain(_plain, None, *angle[1:], batch, weight, bias, beta, gamma, geometry, eps)
    k = angle.k if isinstance(angle.k, Tensor) else None
    if bias is not None or beta is not None or gamma is not None:
        bias, beta, gamma = (_per_filter(value, weight) for value in (bias, beta, gamma))
    tensors = (batch, weight, k, bias, beta, gamma)
    has_affine = bias is not None or beta is not None or gamma is not None
    learns = torch.is_grad_enabled() and (
        batch.requires_grad
        or weight.requires_grad
        or any(value is not None and value.requires_grad for value in tensors[2:])
    )
    # What backward cannot recover from the output: see kernels/sphere_conv.py.
    keep_cosine = learns and (has_affine or (batch.element_size() < 4 and angle.kernel != "cosine"))
    unit_weight = None if learns or chosen != "native" else kept_unit_weight(weight, eps, batch.dtype)
    call = Call(unit_weight, geometry, eps, Angle(angle.kernel or "", angle.k), keep_cosine)
    if learns:
        out: Tensor = SphereConvFunction.apply(*tensors, call)  # type: ignore[no-untyped-call]
        return out
    return forward(*tensors, call)[0]


def _plain(
    function: Callable[[Tensor], Tensor] | None,
    kernel: str | None,
    k: Tensor | float | None,
    batch: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    beta: Rescale,
    gamma: Rescale,
    geometry: Geometry,
    eps: float,
) -> Tensor:
    """The formula from torch's own operations; function is used when the kernels do not know g."""
    unit_weight = composite.unit_weight(weight, eps).to(batch.dtype)
    cosine = composite.cosines(batch, unit_weight, *geometry, eps)
    if kernel is None:
        assert function is not None
        value = function(cosine.movedim(1, -1)).movedim(-1, 1)
    else:
        value = composite.apply_angle(cosine, kernel, k)
    return composite.apply_affine(value, bias, beta, gamma).to(batch.dtype)


def _per_filter(value: Rescale, weight: Tensor) -> Tensor | None:
    """A number per filter as the kernels take it: a tensor [filters]."""
    if value is None or isinstance(value, Tensor):
        return value if value is None or value.dim() == 1 else value.expand(weight.shape[0])
    return torch.full((weight.shape[0],), value, dtype=weight.dtype, device=weight.device)


class _Angle(NamedTuple):
    """An angle function as a callable on cosines with filters last, and as the kernels know it."""

    function: Callable[[Tensor], Tensor]
    kernel: str | None = None
    k: Tensor | float | None = None


_KERNELS = {LinearAngle: "linear", CosineAngle: "cosine", SigmoidAngle: "sigmoid", LearnableSigmoidAngle: "sigmoid"}


def _resolve_angle(operator: str | AngleFunction, k: float | Tensor | None) -> _Angle:
    """The angle function that `operator` and `k` name."""
    if k is None and isinstance(operator, AngleFunction):
        # By exact type: a subclass may have changed the function.
        return _Angle(operator, _KERNELS.get(type(operator)), operator.k)
    if operator == "learnable":
        raise ValueError('operator must not be "learnable" in a function, which owns no k: pass "sigmoid" and k.')
    if operator == "sigmoid":
        checked_k = _check_k_tensor(k) if isinstance(k, Tensor) else require_k(DEFAULT_K if k is None else k)
        return _Angle(lambda cosine: angles.sigmoid(cosine, checked_k), "sigmoid", checked_k)
    if isinstance(k, Tensor):
        raise ValueError(f'k must be None unless operator is "sigmoid", got a tensor k with operator {operator!r}.')
    angle = make_angle(operator, k)
    return _Angle(angle, _KERNELS.get(type(angle)), angle.k)


def _check_k_tensor(k: Tensor) -> Tensor:
    require_floating("k", k)
    # If values cannot be looked at, a wrong k shows as NaN.
    if can_look_at_values(k) and not bool(((k >= SMALLEST_K) & k.isfinite()).all()):
        raise ValueError(f"k must be finite and at least {SMALLEST_K:g} everywhere, got {k.detach()}.")
    return k.to(working_dtype(k.dtype))


def _check_dtypes(input: Tensor, weight: Tensor) -> None:
    if isinstance(input, Tensor) and input.dtype == weight.dtype and input.is_floating_point():
        return
    require_floating("input", input)
    require_floating("weight", weight)
    if input.dtype != weight.dtype and not autocast_is_on(input):
        raise TypeError(f"input must have the dtype of weight, {weight.dtype}, got {input.dtype}.")


def _check_shapes(input: Sequence[int], weight: Sequence[int], groups: int, spatial_dims: int) -> None:
    if len(weight) != spatial_dims + 2:
        raise ValueError(
            f"weight must have {spatial_dims + 2} dimensions [out, in/groups, *kernel], got shape {list(weight)}."
        )
    if len(input) not in (spatial_dims + 1, spatial_dims + 2):
        raise ValueError(
            f"input must have {spatial_dims + 1} (unbatched) or {spatial_dims + 2} (batched) dimensions, "
            f"got {len(input)}: shape {list(input)}."
        )
    channels = input[-spatial_dims - 1]
    if channels != weight[1] * groups:
        raise ValueError(
            f"input must have {weight[1] * groups} channels for a weight of shape {list(weight)} and "
            f"groups={groups}, got {channels}: shape {list(input)}."
        )


def fused_recurrence(from_input: Tensor, state: tuple[Tensor, ...], layer: Any) -> _States | None:
    """Run a recurrent cell over a sequence by the native kernels; None when they cannot serve this call.

    Args:
        from_input: what the input contributes to the gates, [L, N, gates·H].
        state: (h, c) of an LSTM or (h,) of a GRU, each [N, H].
        layer: the layer on h, with gates·H filters; a `SphereLinear`, unless somebody put another in its place.
    """
    if not isinstance(getattr(layer, "angle", None), AngleFunction) or _has_hooks(layer):
        return None
    angle = _resolve_angle(layer.angle, None)
    tensors = (from_input, *state, layer.weight)
    one_dtype = all(value.dtype == from_input.dtype for value in tensors) and from_input.element_size() >= 4
    if from_input.dim() != 3 or not one_dtype or autocast_is_on(from_input) or needs_operators(*tensors):
        return None
    if implementation(from_input, has_kernel=angle.kernel is not None) != "native":
        return None
    affine = Affine(*(_per_filter(value, layer.weight) for value in (layer.bias, layer.beta, layer.gamma)))
    k = angle.k if isinstance(angle.k, Tensor) else None
    return recurrence(from_input, state, layer.weight, k, affine, layer.eps, Angle(angle.kernel or "", angle.k))


def _has_hooks(layer: Any) -> bool:
    """Whether somebody listens to the calls of this layer, which the fused recurrence does not make."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)
