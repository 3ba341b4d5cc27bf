"""The plain formula through torch's compiler, for devices without kernels of their own.

The formula is compiled out of place and with symbolic sizes, so one compilation serves every batch size. A compilation
that fails (no compiler, an unsupported device) leaves that kind of call to the plain formula, with one warning; errors
of the computation itself, such as running out of memory, propagate.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["compiled_or_plain"]

_log = logging.getLogger(__name__)
_compiled: dict[Callable[..., Tensor], Callable[..., Tensor]] = {}
_failed: set[object] = set()


def compiled_or_plain(formula: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Return formula(*arguments), compiled if that works for arguments of this kind."""
    key = (formula, *(_kind(value) for value in arguments))
    if key in _failed:
        return formula(*arguments)
    if formula not in _compiled:
        _compiled[formula] = torch.compile(formula, dynamic=True, fullgraph=True)
    try:
        return _compiled[formula](*arguments)
    except Exception as error:
        if not _is_compile_error(error):
            raise
        _failed.add(key)
        _log.warning("spherenet runs a layer without torch.compile: %s", str(error).splitlines()[0])
        return formula(*arguments)


def _kind(value: Any) -> object:
    """What decides whether a compilation is possible: not the sizes of a tensor, but everything else."""
    if isinstance(value, Tensor):
        return value.device.type, value.dtype, value.dim(), value.requires_grad
    return value if isinstance(value, (bool, str, tuple)) or value is None else type(value)


def _is_compile_error(error: Exception) -> bool:
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError

    return isinstance(error, (TorchDynamoException, InductorError))
