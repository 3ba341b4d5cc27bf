"""SphereConv and SphereLinear as functions of weight tensors, like `torch.nn.functional`.

    out = β·(h(‖x‖)·g(θ(w, x)) + b) + γ                                     docs/concepts.md, Eq. 1 to 3, 10, 14, 15

Inputs may be float16, bfloat16, float32 or float64. Norms and angles of half-precision inputs are computed in float32,
and the result has the dtype that torch's own convolution would return, under autocast too. A patch whose squares
overflow (‖x‖ > 1e21 in float32) is treated as a zero patch: cosine 0, gradient 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from spherenet._util.validation import require_floating, require_integer, require_one_of, require_positive
from spherenet.angles import AngleFunction
from spherenet.arguments import require_center, require_per_filter, resolve_angle
from spherenet.kernels.dispatch import (
    backend,
    compiled_or_plain,
    implementation,
    needs_operators,
)
from spherenet.kernels.sphere_conv.autograd import SphereConvFunction, cached_unit_weight, forward, per_filter
from spherenet.magnitudes import Magnitude, make_magnitude
from spherenet.ops.geometry import Geometry, per_dimension, resolve_padding
from spherenet.ops.norms import DEFAULT_EPS, autocast_is_on, without_autocast
from spherenet.ops.quantized import dequantized
from spherenet.ops.sphere_conv import Affine, Operation, sphere_conv
from spherenet.transposed import sphere_conv_transpose1d, sphere_conv_transpose2d, sphere_conv_transpose3d

__all__ = [
    "backend",
    "sphere_conv1d",
    "sphere_conv2d",
    "sphere_conv3d",
    "sphere_conv_transpose1d",
    "sphere_conv_transpose2d",
    "sphere_conv_transpose3d",
    "sphere_layer",
    "sphere_linear",
]

Rescale = Tensor | float | None
Size = int | Sequence[int]


def sphere_conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: str | Size = 0,
    dilation: Size = 1,
    groups: int = 1,
    *,
    operator: str | AngleFunction = "cosine",
    k: float | Tensor | None = None,
    beta: Rescale = None,
    gamma: Rescale = None,
    eps: float = DEFAULT_EPS,
    center: str | None = None,
    magnitude: str | Magnitude | None = None,
) -> Tensor:
    """Apply a SphereConv to sequences: `torch.nn.functional.conv1d` with g(θ) in place of the inner product.

    Arguments are those of `sphere_conv2d`.

    Shape:
        input [N, C, L] or [C, L]; weight [O, C/groups, K].
    """
    geometry = _geometry(1, weight, stride, padding, dilation, groups)
    angle, k = resolve_angle(operator, k)
    affine, eps = Affine(bias, beta, gamma), require_positive("eps", eps)
    require_center(center, weight[0].numel() if len(weight) else 0)
    return sphere_layer(input, weight, affine, angle, geometry, eps, k, center, make_magnitude(magnitude))


def sphere_conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: str | Size = 0,
    dilation: Size = 1,
    groups: int = 1,
    *,
    operator: str | AngleFunction = "cosine",
    k: float | Tensor | None = None,
    beta: Rescale = None,
    gamma: Rescale = None,
    eps: float = DEFAULT_EPS,
    center: str | None = None,
    magnitude: str | Magnitude | None = None,
) -> Tensor:
    """Apply a SphereConv to images: `torch.nn.functional.conv2d` with g(θ) in place of the inner product.

    Args:
        input: Images [N, C, H, W] or [C, H, W].
        weight: Kernels [O, C/groups, KH, KW].
        bias: One number per filter [O].
        stride: As in `torch.nn.functional.conv2d`.
        padding: As in `torch.nn.functional.conv2d`.
        dilation: As in `torch.nn.functional.conv2d`.
        groups: As in `torch.nn.functional.conv2d`.
        operator: "linear", "cosine", "sigmoid", "square-cosine" or an `AngleFunction` object.
        k: Parameter of the sigmoid: a number, or a tensor [O] or [].
        beta: Factor β, a number or a tensor [O] or []; None for 1.
        gamma: Shift γ, a number or a tensor [O] or []; None for 0.
        eps: Number added under both square roots of the norms.
        center: None, "weight" to remove the mean of each kernel, or "patch" to remove that of each patch too (Eq. 14).
        magnitude: Magnitude function h: a name of `MAGNITUDES`, a `Magnitude` object, or None for 1 (Eq. 15).

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If a shape, operator, k or eps is not allowed.
    """
    geometry = _geometry(2, weight, stride, padding, dilation, groups)
    angle, k = resolve_angle(operator, k)
    affine, eps = Affine(bias, beta, gamma), require_positive("eps", eps)
    require_center(center, weight[0].numel() if len(weight) else 0)
    return sphere_layer(input, weight, affine, angle, geometry, eps, k, center, make_magnitude(magnitude))


def sphere_conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: str | Size = 0,
    dilation: Size = 1,
    groups: int = 1,
    *,
    operator: str | AngleFunction = "cosine",
    k: float | Tensor | None = None,
    beta: Rescale = None,
    gamma: Rescale = None,
    eps: float = DEFAULT_EPS,
    center: str | None = None,
    magnitude: str | Magnitude | None = None,
) -> Tensor:
    """Apply a SphereConv to volumes: `torch.nn.functional.conv3d` with g(θ) in place of the inner product.

    Arguments are those of `sphere_conv2d`.

    Shape:
        input [N, C, D, H, W] or [C, D, H, W]; weight [O, C/groups, KD, KH, KW].
    """
    geometry = _geometry(3, weight, stride, padding, dilation, groups)
    angle, k = resolve_angle(operator, k)
    affine, eps = Affine(bias, beta, gamma), require_positive("eps", eps)
    require_center(center, weight[0].numel() if len(weight) else 0)
    return sphere_layer(input, weight, affine, angle, geometry, eps, k, center, make_magnitude(magnitude))


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
    center: str | None = None,
    magnitude: str | Magnitude | None = None,
) -> Tensor:
    """Apply a fully connected layer on angles (Eq. 10): `torch.nn.functional.linear` with g(θ).

    Keyword arguments are those of `sphere_conv2d`.

    Shape:
        input [*, in]; weight [out, in] → [*, out].
    """
    if weight.dim() != 2:
        raise ValueError(f"weight must have 2 dimensions [out, in], got shape {list(weight.shape)}.")
    angle, k = resolve_angle(operator, k)
    affine, eps = Affine(bias, beta, gamma), require_positive("eps", eps)
    require_center(center, weight.shape[1])
    return sphere_layer(input, weight, affine, angle, Geometry(), eps, k, center, make_magnitude(magnitude))


def sphere_layer(
    input: Tensor,
    weight: Tensor,
    affine: Affine,
    angle: AngleFunction,
    geometry: Geometry,
    eps: float,
    k: Tensor | float | None = None,
    center: str | None = None,
    magnitude: Magnitude | None = None,
) -> Tensor:
    """Check the tensors of a sphere layer and return its output; the core of all functions and layers.

    Args:
        input: Batched or unbatched input.
        weight: Kernels [O, C/groups, *kernel], or [out, in] if the geometry is empty.
        affine: Bias, β and γ.
        angle: g.
        geometry: Geometry of the convolution, in any form that torch.nn accepts; empty for a fully connected layer.
        eps: Number > 0.
        k: Parameter of g; None for that of the object.
        center: None, "weight" or "patch".
        magnitude: h, or None for 1.
    """
    weight = dequantized(weight)
    if not isinstance(input, Tensor) or input.dtype != weight.dtype or not input.is_floating_point():
        _check_dtypes(input, weight)
    check = _check_shapes.__wrapped__ if torch.compiler.is_compiling() else _check_shapes
    check(input.shape, weight.shape, geometry.groups)
    k = angle.k if k is None else k
    radius = None if magnitude is None else magnitude.raw_radius
    if any(isinstance(value, Tensor) and value.shape != weight.shape[:1] for value in (*affine, k, radius)):
        require_per_filter(weight.shape[0], bias=affine.bias, beta=affine.beta, gamma=affine.gamma, k=k, radius=radius)
    dims = weight.dim()
    if dims == 2:
        rows = input if input.dim() == 2 else input.reshape(-1, weight.shape[1])
        out = _evaluate(rows, weight, affine, angle, geometry, eps, k, center, magnitude)
        return out if rows is input else out.reshape(*input.shape[:-1], weight.shape[0])
    if geometry.padding_mode != "zeros" or isinstance(geometry.padding, str):
        input, geometry = resolve_padding(input, geometry)
    batch = input if input.dim() == dims else input.unsqueeze(0)
    out = _evaluate(batch, weight, affine, angle, geometry, eps, k, center, magnitude)
    return out if batch is input else out.squeeze(0)


def _evaluate(
    batch: Tensor,
    weight: Tensor,
    affine: Affine,
    angle: AngleFunction,
    geometry: Geometry,
    eps: float,
    k: Tensor | float | None,
    center: str | None,
    magnitude: Magnitude | None,
) -> Tensor:
    """Return the output for a checked batch [N, C, *spatial] by the implementation that `dispatch` chooses."""
    if autocast_is_on(batch):
        if batch.dtype != torch.float64:
            batch = batch.to(torch.get_autocast_dtype(batch.device.type))
        with without_autocast(batch):
            return _evaluate(batch, weight, affine, angle, geometry, eps, k, center, magnitude)
    has_kernel = angle.kernel_id is not None and (magnitude is None or magnitude.kernel_id is not None)
    extended = center is not None or magnitude is not None
    radius = None if magnitude is None else magnitude.radius
    name = implementation(batch, weight, k, *affine, radius, has_kernel=has_kernel, native_only=extended)
    operation = Operation(angle, geometry, eps, name, False, center, magnitude)
    if name == "plain":
        return sphere_conv(batch, weight, k, affine, operation, radius)
    if name == "compiled":
        # The class instead of the object, so that layers with the same g share a compilation.
        operation = operation._replace(angle=type(angle))  # type: ignore[arg-type]
        return compiled_or_plain(sphere_conv, batch, weight, k, affine, operation, radius)
    bias, beta, gamma = affine
    has_affine = not (bias is None and beta is None and gamma is None)
    if has_affine:
        bias, beta, gamma = (per_filter(value, weight) for value in affine)
    arguments = (batch, weight, k, bias, beta, gamma, radius)
    learns = torch.is_grad_enabled() and (
        batch.requires_grad
        or weight.requires_grad
        or any(isinstance(value, Tensor) and value.requires_grad for value in arguments[2:])
    )
    # The cosine cannot be recovered from the output in these cases, see kernels/sphere_conv/autograd.py.
    if learns and (
        has_affine
        or magnitude is not None
        or not angle.is_recoverable
        or (batch.element_size() < 4 and not angle.is_identity)
    ):
        operation = operation._replace(save_cosine=True)
    if learns:
        out: Tensor = SphereConvFunction.apply(*arguments, operation)  # type: ignore[no-untyped-call]
        return out
    unit_weight = cached_unit_weight(weight, eps, batch.dtype, center is not None) if name == "native" else None
    if needs_operators(batch, weight):
        from spherenet.kernels.sphere_conv import operators

        return operators.forward(*arguments[:6], operation, unit_weight)[0]  # type: ignore[arg-type]
    return forward(*arguments[:6], operation, unit_weight, radius)[0]  # type: ignore[arg-type]


def _geometry(
    spatial_dims: int, weight: Tensor, stride: Size, padding: str | Size, dilation: Size, groups: int
) -> Geometry:
    """Check the arguments of a convolution that do not depend on its input."""
    require_floating("weight", weight)
    if weight.dim() != spatial_dims + 2:
        raise ValueError(
            f"weight must have {spatial_dims + 2} dimensions [out, in/groups, *kernel], got shape {list(weight.shape)}."
        )
    require_integer("groups", groups, minimum=1)
    stride, dilation = per_dimension(stride, spatial_dims), per_dimension(dilation, spatial_dims)
    if not isinstance(padding, str):
        padding = per_dimension(padding, spatial_dims)
    elif require_one_of("padding", padding, ("same", "valid")) == "same" and any(s != 1 for s in stride):
        raise ValueError(f'padding must not be "same" for a strided convolution, got stride={tuple(stride)}.')
    return Geometry(tuple(weight.shape[2:]), stride, padding, dilation, groups)


def _check_dtypes(input: Tensor, weight: Tensor) -> None:
    require_floating("input", input)
    require_floating("weight", weight)
    if input.dtype != weight.dtype and not autocast_is_on(input):
        raise TypeError(f"input must have the dtype of weight, {weight.dtype}, got {input.dtype}.")


@lru_cache(maxsize=1024)
def _check_shapes(input: Sequence[int], weight: Sequence[int], groups: int) -> None:
    """Check shapes, once per combination."""
    spatial_dims = len(weight) - 2
    if spatial_dims == 0:
        if len(input) < 1 or input[-1] != weight[1]:
            raise ValueError(
                f"input must have {weight[1]} features in its last dimension for a weight of shape {list(weight)}, "
                f"got shape {list(input)}."
            )
        return
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
