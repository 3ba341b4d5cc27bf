"""Errors of compiling and launching Triton kernels: the layer is computed by the plain formula instead, with a warning.

Other errors propagate: a wrong argument, an error of an earlier kernel, no memory.
"""

import subprocess
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from triton.errors import TritonError

from spherenet.kernels.backends import BackendError

__all__ = ["is_kernel_error", "reported"]

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
