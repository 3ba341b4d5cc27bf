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

from spherenet.kernels.backends import Backend, Case, Pass, Saved, parameter_gradients
from spherenet.kernels.library import BackwardStruct, CellStruct, GeometryStruct, load
from spherenet.kernels.sphere_conv import winograd
from spherenet.kernels.sphere_conv.arguments import ANGLE_NUMBERS, addresses, angle_arguments, dense_like, layout_of
from spherenet.ops.geometry import Geometry, convolve, convolve_backward
from spherenet.ops.norms import working_dtype
from spherenet.ops.operation import Operation, Parameters

__all__ = ["BACKEND", "CellGradients", "NativeBackend", "cell_backward", "cell_forward", "correct", "release_scratch"]

_SAVED_OUTPUT, _SAVED_COSINE, _SAVED_PRODUCT = range(3)

_TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_WORK = {dtype: working_dtype(dtype) for dtype in _TYPES}


# --- arguments -------------------------------------------------------------------------------------------------


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

_SCRATCH_LIMIT = 256 << 20
_thread = threading.local()


def release_scratch() -> None:
    """Return this thread's scratch memory to the system."""
    _thread.scratch = None
    winograd.release_scratch()


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
        _TYPES[weight.dtype],
        _TYPES[dtype],
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
        _TYPES[dtype],
        _TYPES[unit.dtype],
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
        _TYPES[dtype],
        torch.get_num_threads(),
    )
    return out, inverse_norm, saved_map, mean


def differentiate(grad: Tensor, x: Tensor, asked: Pass) -> tuple[Tensor, Any, Tensor | None]:
    """Return the gradient of the convolution's output, a correction for that of x, and four sums per filter.

    The first result is in memory that the next call in the same thread overwrites. The second is None unless the
    gradient of x is needed, the third unless that of a parameter is.
    """
    operation, parameters, (_, _, inverse_norm, saved_map, mean, is_output, _), needs = asked
    layout = layout_of(saved_map.shape, saved_map.stride())
    if layout == "other":
        saved_map, layout = saved_map.contiguous(), "planes"
    if grad.stride() != saved_map.stride():
        grad = torch.empty_strided(grad.shape, saved_map.stride(), dtype=grad.dtype, device="cpu").copy_(grad)
    # The layout of x does not matter here: with groups it is that of the output, without groups its map has none.
    rows = layout == "rows"
    plan = _plan(x.shape, rows, saved_map.shape, rows, operation.geometry)
    work = inverse_norm.dtype
    grad_product = _scratch_like(grad)
    spread = torch.empty_strided(*plan.x_map, dtype=work, device="cpu") if needs[0] else None
    mean_spread = None if spread is None or mean is None else torch.empty_like(spread)
    sums = torch.empty(4, saved_map.shape[1], dtype=work, device="cpu") if True in needs[2:] else None
    tensors = (grad, saved_map, inverse_norm, mean, grad_product, spread, mean_spread, sums)
    kind = _SAVED_OUTPUT if is_output else _SAVED_COSINE if saved_map.dtype == work else _SAVED_PRODUCT
    pointers = BackwardStruct(*addresses(*tensors), kind)
    arguments = angle_arguments(operation, parameters, work)
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


