"""The kernels on CPUs: functions of a C++ library, called through ctypes with raw pointers.

The library uses as many threads as torch and shares torch's thread pool. Tensors are allocated on the CPU by name: the
default device of torch may be another one.
"""

from __future__ import annotations

import ctypes
import threading
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spherenet.angles import ANGLES
from spherenet.kernels.backends import Backend, Case, Gradients, Pass, Saved
from spherenet.kernels.library import (
    AngleStruct,
    BackwardStruct,
    GeometryStruct,
    dense_like,
    layout_of,
    load,
)
from spherenet.magnitudes import Magnitude
from spherenet.ops.geometry import Geometry, convolve, convolve_backward
from spherenet.ops.norms import working_dtype
from spherenet.ops.operation import Operation, Parameters

__all__ = [
    "BACKEND",
    "TYPES",
    "AngleArguments",
    "NativeBackend",
    "addresses",
    "angle_arguments",
    "apply",
    "correct",
    "differentiate",
    "release_scratch",
    "scratch",
    "unit_weight",
    "unit_weight_backward",
]

_SAVED_OUTPUT, _SAVED_COSINE, _SAVED_PRODUCT = range(3)

TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
"""Numbers of the dtypes in csrc/api.h."""

_WORK = {dtype: working_dtype(dtype) for dtype in TYPES}


# --- arguments -------------------------------------------------------------------------------------------------


ANGLE_NUMBERS = {angle.kernel_id: angle.kernel_number for angle in ANGLES.values()}
"""Numbers of the angle functions in csrc/api.h, by `AngleFunction.kernel_id`."""


def addresses(*tensors: Tensor | None) -> list[int | None]:
    """Return the addresses of the memory of tensors."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


class AngleArguments:
    """Angle and magnitude function and affine map as the library takes them; keeps the tensors alive."""

    def __init__(self, kernel_id: str, magnitude: Magnitude | None, parameters: Parameters, dtype: torch.dtype) -> None:
        self.tensors: list[Any] = [
            value
            if value is None or (isinstance(value, Tensor) and value.dtype == dtype and value.is_contiguous())
            else value.detach().to(dtype).contiguous()
            if isinstance(value, Tensor)
            else torch.tensor([value], dtype=dtype, device="cpu")
            for value in parameters
        ]
        k, radius = self.tensors[0], self.tensors[4]
        *pointers, radius_pointer = addresses(*self.tensors)
        struct = AngleStruct(ANGLE_NUMBERS[kernel_id], 0 if k is None else k.numel(), *pointers)
        if magnitude is not None:
            struct.magnitude, struct.radius = magnitude.kernel_id, radius_pointer
            struct.radius_count = 0 if radius is None else radius.numel()
            struct.alpha, struct.beta = magnitude.alpha, magnitude.beta
        self.struct = ctypes.byref(struct)


@lru_cache(maxsize=256)
def _constant_angle(kernel_id: str, k: float | None, dtype: torch.dtype) -> AngleArguments:
    return AngleArguments(kernel_id, None, Parameters(k), dtype)


def angle_arguments(operation: Operation, parameters: Parameters, dtype: torch.dtype) -> AngleArguments:
    """Return the arguments of a layer, the same object for layers whose only parameter is a number."""
    kernel_id: Any = operation.angle.kernel_id
    k, bias, beta, gamma, _ = parameters
    if operation.magnitude is None and bias is beta is gamma is None and not isinstance(k, Tensor):
        return _constant_angle(kernel_id, k, dtype)
    return AngleArguments(kernel_id, operation.magnitude, parameters, dtype)


class _Plan(NamedTuple):
    """Arguments of calls with the same shapes: the geometry, and shape and strides of the maps of x and output."""

    struct: Any
    x_map: tuple[tuple[int, ...], tuple[int, ...]]
    out_map: tuple[tuple[int, ...], tuple[int, ...]]


@lru_cache(maxsize=1024)
def _plan(
    x_shape: tuple[int, ...], x_rows: bool, out_shape: tuple[int, ...], out_rows: bool, geometry: Geometry
) -> _Plan:
    maps = []
    for shape in (x_shape, out_shape):
        size = (shape[0], geometry.groups, *shape[2:])
        like = torch.empty(size, device="meta")
        if out_rows and len(size) > 2:
            like = like.movedim(1, -1).contiguous().movedim(-1, 1)
        maps.append((size, like.stride()))
    if len(x_shape) == 2:  # the rows of a fully connected layer are the pixels of one image
        rows, ones, zeros = (1, 1, x_shape[0]), (1, 1, 1), (0, 0, 0)
        struct = GeometryStruct(1, x_shape[1], out_shape[1], 1, rows, rows, ones, ones, zeros, ones, 1, 1)
        return _Plan(ctypes.byref(struct), *maps)
    missing = 5 - len(x_shape)
    kernel_size, stride, padding, dilation, groups = geometry[:5]
    sizes = (x_shape[2:], out_shape[2:], kernel_size, stride, padding, dilation)
    fills = (1, 1, 1, 1, 0, 1)
    in_three = [(fill,) * missing + tuple(size) for size, fill in zip(sizes, fills, strict=True)]
    struct = GeometryStruct(x_shape[0], x_shape[1], out_shape[1], groups, *in_three, x_rows, out_rows)
    return _Plan(ctypes.byref(struct), *maps)


# --- scratch memory ----------------------------------------------------------------------------------------------

SCRATCH_LIMIT = 256 << 20
"""Bytes of scratch memory that a thread keeps at most."""

_thread = threading.local()


def release_scratch() -> None:
    """Return this thread's scratch memory to the system."""
    _thread.scratch = None


