"""The kernels on CPUs: functions of a C++ library, called through ctypes with raw pointers.

The library uses as many threads as torch and shares torch's thread pool. Tensors are allocated on the CPU by name: the
default device of torch may be another one. It processes dense tensors [N, C, *spatial] in
two layouts: *rows* (channels last in memory) and *planes* (contiguous).
"""

from __future__ import annotations

import ctypes
import math
import threading
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spherenet.kernels.library import (
    AngleStruct,
    BackwardStruct,
    CellStruct,
    GeometryStruct,
    available,
    instruction_set,
    load,
)
from spherenet.kernels.sphere_conv.layouts import dense_like, layout_of
from spherenet.magnitudes import Magnitude
from spherenet.ops.geometry import Geometry
from spherenet.ops.norms import working_dtype
from spherenet.ops.sphere_conv import Affine, Operation

__all__ = ["available", "backward", "cell_backward", "cell_forward", "checksum", "correct", "forward",
           "instruction_set", "release_scratch", "unit_weight", "unit_weight_backward"]  # fmt: skip

_ANGLES = {"cosine": 0, "linear": 1, "sigmoid": 2, "square-cosine": 3, "sharpened-cosine": 4}
"""Numbers of the angle functions in csrc/api.h, by `AngleFunction.kernel_id`."""

_SAVED_OUTPUT, _SAVED_COSINE, _SAVED_PRODUCT = range(3)

_TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_WORK = {dtype: working_dtype(dtype) for dtype in _TYPES}


# --- arguments -------------------------------------------------------------------------------------------------


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


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
    kernel_size, stride, padding, dilation, groups, _ = geometry
    sizes = (x_shape[2:], out_shape[2:], kernel_size, stride, padding, dilation)
    fills = (1, 1, 1, 1, 0, 1)
    in_three = [(fill,) * missing + tuple(size) for size, fill in zip(sizes, fills, strict=True)]
    struct = GeometryStruct(x_shape[0], x_shape[1], out_shape[1], groups, *in_three, x_rows, out_rows)
    return _Plan(ctypes.byref(struct), *maps)


class _AngleArguments:
    """Angle and magnitude function and affine map as the library takes them; keeps the tensors alive."""

    def __init__(
        self,
        kernel_id: str,
        k: Tensor | float | None,
        affine: Affine | None,
        dtype: torch.dtype,
        magnitude: Magnitude | None = None,
        radius: Tensor | float | None = None,
    ) -> None:
        k = torch.tensor([k], dtype=dtype, device="cpu") if isinstance(k, float) else k
        radius = torch.tensor([radius], dtype=dtype, device="cpu") if isinstance(radius, float) else radius
        values: tuple[Any, ...] = (k, *(affine or Affine()), radius)
        self.tensors = [
            value
            if value is None or (value.dtype == dtype and value.is_contiguous())
            else value.detach().to(dtype).contiguous()
            for value in values
        ]
        *pointers, radius_pointer = map(_pointer, self.tensors)
        struct = AngleStruct(_ANGLES[kernel_id], 0 if k is None else k.numel(), *pointers)
        if magnitude is not None:
            struct.magnitude, struct.radius, struct.radius_count = (
                magnitude.kernel_id,
                radius_pointer,
                0 if radius is None else radius.numel(),
            )
            struct.alpha, struct.beta = magnitude.alpha, magnitude.beta
        self.struct = ctypes.byref(struct)


@lru_cache(maxsize=256)
def _constant_angle(kernel_id: str, k: float | None, dtype: torch.dtype) -> _AngleArguments:
    return _AngleArguments(kernel_id, k, None, dtype)


# --- scratch memory ----------------------------------------------------------------------------------------------

_SCRATCH_LIMIT = 256 << 20
_thread = threading.local()


def release_scratch() -> None:
    """Return this thread's scratch memory to the system."""
    _thread.scratch = None