class NativeBackend(Backend):
    """Torch's convolution with unit weights, and one pass of the library before and after it.

    Where Winograd's algorithm is faster (`winograd.plan_for`), the library computes the convolution and all passes.
    """

    name = "native"

    def supports(self, case: Case) -> bool:
        """Return whether the library knows g and h; transposed convolutions have no kernels."""
        return (
            case.angle in ANGLE_NUMBERS
            and case.magnitude != 0
            and case.dtype in _TYPES
            and not case.geometry.transposed
        )

    unit_weight = staticmethod(unit_weight)

    def forward(
        self, x: Tensor, weight: Tensor, operation: Operation, parameters: Parameters, save_cosine: bool
    ) -> tuple[Tensor, Saved]:
        """See `Backend.forward`."""
        unit, scale = unit_weight(weight, operation, x.dtype)
        plan = winograd.plan_for(x, weight.shape[0], operation.geometry)
        if plan is not None:
            layer = _engine_layer(operation, parameters, x.dtype)
            results = winograd.forward(x, unit, plan, layer, keep_norms=True, save_cosine=save_cosine)
            norms: Any = results.inverse_norm
            out = dense_like(results.out, x)
            saved_map = out if results.cosine is None else results.cosine
            return out, Saved(unit, scale, norms, saved_map, results.mean, plan=plan)
        product = convolve(x, unit, operation.geometry)
        out, inverse_norm, saved_map, mean = apply(product, x, operation, parameters, save_cosine)
        return out, Saved(unit, scale, inverse_norm, saved_map, mean)

    def infer(self, x: Tensor, weight: Tensor, operation: Operation, parameters: Parameters) -> Tensor:
        """See `Backend.infer`."""
        plan = winograd.plan_for(x, weight.shape[0], operation.geometry)
        if plan is None:
            return self.forward(x, weight, operation, parameters, False)[0]
        unit = unit_weight(weight, operation, x.dtype)[0]
        return dense_like(winograd.forward(x, unit, plan, _engine_layer(operation, parameters, x.dtype)).out, x)

    def backward(self, grad: Tensor, x: Tensor, dtype: torch.dtype, asked: Pass) -> tuple[Tensor | None, ...]:
        """See `Backend.backward`."""
        operation, parameters, saved, needs = asked
        unit, geometry = saved.unit_weight, operation.geometry
        if saved.plan is not None:
            results = winograd.Results(
                saved.map, saved.inverse_norm, None if saved.is_output else saved.map, saved.mean
            )
            layer = _engine_layer(operation, parameters, x.dtype)
            wanted = winograd.Needs(needs[0], needs[1], True in needs[2:])
            grad_x, grad_unit, sums = winograd.backward(grad, x, unit, saved.plan, wanted, layer, results)
            if grad_x is not None:
                grad_x = dense_like(grad_x, x)
        else:
            of_product, correction, sums = differentiate(grad, x, asked)
            grad_x, grad_unit = convolve_backward(of_product, x, unit, geometry, needs[0], needs[1])
            if grad_x is not None:
                grad_x = correct(grad_x, x, correction, geometry.groups)
        if grad_unit is not None:
            grad_unit = unit_weight_backward(grad_unit, saved, operation, dtype)
        return grad_x, grad_unit, *parameter_gradients(sums, asked)


def _engine_layer(operation: Operation, parameters: Parameters, dtype: torch.dtype) -> winograd.Layer:
    """Return a layer as the engine takes it."""
    arguments = angle_arguments(operation, parameters, dtype)
    return winograd.Layer(arguments, operation.eps, operation.center == "patch")


BACKEND = NativeBackend()


# --- recurrent cells ---------------------------------------------------------------------------------------------


class CellGradients(NamedTuple):
    """Tensors of the backward pass of one step; the last three are written. See csrc/cells.h."""

    gates: Tensor
    from_state: Tensor | None
    before: Tensor
    after: Tensor | None
    grad_output: Tensor
    grad_after: Tensor | None
    grad_gates: Tensor
    grad_from_state: Tensor | None
    grad_before: Tensor


def cell_forward(from_input: Tensor, from_state: Tensor, before: Tensor, gates: Tensor, after: Tensor | None,
                 output: Tensor) -> None:  # fmt: skip
    """Compute one step of an LSTM (four gates) or a GRU (three) into gates, after and output; see csrc/cells.h."""
    rows, hidden = before.shape
    cell = CellStruct(rows, hidden, from_state.shape[1] // hidden)
    load().cell_forward(
        ctypes.byref(cell),
        *addresses(from_input, from_state, before, gates, after, output),
        _TYPES[before.dtype],
        torch.get_num_threads(),
    )


def cell_backward(tensors: CellGradients) -> None:
    """Compute the gradients of one step."""
    before = tensors.before
    cell = CellStruct(*before.shape, tensors.gates.shape[1] // before.shape[1])
    load().cell_backward(ctypes.byref(cell), *addresses(*tensors), _TYPES[before.dtype], torch.get_num_threads())
