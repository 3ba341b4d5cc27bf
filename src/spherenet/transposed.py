"""Transposed SphereConv as functions of weight tensors, like `torch.nn.functional.conv_transpose2d`.

A transposed convolution is a convolution of its input, with zeros between the pixels (stride − 1) and around them, with
the flipped kernels. The transposed SphereConv is a SphereConv (docs/concepts.md, Eq. 1 to 3) of the same input:

- The patch of an output pixel contains the input values that contribute to this pixel; the other entries are zero.
- The kernel of filter o contains all entries of w[:, o] within its group, also those that meet a zero.

The zeros are never stored: torch's transposed convolution with unit kernels gives ‖x‖·cos θ, and that of Σx² over the
channels with ones gives the squared norms. All operations are differentiable. `functional` exports the functions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from spherenet._util.validation import require_floating, require_integer, require_positive
from spherenet.angles import AngleFunction
from spherenet.arguments import require_center, require_per_filter, resolve_angle
from spherenet.magnitudes import Magnitude, make_magnitude
from spherenet.ops.geometry import Geometry, per_dimension
from spherenet.ops.norms import DEFAULT_EPS, SHRINK, autocast_is_on, without_autocast, working_dtype
from spherenet.ops.sphere_conv import (
    Affine,
    Operation,
    apply_affine,
    apply_angle,
    center_weight,
    cosines_from_sums,
    magnitudes_from,
    repeat_per_filter,
    sum_per_group,
    unit_weight,
)

__all__ = ["sphere_conv_transpose1d", "sphere_conv_transpose2d", "sphere_conv_transpose3d", "transposed_layer"]

Rescale = Tensor | float | None
Size = int | Sequence[int]
_TRANSPOSED = {3: F.conv_transpose1d, 4: F.conv_transpose2d, 5: F.conv_transpose3d}


def sphere_conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    output_padding: Size = 0,
    groups: int = 1,
    dilation: Size = 1,
    *,
    operator: str | AngleFunction = "cosine",
    k: float | Tensor | None = None,
    beta: Rescale = None,
    gamma: Rescale = None,
    eps: float = DEFAULT_EPS,
    center: str | None = None,
    magnitude: str | Magnitude | None = None,
) -> Tensor:
    """Apply a transposed SphereConv to sequences: `torch.nn.functional.conv_transpose1d` with g(θ).

    Arguments are those of `sphere_conv_transpose2d`.

    Shape:
        input [N, C, L] or [C, L]; weight [C, O/groups, K].
    """
    geometry = _geometry(1, weight, stride, padding, dilation, groups)
    angle, k = resolve_angle(operator, k)
    affine, eps = Affine(bias, beta, gamma), require_positive("eps", eps)
    require_center(center, _kernel_entries(weight, groups))
    h = make_magnitude(magnitude)
    return transposed_layer(input, weight, affine, angle, geometry, per_dimension(output_padding, 1), eps, k, center, h)


def sphere_conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    output_padding: Size = 0,
    groups: int = 1,
    dilation: Size = 1,
    *,
    operator: str | AngleFunction = "cosine",
    k: float | Tensor | None = None,
    beta: Rescale = None,
    gamma: Rescale = None,
    eps: float = DEFAULT_EPS,
    center: str | None = None,
    magnitude: str | Magnitude | None = None,
) -> Tensor:
    """Apply a transposed SphereConv to images: `torch.nn.functional.conv_transpose2d` with g(θ).

    An output pixel that no input value reaches has a zero patch: its value is that of θ = π/2.

    Args:
        input: Images [N, C, H, W] or [C, H, W].
        weight: Kernels [C, O/groups, KH, KW].
        bias: One number per filter [O].
        stride: As in `torch.nn.functional.conv_transpose2d`.
        padding: As in `torch.nn.functional.conv_transpose2d`.
        output_padding: As in `torch.nn.functional.conv_transpose2d`.
        groups: As in `torch.nn.functional.conv_transpose2d`.
        dilation: As in `torch.nn.functional.conv_transpose2d`.
        operator: As in `sphere_conv2d`.
        k: As in `sphere_conv2d`.
        beta: As in `sphere_conv2d`.
        gamma: As in `sphere_conv2d`.
        eps: As in `sphere_conv2d`.
        center: As in `sphere_conv2d`. The mean of a patch includes its zeros.
        magnitude: As in `sphere_conv2d`.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If a shape, operator, k or eps is not allowed.
    """
    geometry = _geometry(2, weight, stride, padding, dilation, groups)
    angle, k = resolve_angle(operator, k)
    affine, eps = Affine(bias, beta, gamma), require_positive("eps", eps)
    require_center(center, _kernel_entries(weight, groups))
    h = make_magnitude(magnitude)
    return transposed_layer(input, weight, affine, angle, geometry, per_dimension(output_padding, 2), eps, k, center, h)


def sphere_conv_transpose3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    output_padding: Size = 0,
    groups: int = 1,
    dilation: Size = 1,
    *,
    operator: str | AngleFunction = "cosine",
    k: float | Tensor | None = None,
    beta: Rescale = None,
    gamma: Rescale = None,
    eps: float = DEFAULT_EPS,
    center: str | None = None,
    magnitude: str | Magnitude | None = None,
) -> Tensor:
    """Apply a transposed SphereConv to volumes: `torch.nn.functional.conv_transpose3d` with g(θ).

    Arguments are those of `sphere_conv_transpose2d`.

    Shape:
        input [N, C, D, H, W] or [C, D, H, W]; weight [C, O/groups, KD, KH, KW].
    """
    geometry = _geometry(3, weight, stride, padding, dilation, groups)
    angle, k = resolve_angle(operator, k)
    affine, eps = Affine(bias, beta, gamma), require_positive("eps", eps)
    require_center(center, _kernel_entries(weight, groups))
    h = make_magnitude(magnitude)
    return transposed_layer(input, weight, affine, angle, geometry, per_dimension(output_padding, 3), eps, k, center, h)


def transposed_layer(
    input: Tensor,
    weight: Tensor,
    affine: Affine,
    angle: AngleFunction,
    geometry: Geometry,
    output_padding: tuple[int, ...],
    eps: float,
    k: Tensor | float | None = None,
    center: str | None = None,
    magnitude: Magnitude | None = None,
) -> Tensor:
    """Check the tensors of a transposed sphere layer and return its output; the core of its functions and layers.

    Args:
        input: Batched or unbatched input.
        weight: Kernels [C, O/groups, *kernel].
        affine: Bias, β and γ.
        angle: g.
        geometry: Geometry of the transposed convolution, with padding in numbers.
        output_padding: Size added to one side of the output, per dimension.
        eps: Number > 0.
        k: Parameter of g; None for that of the object.
        center: None, "weight" or "patch".
        magnitude: h, or None for 1.
    """
    _check_tensors(input, weight)
    k = angle.k if k is None else k
    radius = None if magnitude is None else magnitude.raw_radius
    require_per_filter(weight.shape[1] * geometry.groups, **affine._asdict(), k=k, radius=radius)
    batch = input if input.dim() == weight.dim() else input.unsqueeze(0)
    if autocast_is_on(batch) and batch.dtype != torch.float64:
        batch = batch.to(torch.get_autocast_dtype(batch.device.type))
    operation = Operation(angle, geometry, eps, center=center, magnitude=magnitude)
    with without_autocast(batch):
        out = _sphere_conv_transpose(batch, weight, k, affine, operation, output_padding)
    return out if input.dim() == weight.dim() else out.squeeze(0)


def _sphere_conv_transpose(
    x: Tensor,
    weight: Tensor,
    k: Tensor | float | None,
    affine: Affine,
    operation: Operation,
    output_padding: tuple[int, ...],
) -> Tensor:
    """Return β·(h·g(θ) + b) + γ for a batch x [N, C, *spatial] and weights [C, O/groups, *kernel]."""
    angle, geometry, eps, _, _, center, magnitude = operation
    groups, dtype = geometry.groups, working_dtype(x.dtype)
    kernels = _swap_channels(weight, groups)
    if center is not None:
        kernels = center_weight(kernels)
    unit = _swap_channels(unit_weight(kernels, eps).to(x.dtype), groups)
    filters = kernels.shape[0]
    product = _transpose(x, unit, geometry, output_padding).to(dtype)
    if center == "patch":
        wide = x if x.device.type == "mps" else x.double()
        squares = _sum_over_patches(wide * wide, geometry, output_padding).clamp_min(0)
        sums = _sum_over_patches(wide, geometry, output_padding)
        cosine, norm = cosines_from_sums(product, squares, sums, kernels[0].numel(), eps)
    else:
        shrunk = x.to(dtype) * SHRINK
        squares = _sum_over_patches(shrunk * shrunk, geometry, output_padding).clamp_min(0)
        norm = (squares + eps * SHRINK**2).sqrt() / SHRINK
        of_filters = repeat_per_filter(norm, filters)
        # If a norm overflows, the product may be inf too, and the gradient must not contain inf/inf. The derivative of
        # a quotient has no power of the norm, which would overflow before the norm does.
        cosine = torch.where(of_filters.isinf(), 0, product) / of_filters
    value = apply_angle(cosine, angle, k)
    if magnitude is not None:
        value = value * magnitudes_from(norm, magnitude, None, filters)
    return apply_affine(value, affine).to(x.dtype)


def _transpose(x: Tensor, weight: Tensor, geometry: Geometry, output_padding: tuple[int, ...]) -> Tensor:
    """Return torch's transposed convolution of x with a weight [C, O/groups, *kernel]."""
    _, stride, padding, dilation, groups, _ = geometry
    return _TRANSPOSED[x.dim()](x, weight, None, stride, padding, output_padding, groups, dilation)  # type: ignore[arg-type]


