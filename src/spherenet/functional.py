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

import torch
from torch import Tensor
from torch.nn import functional as F

from spherenet.ops import angles
from spherenet.ops.angle_functions import DEFAULT_K, AngleFunction, make_angle
from spherenet.ops.angles import SMALLEST_K
from spherenet.ops.arguments import require_floating, require_k, require_one_of, require_positive
from spherenet.ops.geometry import per_dimension, same_as_numbers
from spherenet.ops.norms import (
    DEFAULT_EPS,
    autocast_is_on,
    direction,
    norm,
    patch_norm,
    without_autocast,
    working_dtype,
)

__all__ = ["sphere_conv1d", "sphere_conv2d", "sphere_conv3d", "sphere_linear"]

Rescale = Tensor | float | None
_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


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
    with without_autocast(input):
        unit_weight = direction(weight, 1, eps)
        length = norm(input, -1, eps)
    product = F.linear(input, unit_weight)
    return _apply_angle(product, length, -1, angle, bias, beta, gamma)


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
    with without_autocast(input):
        unit_weight = direction(weight, tuple(range(1, weight.dim())), eps)
        length = patch_norm(input, weight.shape[2:], stride, padding, dilation, groups, eps=eps)
    product = _CONV[spatial_dims](input, unit_weight, None, stride, padding, dilation, groups)
    filters_at = -spatial_dims - 1
    if groups > 1:  # one norm a group, for all filters of the group
        length = length.repeat_interleave(weight.shape[0] // groups, filters_at)
    return _apply_angle(product, length, filters_at, angle, bias, beta, gamma)


def _apply_angle(
    product: Tensor,
    length: Tensor,
    filters_at: int,
    angle: Callable[[Tensor], Tensor],
    bias: Tensor | None,
    beta: Rescale,
    gamma: Rescale,
) -> Tensor:
    """β·(g(product/length) + bias) + γ, computed in float32 at least, returned in the dtype of `product`."""
    with without_autocast(product):
        # An overflowed norm leaves no direction. Its product may be inf or NaN, which 0/inf must not meet,
        # neither here nor in backward: so the product is replaced, not the quotient.
        # (`where`, because masked_fill would give up channels-last.)
        wide = product.to(working_dtype(product.dtype))
        safe = torch.where(length.isinf(), torch.zeros((), dtype=wide.dtype, device=wide.device), wide)
        out = angle((safe / length).movedim(filters_at, -1))
        out = out if bias is None else out + bias
        out = out if beta is None else out * beta
        out = out if gamma is None else out + gamma
    return out.movedim(-1, filters_at).to(product.dtype)


def _resolve_angle(operator: str | AngleFunction, k: float | Tensor | None) -> Callable[[Tensor], Tensor]:
    """The function from cosines to outputs that `operator` and `k` name."""
    if operator == "learnable":
        raise ValueError('operator must not be "learnable" in a function, which owns no k: pass "sigmoid" and k.')
    if operator == "sigmoid":
        checked_k = _check_k_tensor(k) if isinstance(k, Tensor) else require_k(DEFAULT_K if k is None else k)
        return lambda cosine: angles.sigmoid(cosine, checked_k)
    if isinstance(k, Tensor):
        raise ValueError(f'k must be None unless operator is "sigmoid", got a tensor k with operator {operator!r}.')
    return make_angle(operator, k)


def _check_k_tensor(k: Tensor) -> Tensor:
    require_floating("k", k)
    # Tracing and vmap cannot look at values; there a wrong k shows as NaN.
    traced = torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(k)
    if not traced and not bool(((k >= SMALLEST_K) & k.isfinite()).all()):
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
