"""The kernels on CPUs: a C++ library without torch headers, called through ctypes with raw pointers.

`csrc/` holds its source, setup.py builds it. It is optional: `available()` says whether it can be used, and when it
cannot, one line in the log says why. It runs on as many threads as torch does and shares torch's thread pool.
"""

from __future__ import annotations

import ctypes
import logging
import math
import struct
import sys
import threading
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_double, c_int32, c_int64, c_uint64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spherenet.kernels.interface import ANGLES, Affine, Angle, dense_like, is_rows
from spherenet.ops.geometry import Geometry
from spherenet.ops.norms import working_dtype

__all__ = ["available", "backward", "cell_backward", "cell_forward", "checksum", "correct", "forward",
           "instruction_set", "release_scratch", "unit_weight", "unit_weight_backward"]  # fmt: skip

INTERFACE_VERSION = 1
"""The version of csrc/api.h that this module was written for."""

PATH = Path(__file__).with_name("_native.dll" if sys.platform == "win32" else "_native.so")

_TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_WORK = {dtype: working_dtype(dtype) for dtype in _TYPES}
_log = logging.getLogger(__name__)


class _Geometry(ctypes.Structure):
    _fields_ = (
        [(name, c_int64) for name in ("batch", "channels", "filters", "groups")]
        + [(name, c_int64 * 3) for name in ("in_", "out", "kernel", "stride", "padding", "dilation")]
        + [("x_rows", c_int32), ("out_rows", c_int32)]
    )


class _Angle(ctypes.Structure):
    _fields_ = [("type", c_int32), ("parameter_count", c_int32)] + [
        (name, c_void_p) for name in ("parameters", "bias", "scale", "shift")
    ]


class _Backward(ctypes.Structure):
    _fields_ = [(name, c_void_p) for name in ("grad", "known", "inverse_norm", "grad_product", "spread", "sums")] + [
        ("known_is_cosine", c_int32)
    ]


class _Cell(ctypes.Structure):
    _fields_ = [("rows", c_int64), ("hidden", c_int64), ("gates", c_int32)]


def _function(*arguments: Any, result: Any = None) -> Any:
    return ctypes.CFUNCTYPE(result, *arguments)


class _Kernels(ctypes.Structure):
    _fields_ = [
        (
            "unit_weight",
            _function(c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_double, c_int32, c_int32, c_int32),
        ),
        (
            "unit_weight_backward",
            _function(c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int32, c_int32, c_int32),
        ),
        ("forward", _function(*[c_void_p] * 6, c_double, c_int32, c_int32)),
        ("backward", _function(*[c_void_p] * 3, c_int32, c_int32)),
        ("correct", _function(*[c_void_p] * 4, c_int32, c_int32)),
        ("cell_forward", _function(*[c_void_p] * 7, c_int32, c_int32)),
        ("cell_backward", _function(*[c_void_p] * 10, c_int32, c_int32)),
        ("checksum", _function(c_void_p, c_int64, result=c_uint64)),
    ]


# --- loading ---------------------------------------------------------------------------------------------------


class _Library(NamedTuple):
    """The functions of the loaded library: reading a field of a ctypes structure would make a new object each time."""

    unit_weight: Any
    unit_weight_backward: Any
    forward: Any
    backward: Any
    correct: Any
    cell_forward: Any
    cell_backward: Any
    checksum: Any
    instruction_set: str


@lru_cache(maxsize=1)
def _load() -> _Library | None:
    """Return the functions of the library; None without one."""
    try:
        return _open(PATH)
    except (OSError, AttributeError, ValueError) as error:
        _log.warning("spherenet runs without native kernels, by the slower plain formula: %s", error)
        return None


def _open(path: Path) -> _Library:
    _refuse_truncated(path)
    library = ctypes.CDLL(str(path))
    version = int(library.spherenet_interface_version())
    if version != INTERFACE_VERSION:
        raise ValueError(f"{path.name} has interface version {version}, this package needs {INTERFACE_VERSION}.")
    library.spherenet_kernels.restype = POINTER(_Kernels)
    library.spherenet_instruction_set.restype = c_char_p
    table = library.spherenet_kernels().contents
    functions: Any = [getattr(table, field[0]) for field in _Kernels._fields_]
    return _Library._make([*functions, library.spherenet_instruction_set().decode()])