def _sum_over_patches(maps: Tensor, geometry: Geometry, output_padding: tuple[int, ...]) -> Tensor:
    """Return the sum of maps [N, C, *spatial] over the patch of each output pixel, [N, groups, *out]."""
    per_group = sum_per_group(maps, geometry.groups)
    box = maps.new_ones(geometry.groups, 1, *geometry.kernel_size)
    return _transpose(per_group, box, geometry, output_padding)


def _swap_channels(weight: Tensor, groups: int) -> Tensor:
    """Return a weight [C, O/groups, *kernel] as [O, C/groups, *kernel] and the other way around."""
    return torch.unflatten(weight, 0, (groups, -1)).transpose(1, 2).flatten(0, 1)


def _kernel_entries(weight: Tensor, groups: int) -> int:
    """Return the number of entries of the kernel of one filter."""
    return weight.shape[0] // groups * weight.shape[2:].numel()


def _geometry(
    spatial_dims: int, weight: Tensor, stride: Size, padding: str | Size, dilation: Size, groups: int
) -> Geometry:
    """Check the arguments of a transposed convolution that do not depend on its input."""
    require_floating("weight", weight)
    if weight.dim() != spatial_dims + 2:
        raise ValueError(
            f"weight must have {spatial_dims + 2} dimensions [in, out/groups, *kernel], got shape {list(weight.shape)}."
        )
    if weight.shape[0] % require_integer("groups", groups, minimum=1):
        raise ValueError(f"groups must divide the {weight.shape[0]} input channels of weight, got {groups!r}.")
    if isinstance(padding, str):
        raise TypeError(f"padding must be a number or a sequence of numbers, got {padding!r}.")
    stride, padding = per_dimension(stride, spatial_dims), per_dimension(padding, spatial_dims)
    return Geometry(tuple(weight.shape[2:]), stride, padding, per_dimension(dilation, spatial_dims), groups)


def _check_tensors(input: Tensor, weight: Tensor) -> None:
    require_floating("input", input)
    require_floating("weight", weight)
    if input.dtype != weight.dtype and not autocast_is_on(input):
        raise TypeError(f"input must have the dtype of weight, {weight.dtype}, got {input.dtype}.")
    dims = weight.dim()
    if input.dim() not in (dims - 1, dims):
        raise ValueError(
            f"input must have {dims - 1} (unbatched) or {dims} (batched) dimensions, got {input.dim()}: "
            f"shape {list(input.shape)}."
        )
    channels = input.shape[1 - dims]
    if channels != weight.shape[0]:
        raise ValueError(
            f"input must have {weight.shape[0]} channels for a weight of shape {list(weight.shape)}, got {channels}: "
            f"shape {list(input.shape)}."
        )
