"""Preparation of a launch on the host: views of tensors, block sizes, index width, the device.

Every kernel receives a geometry of three spatial dimensions; missing ones have size 1. Strides are passed unchanged, so
that channels-last, contiguous, expanded and sliced tensors need no copy. Offsets take 64 bits only if a tensor exceeds
2³¹ elements, because divisions of 64-bit integers are slow on a GPU.
"""

import math
import subprocess
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

from spherenet.kernels.backends import BackendError
from spherenet.ops.geometry import Geometry
from spherenet.ops.norms import working_dtype

TILE = 1024
"""Elements of a block: 8 per thread with four warps, so that no kernel spills registers."""

WIDEST_CHANNELS = 32
"""Channels of a block if there are many pixels: 128 bytes in float32, and as many pixels, for both memory formats."""

FEWEST_PROGRAMS = 256
"""Blocks become smaller until a launch has this many programs, about two per multiprocessor of a large GPU."""

OPTIONS = {"enable_fp_fusion": True}
"""Options of the compiler: products and sums are fused, as on the CPU. The default of Triton will change in 3.10."""

TRITON_DTYPES = {torch.float32: tl.float32, torch.float64: tl.float64}


class Window(NamedTuple):
    """A geometry in three dimensions, a constant when a kernel is compiled."""

    kernel: tuple[int, int, int]
    stride: tuple[int, int, int]
    padding: tuple[int, int, int]
    dilation: tuple[int, int, int]

    @property
    def taps(self) -> int:
        """Number of pixels of a window."""
        return math.prod(self.kernel)


def in_three(values: Sequence[int], fill: int) -> tuple[int, int, int]:
    """Return three sizes, with missing spatial dimensions in front."""
    a, b, c = (fill,) * (3 - len(values)) + tuple(values)
    return a, b, c


def window_of(geometry: Geometry) -> Window:
    """Return the geometry of a convolution, or of a fully connected layer, in three dimensions."""
    return Window(
        in_three(geometry.kernel_size, 1),
        in_three(geometry.stride, 1),
        in_three(geometry.padding, 0),  # type: ignore[arg-type]
        in_three(geometry.dilation, 1),
    )


def image_strides(x: Tensor) -> tuple[int, int, int, int, int]:
    """Return the strides of image, channel and three spatial dimensions of x [N, C, *spatial]."""
    return (x.stride(0), x.stride(1), *in_three(x.stride()[2:], 0))


def map_strides(x: Tensor) -> tuple[int, int, int] | None:
    """Return the strides of image, channel and pixel of x [N, C, *spatial]; None if pixels have no common stride."""
    pixel, reached = 0, 1
    for size, stride in zip(reversed(x.shape[2:]), reversed(x.stride()[2:]), strict=True):
        if size == 1:
            continue
        if reached == 1:
            pixel = stride
        elif stride != pixel * reached:
            return None
        reached *= size
    return x.stride(0), x.stride(1), pixel


