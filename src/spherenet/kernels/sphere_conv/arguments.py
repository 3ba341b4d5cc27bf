"""What the C++ library takes: addresses, memory layouts, angle and magnitude functions.

It processes dense tensors [N, C, *spatial] in two layouts: *rows* (channels last in memory) and *planes* (contiguous).
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from spherenet.angles import ANGLES
from spherenet.kernels.library import AngleStruct
from spherenet.magnitudes import Magnitude
from spherenet.ops.operation import Operation, Parameters

__all__ = [
    "ANGLE_NUMBERS",
    "AngleArguments",
    "addresses",
    "angle_arguments",
    "dense_like",
    "is_dense",
    "is_rows",
    "layout_of",
]

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}

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


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor fill its memory in one of the two layouts."""
    return layout_of(tensor.shape, tensor.stride()) != "other"
