"""Loading of the C++ library: its structures, its functions and their types (csrc/api.h), and memory layouts.

The library processes dense tensors [N, C, *spatial] in two layouts: *rows* (channels last in memory) and *planes*
(contiguous). setup.py builds it from `csrc/`, without torch headers. It is optional: without it `available()` is False,
and the log contains one line with the reason.
"""

from __future__ import annotations

import ctypes
import logging
import struct
import sys
from ctypes import POINTER, c_char_p, c_double, c_int32, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "AngleStruct",
    "BackwardStruct",
    "CellStruct",
    "ConvolutionBackwardStruct",
    "ConvolutionForwardStruct",
    "ConvolutionStruct",
    "GeometryStruct",
    "available",
    "dense_like",
    "instruction_set",
    "is_rows",
    "layout_of",
    "load",
]

INTERFACE_VERSION = 6
"""Version of csrc/api.h that this module was written for."""

PATH = Path(__file__).with_name("_native.dll" if sys.platform == "win32" else "_native.so")

_log = logging.getLogger(__name__)


class GeometryStruct(ctypes.Structure):
    """Geometry of a convolution."""

    _fields_ = (
        [(name, c_int64) for name in ("batch", "channels", "filters", "groups")]
        + [(name, c_int64 * 3) for name in ("in_", "out", "kernel", "stride", "padding", "dilation")]
        + [("x_rows", c_int32), ("out_rows", c_int32)]
    )


class AngleStruct(ctypes.Structure):
    """An angle function, a magnitude function and the affine map after them."""

    _fields_ = [
        ("type", c_int32),
        ("parameter_count", c_int32),
        *((name, c_void_p) for name in ("parameters", "bias", "scale", "shift")),
        ("magnitude", c_int32),
        ("radius_count", c_int32),
        ("radius", c_void_p),
        ("alpha", c_double),
        ("beta", c_double),
    ]


class BackwardStruct(ctypes.Structure):
    """Pointers of a backward pass."""

    _fields_ = [
        *((name, c_void_p) for name in ("grad", "saved", "inverse_norm", "mean", "grad_product")),
        *((name, c_void_p) for name in ("spread", "mean_spread", "sums")),
        ("saved_map", c_int32),
    ]


class CellStruct(ctypes.Structure):
    """Sizes of a recurrent cell."""

    _fields_ = [("rows", c_int64), ("hidden", c_int64), ("gates", c_int32)]


class ConvolutionStruct(ctypes.Structure):
    """Input, weight and scratch memory of a convolution by Winograd's algorithm."""

    _fields_ = [
        *((name, c_void_p) for name in ("x", "weight")),
        *((name, c_int64) for name in ("filter_step", "channel_step", "tap_step")),
        ("scratch", c_void_p),
        ("tile", c_int32),
    ]


class ConvolutionForwardStruct(ctypes.Structure):
    """Results of its forward pass."""

    _fields_ = [
        *((name, c_void_p) for name in ("out", "bias", "inverse_norm", "mean", "cosine")),
        ("eps", c_double),
        ("centered", c_int32),
    ]


class ConvolutionBackwardStruct(ctypes.Structure):
    """Pointers of its backward pass."""

    _fields_ = [
        *((name, c_void_p) for name in ("grad", "inverse_norm", "mean", "saved", "grad_x", "grad_weight", "sums")),
        ("saved_map", c_int32),
    ]


def _function(*arguments: Any, result: Any = None) -> Any:
    return ctypes.CFUNCTYPE(result, *arguments)


class _KernelTable(ctypes.Structure):
    _fields_ = [
        (
            "unit_weight",
            _function(*[c_void_p] * 3, c_int64, c_int64, c_double, *[c_int32] * 4),
        ),
        (
            "unit_weight_backward",
            _function(*[c_void_p] * 4, c_int64, c_int64, *[c_int32] * 4),
        ),
        ("forward", _function(*[c_void_p] * 8, c_double, c_int32, c_int32)),
        ("backward", _function(*[c_void_p] * 3, c_int32, c_int32)),
        ("correct", _function(*[c_void_p] * 5, c_int32, c_int32)),
        ("cell_forward", _function(*[c_void_p] * 7, c_int32, c_int32)),
        ("cell_backward", _function(*[c_void_p] * 10, c_int32, c_int32)),
        ("winograd_scratch", _function(c_void_p, *[c_int32] * 3, result=c_int64)),
        ("winograd_forward", _function(*[c_void_p] * 4, c_int32)),
        ("winograd_backward", _function(*[c_void_p] * 4, c_int32)),
    ]