def _scratch_like(x: Tensor) -> Tensor:
    """Return uninitialized memory with the shape, dtype and strides of x, valid until the next call in this thread.

    The C library returns large blocks to the system when they are freed, and the system clears every page again at the
    next allocation, which takes longer for a map of 32 MB than the pass that fills it. So each thread keeps one block.
    """
    size = x.numel() * x.element_size()
    if size > _SCRATCH_LIMIT:
        return torch.empty_like(x)
    block: Tensor | None = getattr(_thread, "scratch", None)
    if block is None or block.numel() < size:
        _thread.scratch = block = None  # free the smaller one first
        _thread.scratch = block = torch.empty(size, dtype=torch.uint8, device="cpu")
    return block[:size].view(x.dtype).as_strided(x.shape, x.stride())


# --- the five functions of an implementation -------------------------------------------------------------------


def unit_weight(weight: Tensor, eps: float, dtype: torch.dtype, centered: bool = False) -> tuple[Tensor, Tensor]:
    """Return weight/‖w‖ per filter in `dtype`, and 1/‖w‖ [filters]; centered removes the mean of each kernel first."""
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
        eps,
        centered,
        _TYPES[weight.dtype],
        _TYPES[dtype],
        torch.get_num_threads(),
    )
    return unit, scale


def unit_weight_backward(
    grad_unit: Tensor, unit: Tensor, scale: Tensor, dtype: torch.dtype, centered: bool = False
) -> Tensor:
    """Return the gradient of the weight in `dtype` from that of the unit weight: (I − uuᵀ)·grad/‖w‖."""
    if grad_unit.stride() != unit.stride():
        grad_unit = dense_like(grad_unit, unit)
    grad_weight = torch.empty_strided(unit.shape, unit.stride(), dtype=dtype, device="cpu")
    filters = unit.shape[0]
    load().unit_weight_backward(
        grad_unit.data_ptr(),
        unit.data_ptr(),
        scale.data_ptr(),
        grad_weight.data_ptr(),
        filters,
        unit.numel() // max(filters, 1),
        centered,
        _TYPES[dtype],
        _TYPES[unit.dtype],
        torch.get_num_threads(),
    )
    return grad_weight


def forward(
    product: Tensor,
    x: Tensor,
    operation: Operation,
    k: Tensor | float | None,
    affine: Affine | None,
    radius: Tensor | float | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Convert the output of the convolution to that of the layer, in place if nothing is saved for backward.

    Returns:
        The output, 1/‖patch‖ [N, groups, *out], what operation.save_cosine saves or None (the cosines; in half
        precision the output of the convolution, which is half as large), and the means of centered patches or None.
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
    saved_map = torch.empty_like(product) if operation.save_cosine else None
    out, cosine = product, saved_map
    if saved_map is not None and work != dtype:
        out, saved_map, cosine = saved_map, product, None
    mean = torch.empty_strided(*plan.out_map, dtype=work, device="cpu") if operation.center == "patch" else None
    kernel_id: Any = operation.angle.kernel_id
    if affine is None and not isinstance(k, Tensor) and operation.magnitude is None:
        arguments = _constant_angle(kernel_id, k, work)
    else:
        arguments = _AngleArguments(kernel_id, k, affine, work, operation.magnitude, radius)
    load().forward(
        plan.struct,
        arguments.struct,
        x.data_ptr(),
        product.data_ptr(),
        out.data_ptr(),
        inverse_norm.data_ptr(),
        None if mean is None else mean.data_ptr(),
        None if cosine is None else cosine.data_ptr(),
        operation.eps,
        _TYPES[dtype],
        torch.get_num_threads(),
    )
    return out, inverse_norm, saved_map, mean


def backward(
    grad: Tensor,
    saved: Tensor,
    inverse_norm: Tensor,
    x: Tensor,
    operation: Operation,
    k: Tensor | float | None,
    affine: Affine | None,
    needs_x: bool,
    needs_k: bool,
    needs_affine: bool,
    mean: Tensor | None = None,
    radius: Tensor | float | None = None,
) -> tuple[Tensor, Any, Tensor | None]:
    """Return the gradient of the convolution's output, a correction for that of x, and four sums per filter.

    The first result is in memory that the next call in the same thread overwrites.

    Args:
        grad: Gradient of the output.
        saved: If operation.save_cosine the cosines in the working dtype, or what `forward` saved; otherwise the output.
        inverse_norm: 1/‖patch‖ as `forward` returned it.
        x: Input of the layer.
        operation: What the layer computes.
        k: Parameter of g.
        affine: The affine map after g.
        needs_x: Whether the correction is needed.
        needs_k: Whether the sum of grad·h·∂g/∂k, or of grad·g·∂h/∂ρ, is needed.
        needs_affine: Whether the sums of grad and grad·h·g are needed.
        mean: Means of centered patches as `forward` returned them.
        radius: Radius of h.
    """
    layout = layout_of(saved.shape, saved.stride())
    if layout == "other":
        saved, layout = saved.contiguous(), "planes"
    if grad.stride() != saved.stride():
        grad = dense_like(grad, saved)
    # The layout of x does not matter here: with groups it is that of the output, without groups its map has none.
    rows = layout == "rows"
    plan = _plan(x.shape, rows, saved.shape, rows, operation.geometry)
    work = inverse_norm.dtype
    grad_product = _scratch_like(grad)
    spread = torch.empty_strided(*plan.x_map, dtype=work, device="cpu") if needs_x else None
    mean_spread = None if spread is None or mean is None else torch.empty_like(spread)
    sums = torch.empty(4, saved.shape[1], dtype=work, device="cpu") if needs_k or needs_affine else None
    kernel_id: Any = operation.angle.kernel_id
    if affine is None and not isinstance(k, Tensor) and operation.magnitude is None:
        arguments = _constant_angle(kernel_id, k, work)
    else:
        arguments = _AngleArguments(kernel_id, k, affine, work, operation.magnitude, radius)
    pointers = BackwardStruct(
        grad.data_ptr(),
        saved.data_ptr(),
        inverse_norm.data_ptr(),
        None if mean is None else mean.data_ptr(),
        grad_product.data_ptr(),
        None if spread is None else spread.data_ptr(),
        None if mean_spread is None else mean_spread.data_ptr(),
        None if sums is None else sums.data_ptr(),
        _SAVED_OUTPUT if not operation.save_cosine else _SAVED_COSINE if saved.dtype == work else _SAVED_PRODUCT,
    )
    load().backward(plan.struct, arguments.struct, ctypes.byref(pointers), _TYPES[grad.dtype], torch.get_num_threads())
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
        _TYPES[x.dtype],
        torch.get_num_threads(),
    )
    return grad_x