def with_map_strides(x: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """Return x, copied if its pixels have no common stride, and its strides."""
    strides = map_strides(x)
    if strides is None:
        x = x.contiguous()
        strides = map_strides(x)
        assert strides is not None
    return x, strides


def dense(x: Tensor) -> Tensor:
    """Return x itself if its elements fill its memory in some order, otherwise a copy."""
    return x if torch.ops.aten.is_non_overlapping_and_dense(x) else x.contiguous()


def pixel_axis(x: Tensor) -> int:
    """Return the axis of pixels in a block of x: 0 if channels are adjacent in memory, otherwise 1."""
    return 0 if x.stride(1) == 1 and (x.dim() > 2 or x.shape[1] > 1) else 1


def index_dtype(*tensors: Tensor | None) -> Any:
    """Return int32 unless an offset into one of the tensors needs more."""
    furthest = max(
        sum((size - 1) * abs(stride) for size, stride in zip(t.shape, t.stride(), strict=True))
        for t in tensors
        if t is not None
    )
    # Offsets of masked elements of the last block are computed too.
    return tl.int64 if furthest >= 2**31 - 2**20 else tl.int32


def work_dtype(dtype: torch.dtype) -> Any:
    """Return Triton's name of the dtype in which norms and angles of `dtype` are computed."""
    return TRITON_DTYPES[working_dtype(dtype)]


def block_of_pixels(pixels: int, groups: int, channels: int) -> int:
    """Return the number of pixels per program if a group has up to this many channels."""
    block = min(256, max(1, TILE // min(WIDEST_CHANNELS, triton.next_power_of_2(max(channels, 1)))))
    while block > 4 and triton.cdiv(pixels, block) * groups < FEWEST_PROGRAMS:
        block //= 2
    return block


def block_of_channels(channels: int, block_of_pixels: int) -> int:
    """Return the number of channels that a program processes at once."""
    return max(1, min(triton.next_power_of_2(channels), TILE // block_of_pixels))


def k_arguments(k: Tensor | float | None, dtype: torch.dtype) -> tuple[Tensor | None, dict[str, Any]]:
    """Return a tensor k, or None, and the constants of a kernel: K and the stride of the tensor."""
    if isinstance(k, Tensor):
        k = k.detach().to(working_dtype(dtype))
        k = k.reshape(-1) if k.dim() != 1 else k
        return k, {"K": None, "K_STRIDE": 0 if k.numel() == 1 else k.stride(0)}
    return None, {"K": k, "K_STRIDE": 0}


def launch(kernel: Any, grid: tuple[int, ...], example: Tensor, *arguments: Any, **constants: Any) -> None:
    """Run a kernel on the device of `example`."""
    if example.is_cuda and example.device.index != torch.cuda.current_device():
        with torch.cuda.device(example.device):
            kernel[grid](*arguments, **constants, **OPTIONS)
    else:
        kernel[grid](*arguments, **constants, **OPTIONS)


# --- failures ------------------------------------------------------------------------------------------------------
#
# After an error of compiling or launching a kernel, layers like this one are computed by the plain formula. Other
# errors propagate: a wrong argument, an error of an earlier kernel, no memory.

Function = TypeVar("Function", bound=Callable[..., Any])
_failed: set[object] = set()


def is_kernel_error(error: Exception) -> bool:
    """Return whether an error is one of compiling a kernel, with or without a compiler, or of launching it."""
    if isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError)):
        return False
    if isinstance(error, (TritonError, OSError, subprocess.SubprocessError)):
        return True
    text = str(error)
    is_launch = text.startswith(("Triton Error", "Failed to find C compiler", "PassManager::run failed"))
    return type(error) is RuntimeError and is_launch and "out of memory" not in text.lower()


def _signature(value: Any) -> object:
    """Return what decides how a kernel is compiled: everything but the sizes of tensors."""
    if isinstance(value, Tensor):
        return value.device, value.dtype, value.dim(), value.stride(1) == 1 if value.dim() > 1 else None
    if isinstance(value, tuple):
        return tuple(_signature(element) for element in value)
    return getattr(value, "kernel_id", value)  # angle functions of one class are compiled once


def reported(method: Function) -> Function:
    """Return a method that raises `BackendError` for calls like one whose kernels failed; the first one warns."""

    @wraps(method)
    def run(self: Any, *arguments: Any) -> Any:
        key = (method.__name__, *map(_signature, arguments)) if _failed else None
        if key in _failed:
            raise BackendError("triton")
        try:
            return method(self, *arguments)
        except Exception as error:
            if not is_kernel_error(error):
                raise
            _failed.add((method.__name__, *map(_signature, arguments)))
            cause = (str(error).strip() or type(error).__name__).splitlines()[0]
            warnings.warn(
                f"spherenet computes layers like this one without Triton: {cause}", RuntimeWarning, stacklevel=2
            )
            raise BackendError("triton") from error

    return run  # type: ignore[return-value]