class _Library(NamedTuple):
    """The functions of the library, because reading a field of a ctypes structure creates a new object each time."""

    unit_weight: Any
    unit_weight_backward: Any
    forward: Any
    backward: Any
    correct: Any
    cell_forward: Any
    cell_backward: Any
    winograd_scratch: Any
    winograd_forward: Any
    winograd_backward: Any
    instruction_set: str


@lru_cache(maxsize=1)
def load() -> Any:
    """Return the functions of the library, or None if it is not available."""
    try:
        return open_library(PATH)
    except (OSError, AttributeError, ValueError) as error:
        _log.warning("spherenet runs without native kernels, by the slower plain formula: %s", error)
        return None


def open_library(path: Path) -> _Library:
    """Load a library file; raise ValueError or OSError if it is corrupt or of another version."""
    _reject_truncated(path)
    library = ctypes.CDLL(str(path))
    version = int(library.spherenet_interface_version())
    if version != INTERFACE_VERSION:
        raise ValueError(f"{path.name} has interface version {version}, this package needs {INTERFACE_VERSION}.")
    library.spherenet_kernels.restype = POINTER(_KernelTable)
    library.spherenet_instruction_set.restype = c_char_p
    table = library.spherenet_kernels().contents
    functions: Any = [getattr(table, field[0]) for field in _KernelTable._fields_]
    return _Library._make([*functions, library.spherenet_instruction_set().decode()])


def _reject_truncated(path: Path) -> None:
    """Raise ValueError for an ELF file that ends before its section table; loading it would crash the process."""
    with path.open("rb") as file:
        header = file.read(64)
        if header[:4] != b"\x7fELF":
            return  # another format, or not a library: the loader reports it
        if len(header) < 64:
            raise ValueError(f"{path.name} is truncated.")
        (table,) = struct.unpack_from("<Q", header, 40)
        entry_size, entries = struct.unpack_from("<HH", header, 58)
        if table + entry_size * entries > path.stat().st_size:
            raise ValueError(f"{path.name} is truncated.")


def available() -> bool:
    """Return whether the library can be used in this process."""
    return load() is not None


def instruction_set() -> str:
    """Return the instruction set in use: "avx512", "avx2" or "baseline"."""
    library = load()
    if library is None:
        raise RuntimeError(f"the native kernels are not available: {PATH.name} is missing or cannot be loaded.")
    return str(library.instruction_set)


# --- tensors -------------------------------------------------------------------------------------------------------

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def is_rows(x: Tensor) -> bool:
    """Return whether the channels of a dense tensor are last in memory."""
    if x.dim() == 2:
        return x.is_contiguous()
    if x.dim() == 3:
        return x.stride(1) == 1 and x.transpose(1, 2).is_contiguous()
    return x.is_contiguous(memory_format=_CHANNELS_LAST[x.dim()])


def dense_like(x: Tensor, other: Tensor) -> Tensor:
    """Return x in the layout of `other`, or contiguous if that is not rows; copied only if necessary."""
    if not is_rows(other):
        return x.contiguous()
    if x.dim() == 3:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if x.dim() == 2:
        return x.contiguous()
    return x.contiguous(memory_format=_CHANNELS_LAST[x.dim()])


@lru_cache(maxsize=1024)
def layout_of(shape: tuple[int, ...], stride: tuple[int, ...]) -> str:
    """Return the layout of a tensor with this shape and strides: "rows", "planes" or "other"."""
    like = torch.empty_strided(shape, stride, device="meta")
    return "rows" if is_rows(like) else "planes" if like.is_contiguous() else "other"