@lru_cache(maxsize=64)
def _pointwise(dims: int, groups: int) -> Geometry:
    """Return the geometry whose windows are single pixels."""
    return Geometry((1,) * dims, (1,) * dims, (0,) * dims, (1,) * dims, groups)


# --- recurrent cells and checksums -------------------------------------------------------------------------------


def cell_forward(from_input: Tensor, from_state: Tensor, before: Tensor, gates: Tensor, after: Tensor | None,
                 output: Tensor) -> None:  # fmt: skip
    """Compute one step of an LSTM (four gates) or a GRU (three) into gates, after and output; see csrc/cells.h."""
    rows, hidden = before.shape
    cell = CellStruct(rows, hidden, from_state.shape[1] // hidden)
    load().cell_forward(
        ctypes.byref(cell),
        *map(_pointer, (from_input, from_state, before, gates, after, output)),
        _TYPES[before.dtype],
        torch.get_num_threads(),
    )


def cell_backward(gates: Tensor, from_state: Tensor | None, before: Tensor, after: Tensor | None, grad_output: Tensor,
                  grad_after: Tensor | None, grad_gates: Tensor, grad_from_state: Tensor | None,
                  grad_before: Tensor) -> None:  # fmt: skip
    """Compute the gradients of one step into the last three arguments; see csrc/cells.h."""
    rows, hidden = before.shape
    cell = CellStruct(rows, hidden, gates.shape[1] // hidden)
    tensors = (gates, from_state, before, after, grad_output, grad_after, grad_gates, grad_from_state, grad_before)
    load().cell_backward(ctypes.byref(cell), *map(_pointer, tensors), _TYPES[before.dtype], torch.get_num_threads())


def checksum(tensor: Tensor) -> int:
    """Return a checksum of the memory of a dense tensor."""
    return int(load().checksum(tensor.data_ptr(), math.prod(tensor.shape) * tensor.element_size()))
