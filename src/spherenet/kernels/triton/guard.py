"""Falls back to torch's own operations for the kind of call that Triton could not compile or launch."""

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["guarded"]

Function = TypeVar("Function", bound=Callable[..., Any])
_failed: set[object] = set()


def _kind(value: Any) -> object:
    """What decides how a kernel is compiled: not the sizes of a tensor, but everything else."""
    if isinstance(value, Tensor):
        return value.device, value.dtype, value.dim(), value.stride(1) == 1 if value.dim() > 1 else None
    if isinstance(value, tuple):
        return tuple(_kind(element) for element in value)
    return value


def _is_ours(error: Exception) -> bool:
    """Whether an error is one of compiling or launching: not of memory, and not of an earlier kernel."""
    if isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError, MemoryError)):
        return False
    return "out of memory" not in str(error).lower()


def guarded(kernel: Function, plain: Function) -> Function:
    """Return `kernel` with `plain` in its place for calls like one that failed; the first such call warns."""

    @wraps(kernel)
    def run(*arguments: Any) -> Any:
        if _failed and (kernel.__name__, *map(_kind, arguments)) in _failed:
            return plain(*arguments)
        try:
            return kernel(*arguments)
        except Exception as error:
            if not _is_ours(error):
                raise
            cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        _failed.add((kernel.__name__, *map(_kind, arguments)))
        warnings.warn(
            f"spherenet computes {kernel.__name__} without Triton for calls like this one: {cause}",
            RuntimeWarning,
            stacklevel=2,
        )
        return plain(*arguments)

    return run  # type: ignore[return-value]