def _refuse_truncated(path: Path) -> None:
    """Refuse an ELF file that ends before its section table: the loader would map it and the process would die."""
    with path.open("rb") as file:
        header = file.read(64)
        if header[:4] != b"\x7fELF":
            return  # another format, or no library at all: the loader says so
        if len(header) < 64:
            raise ValueError(f"{path.name} is truncated.")
        (table,) = struct.unpack_from("<Q", header, 40)
        entry_size, entries = struct.unpack_from("<HH", header, 58)
        if table + entry_size * entries > path.stat().st_size:
            raise ValueError(f"{path.name} is truncated.")


def available() -> bool:
    """Whether the library can be used in this process."""
    return _load() is not None


def instruction_set() -> str:
    """The instruction set in use: "avx512", "avx2" or "baseline"."""
    return _loaded().instruction_set


def _loaded() -> _Library:
    loaded = _load()
    if loaded is None:
        raise RuntimeError(f"the native kernels are not available: {PATH.name} is missing or cannot be loaded.")
    return loaded


# --- arguments -------------------------------------------------------------------------------------------------


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@lru_cache(maxsize=1024)
def _geometry(
    x_shape: tuple[int, ...],
    out_shape: tuple[int, ...],
    kernel_size: tuple[int, ...],
    geometry: Geometry,
    x_rows: bool,
    out_rows: bool,
) -> _Geometry:
    """The struct of one shape; rows of a fully connected layer are the pixels of a single image."""
    if len(x_shape) == 2:
        rows = (1, 1, x_shape[0])
        ones, zeros = (1, 1, 1), (0, 0, 0)
        return _Geometry(1, x_shape[1], out_shape[1], 1, rows, rows, ones, ones, zeros, ones, 1, 1)
    missing = 5 - len(x_shape)

    def padded(values: Sequence[int], fill: int) -> tuple[int, ...]:
        return (fill,) * missing + tuple(values)

    return _Geometry(
        x_shape[0],
        x_shape[1],
        out_shape[1],
        geometry.groups,
        padded(x_shape[2:], 1),
        padded(out_shape[2:], 1),
        padded(kernel_size, 1),
        padded(geometry.stride, 1),
        padded(geometry.padding, 0),
        padded(geometry.dilation, 1),
        x_rows,
        out_rows,
    )


