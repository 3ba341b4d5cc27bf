"""The plain formula through torch's compiler, for devices without kernels of their own.

The formula is compiled out of place, once per kind of layer and once more when the batch size changes. A compilation
that fails (no compiler, an unsupported device) leaves that kind of call to the plain formula, with one warning; errors
of the computation itself, such as running out of memory, propagate.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

__all__ = ["compiled_or_plain"]

_log = logging.getLogger(__name__)
_compiled: dict[object, Callable[..., Tensor]] = {}
_failed: set[object] = set()


def compiled_or_plain(formula: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Return formula(*arguments), compiled if that works for arguments of this kind.

    All arguments but tensors are constants to the compiler and must be hashable.
    """
    key = (formula, *(_kind(value) for value in arguments))
    if key in _failed:
        return formula(*arguments)
    if key not in _compiled:
        _compiled[key] = torch.compile(_copy(formula), fullgraph=True)
    try:
        return _compiled[key](*arguments)
    except Exception as error:
        if not _is_compile_error(error):
            raise
        _failed.add(key)
        _log.warning("spherenet runs a layer without torch.compile: %s", str(error).splitlines()[0])
        return formula(*arguments)


def _kind(value: Any) -> object:
    """What decides whether a compilation is possible: not the sizes of a tensor, but everything else."""
    return (value.device.type, value.dtype, value.dim(), value.requires_grad) if isinstance(value, Tensor) else value


def _copy(function: Any) -> Callable[..., Tensor]:
    """The same function with a code object of its own: the compiler counts recompilations of a code object."""
    return FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


def _is_compile_error(error: Exception) -> bool:
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError

    return isinstance(error, (TorchDynamoException, InductorError))
