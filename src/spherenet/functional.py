"""SphereConv and SphereLinear as functions of weight tensors, in the manner of `torch.nn.functional`.

    out = β·(g(θ(w, x)) + b) + γ                                            SPEC 1 (1), (2)

The weights are brought to unit length first, then one ordinary convolution gives ‖x‖·cos θ; dividing by
the patch norm leaves cos θ, and g follows elementwise. Inputs may be float16, bfloat16, float32 or float64;
norms and angles of half-precision inputs are computed in float32, and the result has the dtype that the
convolution of torch would return (under autocast too).

A patch whose squares overflow (‖x‖ > 1e21 in float32) is treated as a zero patch: cosine 0, gradient 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

from spherenet.kernels.sphere_conv import sphere_conv
from spherenet.ops import angles, composite
from spherenet.ops.angle_functions import (
    DEFAULT_K,
    AngleFunction,
    CosineAngle,
    LearnableSigmoidAngle,
    LinearAngle,
    SigmoidAngle,
    make_angle,
)
from spherenet.ops.angles import SMALLEST_K
from spherenet.ops.arguments import can_look_at_values, require_floating, require_k, require_one_of, require_positive
from spherenet.ops.geometry import per_dimension, same_as_numbers
from spherenet.ops.norms import DEFAULT_EPS, autocast_is_on, without_autocast, working_dtype

__all__ = ["backend", "sphere_conv1d", "sphere_conv2d", "sphere_conv3d", "sphere_linear"]

Rescale = Tensor | float | None
BACKENDS = ("fused", "reference")
_backend: ContextVar[str] = ContextVar("spherenet_backend", default="fused")


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Compute with the "fused" kernels (the default) or with the plain differentiable "reference" inside a `with`."""
    token = _backend.set(require_one_of("backend", name, BACKENDS))
    try:
        yield
    finally:
        _backend.reset(token)


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
    rows = input.reshape(-1, weight.shape[1])
    out = _evaluate(rows, weight, angle, bias, beta, gamma, (), (), (), 1, eps)
    return out.reshape(*input.shape[:-1], weight.shape[0])


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
    eps = require_positive("eps", eps)
    _check_dtypes(input, weight)
    _check_shapes(input, weight, groups, spatial_dims)
    stride, dilation = per_dimension(stride, spatial_dims), per_dimension(dilation, spatial_dims)
    input, padding = _resolve_padding(input, weight.shape[2:], stride, padding, dilation)
    batch = input if input.dim() == spatial_dims + 2 else input.unsqueeze(0)
    out = _evaluate(batch, weight, angle, bias, beta, gamma, stride, padding, dilation, groups, eps)
    return out if batch is input else out.squeeze(0)


def _evaluate(
    batch: Tensor,
    weight: Tensor,
    angle: _Angle,
    bias: Tensor | None,
    beta: Rescale,
    gamma: Rescale,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    eps: float,
) -> Tensor:
    """β·(g(θ) + bias) + γ for a checked batch [N, C, *spatial], by the kernels or the reference."""
    geometry = (stride, padding, dilation, groups)
    casts = autocast_is_on(batch) and batch.dtype != torch.float64
    dtype = torch.get_autocast_dtype(batch.device.type) if casts else batch.dtype
    with without_autocast(batch):
        unit_weight = composite.unit_weight(weight, eps).to(dtype)
        batch = batch.to(dtype)
        if angle.kernel is not None and _kernels_can(batch):
            k_of_filters = _k_of_filters(angle.k, weight)
            keep_cosine = dtype in (torch.float16, torch.bfloat16)
            out: Tensor = sphere_conv(batch, unit_weight, k_of_filters, *geometry, eps, angle.kernel, keep_cosine)[0]
        else:
            cosine = composite.cosines(batch, unit_weight, *geometry, eps)
            if angle.kernel is None:
                out = angle.function(cosine.movedim(1, -1)).movedim(-1, 1)
            else:
                out = composite.apply_angle(cosine, angle.kernel, angle.k)
        if bias is not None or beta is not None or gamma is not None:
            out = out.to(working_dtype(dtype)).movedim(1, -1)
            out = out if bias is None else out + bias
            out = out if beta is None else out * beta
            out = out if gamma is None else out + gamma
            out = out.movedim(-1, 1)
        return out.to(dtype)