def scratch(size: int) -> Tensor:
    """Return uninitialized bytes that are valid until the next call in this thread.

    The C library returns large blocks to the system when they are freed, and the system clears every page again at the
    next allocation, which takes longer for a map of 32 MB than the pass that fills it. So each thread keeps one block.
    """
    block: Tensor | None = getattr(_thread, "scratch", None)
    if block is None or block.numel() < size:
        _thread.scratch = block = None  # free the smaller one first
        _thread.scratch = block = torch.empty(size, dtype=torch.uint8, device="cpu")
    return block[:size]


# --- the passes around the convolution ---------------------------------------------------------------------------


def unit_weight(weight: Tensor, operation: Operation, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return weight/‖w‖ per filter in `dtype`, and 1/‖w‖ [filters]; centered layers remove each kernel's mean first."""
    if layout_of(weight.shape, weight.stride()) == "other":
        weight = weight.contiguous()
    # The strides themselves, not a memory format: autograd expects gradients with the strides of the weight.
    unit = torch.empty_strided(weight.shape, weight.stride(), dtype=dtype, device="cpu")
    filters = weight.shape[0]
    scale = torch.empty(filters, dtype=_WORK[weight.dtype], device="cpu")
    load().unit_weight(
        weight.data_ptr(),
        unit.data_ptr(),
        scale.data_ptr(),
        filters,
        weight.numel() // max(filters, 1),
        operation.eps,
        operation.center is not None,
        TYPES[weight.dtype],
        TYPES[dtype],
        torch.get_num_threads(),
    )
    return unit, scale


def unit_weight_backward(grad_unit: Tensor, saved: Saved, operation: Operation, dtype: torch.dtype) -> Tensor:
    """Return the gradient of the weight in `dtype` from that of the unit weight: (I − uuᵀ)·grad/‖w‖."""
    unit = saved.unit_weight
    if grad_unit.stride() != unit.stride():
        grad_unit = dense_like(grad_unit, unit)
    grad_weight = torch.empty_strided(unit.shape, unit.stride(), dtype=dtype, device="cpu")
    filters = unit.shape[0]
    load().unit_weight_backward(
        grad_unit.data_ptr(),
        unit.data_ptr(),
        saved.scale.data_ptr(),
        grad_weight.data_ptr(),
        filters,
        unit.numel() // max(filters, 1),
        operation.center is not None,
        TYPES[dtype],
        TYPES[unit.dtype],
        torch.get_num_threads(),
    )
    return grad_weight


def apply(
    product: Tensor, x: Tensor, operation: Operation, parameters: Parameters, save_cosine: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Convert the output of the convolution to that of the layer, in place if nothing is saved for backward.

    Returns:
        The output, 1/‖patch‖ [N, groups, *out], the map that backward needs (the cosines if save_cosine, in half
        precision the output of the convolution, which is half as large; otherwise the output), and the means of
        centered patches or None.
    """
    geometry = operation.geometry
    x_layout, layout = layout_of(x.shape, x.stride()), layout_of(product.shape, product.stride())
    if layout == "other":
        product, layout = product.contiguous(), "planes"
    if x_layout == "other" or (geometry.groups > 1 and x_layout != layout):
        x, x_layout = dense_like(x, product), layout
    plan = _plan(x.shape, x_layout == "rows", product.shape, layout == "rows", geometry)
    dtype = x.dtype
    work = _WORK[dtype]
    inverse_norm = torch.empty_strided(*plan.out_map, dtype=work, device="cpu")
    out = saved_map = product
    cosine = mean = None
    if save_cosine and work == dtype:
        saved_map = cosine = torch.empty_like(product)
    elif save_cosine:
        out = torch.empty_like(product)
    if operation.center == "patch":
        mean = torch.empty_strided(*plan.out_map, dtype=work, device="cpu")
    arguments = angle_arguments(operation, parameters, work)
    load().forward(
        plan.struct,
        arguments.struct,
        *addresses(x, product, out, inverse_norm, mean, cosine),
        operation.eps,
        TYPES[dtype],
        torch.get_num_threads(),
    )
    return out, inverse_norm, saved_map, mean


def differentiate(grad: Tensor, x: Tensor, asked: Pass) -> tuple[Tensor, Any, Tensor | None]:
    """Return the gradient of the convolution's output, a correction for that of x, and four sums per filter.

    The first result is in memory that the next call in the same thread overwrites. The second is None unless the
    gradient of x is needed, the third unless that of a parameter is.
    """
    operation, parameters, (_, _, inverse_norm, saved_map, mean, is_output), needs = asked
    layout = layout_of(saved_map.shape, saved_map.stride())
    if layout == "other":
        saved_map, layout = saved_map.contiguous(), "planes"
    if grad.stride() != saved_map.stride():
        grad = torch.empty_strided(grad.shape, saved_map.stride(), dtype=grad.dtype, device="cpu").copy_(grad)
    # The layout of x does not matter here: with groups it is that of the output, without groups its map has none.
    rows = layout == "rows"
    plan = _plan(x.shape, rows, saved_map.shape, rows, operation.geometry)
    work = inverse_norm.dtype
    size = grad.nbytes
    block = torch.empty(size, dtype=torch.uint8, device="cpu") if size > SCRATCH_LIMIT else scratch(size)
    grad_product = block.view(grad.dtype).as_strided(grad.shape, grad.stride())
    spread = torch.empty_strided(*plan.x_map, dtype=work, device="cpu") if needs[0] else None
    mean_spread = None if spread is None or mean is None else torch.empty_like(spread)
    sums = torch.empty(4, saved_map.shape[1], dtype=work, device="cpu") if True in needs[2:] else None
    tensors = (grad, saved_map, inverse_norm, mean, grad_product, spread, mean_spread, sums)
    kind = _SAVED_OUTPUT if is_output else _SAVED_COSINE if saved_map.dtype == work else _SAVED_PRODUCT
    pointers = BackwardStruct(*addresses(*tensors), kind)
    arguments = angle_arguments(operation, parameters, work)
    load().backward(plan.struct, arguments.struct, ctypes.byref(pointers), TYPES[grad.dtype], torch.get_num_threads())
    return grad_product, None if spread is None else (spread, mean_spread), sums


def correct(grad_x: Tensor, x: Tensor, correction: tuple[Tensor, Tensor | None], groups: int) -> Tensor:
    """Return grad_x − x·spread + mean_spread, in place: the contribution of the patch norms to the gradient of x."""
    spread, mean_spread = correction
    layout = layout_of(x.shape, x.stride())
    if groups > 1 and spread.dim() > 2:  # the map has the layout of the output; without groups it has none
        expected = layout_of(spread.shape, spread.stride())
        if layout != expected:
            x, layout = dense_like(x, spread), expected
    elif layout == "other":
        x, layout = x.contiguous(), "planes"
    if grad_x.stride() != x.stride():
        grad_x = dense_like(grad_x, x)
    rows = layout == "rows"
    plan = _plan(x.shape, rows, x.shape, rows, _pointwise(x.dim() - 2, groups))
    load().correct(
        plan.struct,
        grad_x.data_ptr(),
        x.data_ptr(),
        spread.data_ptr(),
        None if mean_spread is None else mean_spread.data_ptr(),
        TYPES[x.dtype],
        torch.get_num_threads(),
    )
    return grad_x


@lru_cache(maxsize=64)
def _pointwise(dims: int, groups: int) -> Geometry:
    """Return the geometry whose windows are single pixels."""
    return Geometry((1,) * dims, (1,) * dims, (0,) * dims, (1,) * dims, groups)


class NativeBackend(Backend):
    """Torch's convolution with unit weights, and one pass of the library before and after it."""

    name = "native"

    def supports(self, case: Case) -> bool:
        """Return whether the library knows g and h; transposed convolutions have no kernels."""
        return (
            case.angle in ANGLE_NUMBERS and case.magnitude != 0 and case.dtype in TYPES and not case.geometry.transposed
        )

    unit_weight = staticmethod(unit_weight)

    def forward(
        self, x: Tensor, weight: Tensor, operation: Operation, parameters: Parameters, save_cosine: bool
    ) -> tuple[Tensor, Saved]:
        """See `Backend.forward`."""
        unit, scale = self.unit_weight(weight, operation, x.dtype)
        product = convolve(x, unit, operation.geometry)
        out, inverse_norm, saved_map, mean = apply(product, x, operation, parameters, save_cosine)
        return out, Saved(unit, scale, inverse_norm, saved_map, mean)

    def backward(self, grad: Tensor, x: Tensor, dtype: torch.dtype, asked: Pass) -> Gradients:
        """See `Backend.backward`."""
        operation, _, saved, needs = asked
        geometry = operation.geometry
        of_product, correction, sums = differentiate(grad, x, asked)
        grad_x, grad_weight = convolve_backward(of_product, x, saved.unit_weight, geometry, needs[0], needs[1])
        if grad_x is not None:
            grad_x = correct(grad_x, x, correction, geometry.groups)
        if grad_weight is not None:
            grad_weight = unit_weight_backward(grad_weight, saved, operation, dtype)
        return Gradients(grad_x, grad_weight, sums)


BACKEND = NativeBackend()