def _plain(value: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if value is None or (value.dtype == dtype and value.is_contiguous()):
        return value
    return value.detach().to(dtype).contiguous()


class _Description:
    """An angle and its affine map as the library takes them; holds the tensors that the struct points to."""

    def __init__(self, angle: Angle, affine: Affine, dtype: torch.dtype) -> None:
        k = torch.tensor([angle.k], dtype=dtype) if isinstance(angle.k, float) else angle.k
        self.held = [_plain(value, dtype) for value in (k, *affine)]
        count = 0 if k is None else k.numel()
        self.struct = _Angle(ANGLES.index(angle.name), count, *map(_pointer, self.held))


@lru_cache(maxsize=256)
def _fixed(name: str, k: float | None, dtype: torch.dtype) -> _Description:
    return _Description(Angle(name, k), Affine(), dtype)


def _describe(angle: Angle, affine: Affine, dtype: torch.dtype) -> _Description:
    if affine or isinstance(angle.k, Tensor):
        return _Description(angle, affine, dtype)
    return _fixed(angle.name, angle.k, dtype)


class _Plan(NamedTuple):
    """What one kind of call needs: the struct, and the shape and strides of the maps of x and of the output."""

    struct: Any
    x_map: tuple[tuple[int, ...], tuple[int, ...]]
    out_map: tuple[tuple[int, ...], tuple[int, ...]]


@lru_cache(maxsize=1024)
def _plan(
    x_shape: tuple[int, ...],
    x_rows: bool,
    out_shape: tuple[int, ...],
    out_rows: bool,
    kernel_size: tuple[int, ...],
    geometry: Geometry,
) -> _Plan:
    struct = _geometry(x_shape, out_shape, kernel_size, geometry, x_rows, out_rows)
    maps = []
    for shape in (x_shape, out_shape):
        size = (shape[0], geometry.groups, *shape[2:])
        like = torch.empty(size, device="meta")
        if out_rows and len(size) > 2:
            like = like.movedim(1, -1).contiguous().movedim(-1, 1)
        maps.append((size, like.stride()))
    return _Plan(ctypes.byref(struct), *maps)


@lru_cache(maxsize=1024)
def _layout(shape: tuple[int, ...], stride: tuple[int, ...]) -> str:
    """How a tensor of this shape and these strides lies in memory: "rows", "planes" or "other"."""
    like = torch.empty_strided(shape, stride, device="meta")
    return "rows" if is_rows(like) else "planes" if like.is_contiguous() else "other"


# --- scratch memory ----------------------------------------------------------------------------------------------

_SCRATCH_LIMIT = 256 << 20
_held = threading.local()


def release_scratch() -> None:
    """Give this thread's scratch memory back to the system."""
    _held.block = None


def _scratch_like(x: Tensor) -> Tensor:
    """Return uninitialized memory with the shape, dtype and strides of x, valid until the next call in this thread.

    The C library returns large blocks to the system when they are freed, and the system clears every page again at the
    next allocation: for a map of 32 MB that takes longer than the pass that fills it. So one block per thread is kept.
    """
    size = x.numel() * x.element_size()
    if size > _SCRATCH_LIMIT:
        return torch.empty_like(x)
    block: Tensor | None = getattr(_held, "block", None)
    if block is None or block.numel() < size:
        _held.block = block = None  # free the smaller one first
        _held.block = block = torch.empty(size, dtype=torch.uint8)
    return block[:size].view(x.dtype).as_strided(x.shape, x.stride())


# --- the five functions of an implementation -------------------------------------------------------------------


def unit_weight(weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return weight/‖w‖ per filter in `dtype`, and 1/‖w‖ [filters]."""
    if _layout(weight.shape, weight.stride()) == "other":
        weight = weight.contiguous()
    # The strides themselves, not a memory format: autograd wants gradients with the strides of the weight.
    unit = torch.empty_strided(weight.shape, weight.stride(), dtype=dtype)
    filters = weight.shape[0]
    scale = torch.empty(filters, dtype=_WORK[weight.dtype])
    _loaded().unit_weight(
        weight.data_ptr(),
        unit.data_ptr(),
        scale.data_ptr(),
        filters,
        weight.numel() // max(filters, 1),
        eps,
        _TYPES[weight.dtype],
        _TYPES[dtype],
        torch.get_num_threads(),
    )
    return unit, scale


def unit_weight_backward(grad_unit: Tensor, unit: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient of the weight in `dtype` from that of the unit weight: (I − uuᵀ)·grad/‖w‖."""
    if grad_unit.stride() != unit.stride():
        grad_unit = dense_like(grad_unit, unit)
    grad_weight = torch.empty_strided(unit.shape, unit.stride(), dtype=dtype)
    filters = unit.shape[0]
    _loaded().unit_weight_backward(
        grad_unit.data_ptr(),
        unit.data_ptr(),
        scale.data_ptr(),
        grad_weight.data_ptr(),
        filters,
        unit.numel() // max(filters, 1),
        _TYPES[dtype],
        _TYPES[unit.dtype],
        torch.get_num_threads(),
    )
    return grad_weight


def forward(
    product: Tensor,
    x: Tensor,
    kernel_size: Sequence[int],
    geometry: Geometry,
    eps: float,
    angle: Angle,
    affine: Affine,
    keep_cosine: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Turn the convolution's output into the layer's, in place; return it, 1/‖patch‖ and the cosines (or None)."""
    of_x, of_product = _layout(x.shape, x.stride()), _layout(product.shape, product.stride())
    if of_product == "other":
        product, of_product = product.contiguous(), "planes"
    if of_x == "other" or (geometry.groups > 1 and of_x != of_product):
        x, of_x = dense_like(x, product), of_product
    plan = _plan(x.shape, of_x == "rows", product.shape, of_product == "rows", kernel_size, geometry)
    dtype = x.dtype
    work = _WORK[dtype]
    inverse_norm = torch.empty_strided(*plan.out_map, dtype=work)
    cosine = torch.empty_like(product, dtype=work) if keep_cosine else None
    described = _describe(angle, affine, work)
    _loaded().forward(
        plan.struct,
        ctypes.byref(described.struct),
        x.data_ptr(),
        product.data_ptr(),
        inverse_norm.data_ptr(),
        None if cosine is None else cosine.data_ptr(),
        eps,
        _TYPES[dtype],
        torch.get_num_threads(),
    )
    return product, inverse_norm, cosine


def backward(
    grad: Tensor,
    known: Tensor,
    known_is_cosine: bool,
    inverse_norm: Tensor,
    x: Tensor,
    kernel_size: Sequence[int],
    geometry: Geometry,
    angle: Angle,
    affine: Affine,
    needs_x: bool,
    needs_k: bool,
    needs_affine: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradient of the convolution's output, what corrects the gradient of x, and three sums per filter.

    The first lies in memory that the next call in the same thread overwrites.
    """
    of_known = _layout(known.shape, known.stride())
    if of_known == "other":
        known, of_known = known.contiguous(), "planes"
    if grad.stride() != known.stride():
        grad = dense_like(grad, known)
    # The layout of x does not matter here: with groups it is that of the output, without its map has none.
    rows = of_known == "rows"
    plan = _plan(x.shape, rows, known.shape, rows, kernel_size, geometry)
    work = inverse_norm.dtype
    grad_product = _scratch_like(grad)
    spread = torch.empty_strided(*plan.x_map, dtype=work) if needs_x else None
    sums = torch.empty(3, known.shape[1], dtype=work) if needs_k or needs_affine else None
    described = _describe(angle, affine, work)
    pointers = _Backward(
        grad.data_ptr(),
        known.data_ptr(),
        inverse_norm.data_ptr(),
        grad_product.data_ptr(),
        None if spread is None else spread.data_ptr(),
        None if sums is None else sums.data_ptr(),
        known_is_cosine,
    )
    _loaded().backward(
        plan.struct,
        ctypes.byref(described.struct),
        ctypes.byref(pointers),
        _TYPES[grad.dtype],
        torch.get_num_threads(),
    )
    return grad_product, spread, sums


def correct(grad_x: Tensor, x: Tensor, spread: Tensor, groups: int) -> Tensor:
    """Return grad_x − x·spread, in place: what the patch norms contribute to the gradient of x."""
    layout = _layout(x.shape, x.stride())
    if groups > 1 and spread.dim() > 2:  # the map has the layout of the output; without groups it has none
        wanted = _layout(spread.shape, spread.stride())
        if layout != wanted:
            x, layout = dense_like(x, spread), wanted
    elif layout == "other":
        x, layout = x.contiguous(), "planes"
    if grad_x.stride() != x.stride():
        grad_x = dense_like(grad_x, x)
    rows = layout == "rows"
    plan = _plan(x.shape, rows, x.shape, rows, (1,) * (x.dim() - 2), _pixels(x.dim() - 2, groups))
    _loaded().correct(
        plan.struct,
        grad_x.data_ptr(),
        x.data_ptr(),
        spread.data_ptr(),
        _TYPES[x.dtype],
        torch.get_num_threads(),
    )
    return grad_x


@lru_cache(maxsize=64)
def _pixels(dims: int, groups: int) -> Geometry:
    """The geometry whose windows are single pixels."""
    return Geometry((1,) * dims, (0,) * dims, (1,) * dims, groups)


# --- recurrent cells, and whether a weight has changed ---------------------------------------------------------


def cell_forward(from_input: Tensor, from_state: Tensor, before: Tensor, gates: Tensor, after: Tensor | None,
                 output: Tensor) -> None:  # fmt: skip
    """One step of an LSTM (four gates) or a GRU (three), written into gates, after and output; see csrc/cells.h."""
    rows, hidden = before.shape
    cell = _Cell(rows, hidden, from_state.shape[1] // hidden)
    _loaded().cell_forward(
        ctypes.byref(cell),
        *map(_pointer, (from_input, from_state, before, gates, after, output)),
        _TYPES[before.dtype],
        torch.get_num_threads(),
    )


def cell_backward(gates: Tensor, from_state: Tensor | None, before: Tensor, after: Tensor | None, grad_output: Tensor,
                  grad_after: Tensor | None, grad_gates: Tensor, grad_from_state: Tensor | None,
                  grad_before: Tensor) -> None:  # fmt: skip
    """The gradients of one step, written into the last three; see csrc/cells.h."""
    rows, hidden = before.shape
    cell = _Cell(rows, hidden, gates.shape[1] // hidden)
    tensors = (gates, from_state, before, after, grad_output, grad_after, grad_gates, grad_from_state, grad_before)
    _loaded().cell_backward(ctypes.byref(cell), *map(_pointer, tensors), _TYPES[before.dtype], torch.get_num_threads())


def checksum(tensor: Tensor) -> int:
    """A fingerprint of the memory of a dense tensor."""
    return int(_loaded().checksum(tensor.data_ptr(), math.prod(tensor.shape) * tensor.element_size()))