def _k_of_filters(k: Tensor | float | None, weight: Tensor) -> Tensor | None:
    """k as the kernels take it: one number a filter."""
    if k is None or isinstance(k, Tensor):
        return k if k is None else k.expand(weight.shape[0])
    return torch.full((weight.shape[0],), k, dtype=working_dtype(weight.dtype), device=weight.device)


def _kernels_can(batch: Tensor) -> bool:
    """Whether this call can go to the kernels: eager, not mapped, not in forward mode, and not switched off.

    The compiler fuses the reference by itself when it sees it whole, so tracing takes that.
    """
    return (
        not torch.compiler.is_compiling()
        and _backend.get() == "fused"
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch.autograd.forward_ad._current_level < 0
        and batch.numel() > 0
        and batch.device.type != "meta"
    )


class _Angle(NamedTuple):
    """An angle function as a callable on cosines with filters last, and as the kernels know it."""

    function: Callable[[Tensor], Tensor]
    kernel: str | None = None
    k: Tensor | float | None = None


_KERNELS = {LinearAngle: "linear", CosineAngle: "cosine", SigmoidAngle: "sigmoid", LearnableSigmoidAngle: "sigmoid"}


def _resolve_angle(operator: str | AngleFunction, k: float | Tensor | None) -> _Angle:
    """The angle function that `operator` and `k` name."""
    if operator == "learnable":
        raise ValueError('operator must not be "learnable" in a function, which owns no k: pass "sigmoid" and k.')
    if operator == "sigmoid":
        checked_k = _check_k_tensor(k) if isinstance(k, Tensor) else require_k(DEFAULT_K if k is None else k)
        return _Angle(lambda cosine: angles.sigmoid(cosine, checked_k), "sigmoid", checked_k)
    if isinstance(k, Tensor):
        raise ValueError(f'k must be None unless operator is "sigmoid", got a tensor k with operator {operator!r}.')
    angle = make_angle(operator, k)
    # By exact type: a subclass may have changed the function.
    return _Angle(angle, _KERNELS.get(type(angle)), angle.k)


def _check_k_tensor(k: Tensor) -> Tensor:
    require_floating("k", k)
    # If values cannot be looked at, a wrong k shows as NaN.
    if can_look_at_values(k) and not bool(((k >= SMALLEST_K) & k.isfinite()).all()):
        raise ValueError(f"k must be finite and at least {SMALLEST_K:g} everywhere, got {k.detach()}.")
    return k.to(working_dtype(k.dtype))


def _check_dtypes(input: Tensor, weight: Tensor) -> None:
    require_floating("input", input)
    require_floating("weight", weight)
    if input.dtype != weight.dtype and not autocast_is_on(input):
        raise TypeError(f"input must have the dtype of weight, {weight.dtype}, got {input.dtype}.")


def _check_shapes(input: Tensor, weight: Tensor, groups: int, spatial_dims: int) -> None:
    if weight.dim() != spatial_dims + 2:
        raise ValueError(
            f"weight must have {spatial_dims + 2} dimensions [out, in/groups, *kernel], got shape {list(weight.shape)}."
        )
    if input.dim() not in (spatial_dims + 1, spatial_dims + 2):
        raise ValueError(
            f"input must have {spatial_dims + 1} (unbatched) or {spatial_dims + 2} (batched) dimensions, "
            f"got {input.dim()}: shape {list(input.shape)}."
        )
    channels = input.shape[-spatial_dims - 1]
    if channels != weight.shape[1] * groups:
        raise ValueError(
            f"input must have {weight.shape[1] * groups} channels for a weight of shape {list(weight.shape)} and "
            f"groups={groups}, got {channels}: shape {list(input.shape)}."
        )


def _resolve_padding(
    input: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: str | int | Sequence[int],
    dilation: Sequence[int],
) -> tuple[Tensor, tuple[int, ...]]:
    if not isinstance(padding, str):
        return input, per_dimension(padding, len(kernel_size))
    require_one_of("padding", padding, ("same", "valid"))
    if padding == "same" and any(s != 1 for s in stride):
        raise ValueError(f'padding must not be "same" for a strided convolution, got stride={tuple(stride)}.')
    return same_as_numbers(input, kernel_size, padding, dilation)
