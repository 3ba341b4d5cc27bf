"""The plain formula through torch's compiler, for devices without other kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from spherenet._util.caches import use_private_compiler_cache
from spherenet.kernels.backends import Backend, Case
from spherenet.ops.operation import Operation, Parameters
from spherenet.ops.sphere_conv import sphere_conv

__all__ = ["BACKEND", "compiled_or_plain"]

_log = logging.getLogger(__name__)
_compiled: dict[object, Callable[..., Tensor]] = {}
_failed: set[object] = set()


def compiled_or_plain(formula: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Return formula(*arguments), compiled if that is possible for arguments like these.

    The formula is compiled once per signature, and once more when the batch size changes. If the compilation fails (no
    compiler, no private folder for its cache, an unsupported device), calls with this signature use the formula itself,
    and a warning is logged. Errors of the computation, such as running out of memory, propagate. Arguments other than
    tensors are constants for the compiler and must be hashable.
    """
    key = (formula, *(_signature(value) for value in arguments))
    if key in _failed:
        return formula(*arguments)
    try:
        if key not in _compiled:
            use_private_compiler_cache()
            _compiled[key] = torch.compile(_copy(formula), fullgraph=True)
        return _compiled[key](*arguments)
    except Exception as error:
        if not _is_compile_error(error):
            raise
        _failed.add(key)
        _log.warning("spherenet runs a layer without torch.compile: %s", str(error).splitlines()[0])
        return formula(*arguments)


def _signature(value: Any) -> object:
    """Return what decides whether a compilation is possible: everything but the sizes of tensors."""
    if isinstance(value, tuple):
        return tuple(_signature(element) for element in value)
    return (value.device.type, value.dtype, value.dim(), value.requires_grad) if isinstance(value, Tensor) else value


def _copy(function: Any) -> Callable[..., Tensor]:
    """Return a function with its own code object, because the compiler counts recompilations per code object."""
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

    return isinstance(error, (OSError, TorchDynamoException, InductorError))


class CompiledBackend(Backend):
    """The plain formula, compiled once per g, options and dtype."""

    name = "compiled"
    uses_autograd = True

    def supports(self, case: Case) -> bool:
        """Return whether g is built in: the compiler would fail for some functions of users."""
        return case.angle is not None and case.magnitude != 0

    def forward(
        self, x: Tensor, weight: Tensor, operation: Operation, parameters: Parameters, save_cosine: bool
    ) -> tuple[Tensor, None]:
        """Return the output. The class of g in place of the object lets layers with the same g share a compilation."""
        operation = operation._replace(angle=type(operation.angle))  # type: ignore[arg-type]
        return compiled_or_plain(sphere_conv, x, weight, operation, parameters), None


BACKEND = CompiledBackend()
