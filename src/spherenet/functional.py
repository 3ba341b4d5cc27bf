"""SphereConv and SphereLinear as functions of weight tensors, like `torch.nn.functional`.

    out = β·(h(‖x‖)·g(θ(w, x)) + b) + γ                                     docs/concepts.md, Eq. 1 to 3, 10, 14, 15

Inputs may be float16, bfloat16, float32 or float64. Norms and angles of half-precision inputs are computed in float32,
and the result has the dtype that torch's own convolution would return, under autocast too. A patch whose squares
overflow (‖x‖ > 1e21 in float32) is treated as a zero patch: cosine 0, gradient 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from spherenet._util.validation import (
    OPTION_DEFAULTS,
    require_floating,
    require_integer,
    require_number,
    require_one_of,
    require_positive,
    shown,
    suggest_options,
)
from spherenet.angles import ANGLES, AngleFunction, make_angle
from spherenet.errors import InvalidArgument, InvalidArgumentType
from spherenet.kernels.dispatch import can_read_values, sphere_layer
from spherenet.kernels.settings import backend, set_backend
from spherenet.magnitudes import Magnitude, make_magnitude
from spherenet.ops.geometry import Geometry
from spherenet.ops.norms import DEFAULT_EPS, working_dtype
from spherenet.ops.operation import Operation, Parameters, require_center

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "backend",
    "set_backend",
    "sphere_conv1d",
    "sphere_conv2d",
    "sphere_conv3d",
    "sphere_conv_transpose1d",
    "sphere_conv_transpose2d",
    "sphere_conv_transpose3d",
    "sphere_linear",
]

Rescale = Tensor | float | None
Size = int | Sequence[int]


class FunctionOptions(NamedTuple):
    """Options of all functions; `sphere_conv2d` documents them. `FunctionKeywords` has the same names."""

    operator: str | AngleFunction = "cosine"
    k: float | Tensor | None = None
    beta: Rescale = None
    gamma: Rescale = None
    eps: float = DEFAULT_EPS
    center: str | None = None
    magnitude: str | Magnitude | None = None


class FunctionKeywords(TypedDict, total=False):
    """Keyword arguments of all functions; `sphere_conv2d` documents them."""

    operator: str | AngleFunction
    k: float | Tensor | None
    beta: Rescale
    gamma: Rescale
    eps: float
    center: str | None
    magnitude: str | Magnitude | None


OPTION_DEFAULTS[FunctionKeywords] = FunctionOptions._field_defaults


@suggest_options
def sphere_conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: str | Size = 0,
    dilation: Size = 1,
    groups: int = 1,
    **options: Unpack[FunctionKeywords],
) -> Tensor:
    """Apply a SphereConv to sequences: `torch.nn.functional.conv1d` with g(θ) in place of the inner product.

    Arguments are those of `sphere_conv2d`.

    Shape:
        input [N, C, L] or [C, L]; weight [O, C/groups, K].
    """
    geometry = _geometry(1, weight, (stride, padding, dilation, groups))
    return sphere_layer(input, weight, *_resolve(weight, bias, geometry, FunctionOptions(**options)))


@suggest_options
def sphere_conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: str | Size = 0,
    dilation: Size = 1,
    groups: int = 1,
    **options: Unpack[FunctionKeywords],
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
        operator: A name of `spherenet.angles.OPERATORS` whose parameter is not learned, or an `AngleFunction` object.
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
    geometry = _geometry(2, weight, (stride, padding, dilation, groups))
    return sphere_layer(input, weight, *_resolve(weight, bias, geometry, FunctionOptions(**options)))


@suggest_options
def sphere_conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: str | Size = 0,
    dilation: Size = 1,
    groups: int = 1,
    **options: Unpack[FunctionKeywords],
) -> Tensor:
    """Apply a SphereConv to volumes: `torch.nn.functional.conv3d` with g(θ) in place of the inner product.

    Arguments are those of `sphere_conv2d`.

    Shape:
        input [N, C, D, H, W] or [C, D, H, W]; weight [O, C/groups, KD, KH, KW].
    """
    geometry = _geometry(3, weight, (stride, padding, dilation, groups))
    return sphere_layer(input, weight, *_resolve(weight, bias, geometry, FunctionOptions(**options)))


@suggest_options
def sphere_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    **options: Unpack[FunctionKeywords],
) -> Tensor:
    """Apply a fully connected layer on angles (Eq. 10): `torch.nn.functional.linear` with g(θ).

    Keyword arguments are those of `sphere_conv2d`.

    Shape:
        input [*, in]; weight [out, in] → [*, out].
    """
    require_floating("weight", weight)
    if weight.dim() != 2:
        raise InvalidArgument("weight", f"must have 2 dimensions [out, in], got shape {list(weight.shape)}.")
    return sphere_layer(input, weight, *_resolve(weight, bias, Geometry(), FunctionOptions(**options)))


@suggest_options
def sphere_conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    output_padding: Size = 0,
    groups: int = 1,
    dilation: Size = 1,
    **options: Unpack[FunctionKeywords],
) -> Tensor:
    """Apply a transposed SphereConv to sequences: `torch.nn.functional.conv_transpose1d` with g(θ).

    Arguments are those of `sphere_conv_transpose2d`.

    Shape:
        input [N, C, L] or [C, L]; weight [C, O/groups, K].
    """
    geometry = _transposed_geometry(1, weight, (stride, padding, dilation, groups), output_padding)
    return sphere_layer(input, weight, *_resolve(weight, bias, geometry, FunctionOptions(**options)))


@suggest_options
def sphere_conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    output_padding: Size = 0,
    groups: int = 1,
    dilation: Size = 1,
    **options: Unpack[FunctionKeywords],
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
    geometry = _transposed_geometry(2, weight, (stride, padding, dilation, groups), output_padding)
    return sphere_layer(input, weight, *_resolve(weight, bias, geometry, FunctionOptions(**options)))


@suggest_options
def sphere_conv_transpose3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    output_padding: Size = 0,
    groups: int = 1,
    dilation: Size = 1,
    **options: Unpack[FunctionKeywords],
) -> Tensor:
    """Apply a transposed SphereConv to volumes: `torch.nn.functional.conv_transpose3d` with g(θ).

    Arguments are those of `sphere_conv_transpose2d`.

    Shape:
        input [N, C, D, H, W] or [C, D, H, W]; weight [C, O/groups, KD, KH, KW].
    """
    geometry = _transposed_geometry(3, weight, (stride, padding, dilation, groups), output_padding)
    return sphere_layer(input, weight, *_resolve(weight, bias, geometry, FunctionOptions(**options)))


Convolution = tuple[Size, str | Size, Size, int]
"""Stride, padding, dilation and groups."""


def _resolve(
    weight: Tensor, bias: Tensor | None, geometry: Geometry, options: FunctionOptions
) -> tuple[Operation, Parameters]:
    """Check the options of a function and return what it computes, and its tensors with the k of the operator."""
    operator, k, beta, gamma, eps, center, magnitude = options
    if bias is not None:
        require_floating("bias", bias)
    for name, value in (("beta", beta), ("gamma", gamma)):
        if value is not None and not isinstance(value, Tensor):
            require_number(name, value)
    angle, k = _resolve_angle(operator, k)
    filters = geometry.filters(weight)
    require_center(center, weight.numel() // filters if filters else 0)
    operation = Operation(angle, geometry, require_positive("eps", eps), center, make_magnitude(magnitude))
    return operation, Parameters(k, bias, beta, gamma)


_NAMED = {name: make_angle(name) for name, angle_class in ANGLES.items() if not angle_class.is_learned}


def _resolve_angle(
    operator: str | AngleFunction, k: float | Tensor | None
) -> tuple[AngleFunction, Tensor | float | None]:
    """Return the angle function and its parameter for the arguments `operator` and `k`."""
    if not isinstance(operator, str) or operator not in ANGLES:
        angle = make_angle(operator, k)  # type: ignore[arg-type]
        return angle, angle.k
    angle_class = ANGLES[operator]
    if angle_class.is_learned:
        instead = '"sigmoid" and k' if angle_class.has_k() else f"a {angle_class.__name__} object"
        owned = "k" if angle_class.has_k() else "parameters"
        raise InvalidArgument(
            "operator", f'must not be "{operator}" in a function, which owns no {owned}: pass {instead}.'
        )
    angle = _NAMED[operator]
    if k is None:
        return angle, angle.k
    parameter = angle.parameter
    if parameter is None or not angle_class.has_k():
        raise InvalidArgument("k", f"must be None for the {operator} operator, got {k!r}.")
    if not isinstance(k, Tensor):
        return angle, parameter.require(k)
    require_floating("k", k)
    # If values cannot be read, a wrong k shows as NaN.
    if can_read_values(k) and not bool(((k >= parameter.smallest) & k.isfinite()).all()):
        raise InvalidArgument("k", f"must be finite and at least {parameter.smallest:g} everywhere, got {k.detach()}.")
    return angle, k.to(working_dtype(k.dtype))


def _geometry(spatial_dims: int, weight: Tensor, convolution: Convolution) -> Geometry:
    """Check the arguments of a convolution that do not depend on its input."""
    stride, padding, dilation, groups = convolution
    require_floating("weight", weight)
    if weight.dim() != spatial_dims + 2:
        raise InvalidArgument(
            "weight",
            f"must have {spatial_dims + 2} dimensions [out, in/groups, *kernel], got shape {list(weight.shape)}.",
        )
    require_integer("groups", groups, minimum=1)
    stride = _sizes("stride", stride, spatial_dims, minimum=1)
    dilation = _sizes("dilation", dilation, spatial_dims, minimum=1)
    if not isinstance(padding, str):
        padding = _sizes("padding", padding, spatial_dims)
    elif require_one_of("padding", padding, ("same", "valid")) == "same" and any(s != 1 for s in stride):
        raise InvalidArgument("padding", f'must not be "same" for a strided convolution, got stride={tuple(stride)}.')
    return Geometry(tuple(weight.shape[2:]), stride, padding, dilation, groups)


def _transposed_geometry(spatial_dims: int, weight: Tensor, convolution: Convolution, output_padding: Size) -> Geometry:
    """Check the arguments of a transposed convolution that do not depend on its input."""
    stride, padding, dilation, groups = convolution
    require_floating("weight", weight)
    if weight.dim() != spatial_dims + 2:
        raise InvalidArgument(
            "weight",
            f"must have {spatial_dims + 2} dimensions [in, out/groups, *kernel], got shape {list(weight.shape)}.",
        )
    if weight.shape[0] % require_integer("groups", groups, minimum=1):
        raise InvalidArgument("groups", f"must divide the {weight.shape[0]} input channels of weight, got {groups!r}.")
    if isinstance(padding, str):
        raise InvalidArgumentType("padding", f"must be a number or a sequence of numbers, got {padding!r}.")
    stride = _sizes("stride", stride, spatial_dims, minimum=1)
    padding, dilation = _sizes("padding", padding, spatial_dims), _sizes("dilation", dilation, spatial_dims, minimum=1)
    output_padding = _sizes("output_padding", output_padding, spatial_dims)
    return Geometry(tuple(weight.shape[2:]), stride, padding, dilation, groups, "zeros", True, output_padding)


def _sizes(name: str, value: Any, spatial_dims: int, minimum: int = 0) -> tuple[int, ...]:
    """Return one number per dimension from a number or a sequence of 1 or `spatial_dims` numbers."""
    values = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    sizes = values * spatial_dims if len(values) == 1 else values
    are_integers = all(isinstance(n, (Integral, torch.SymInt)) and not isinstance(n, bool) for n in sizes)
    if len(sizes) != spatial_dims or not are_integers:
        raise InvalidArgumentType(
            name, f"must be an integer or a sequence of {spatial_dims} integers, got {shown(value)}."
        )
    if any(n < minimum for n in sizes):
        raise InvalidArgument(name, f"must be at least {minimum} in every dimension, got {value!r}.")
    return sizes
