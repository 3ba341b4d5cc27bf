"""Choice of the implementation of layers, heads and losses, and all calls of private torch API.

| implementation | what it is | when |
|---|---|---|
| native | C++ library, `kernels/sphere_conv/native.py` | CPU tensors, if the library was built |
| triton | Triton kernels, `kernels/sphere_conv/triton` | CUDA and ROCm tensors, if Triton can be imported |
| compiled | the plain formula through `torch.compile` | other devices |
| plain | the plain formula of `ops/` | everything else: tracing, torch.func, forward mode, custom g |

`backend("reference")` selects the plain formula everywhere. tests/kernels/test_dispatch.py fails when torch changes a
private function that this module calls.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Module, Parameter
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _get_current_dispatch_mode

from spherenet._util.caches import use_private_compiler_cache
from spherenet._util.validation import require_one_of
from spherenet.kernels.sphere_conv import native

__all__ = [
    "BACKENDS",
    "ChangeDetector",
    "backend",
    "below_autograd",
    "blockwise",
    "can_read_values",
    "compiled_or_plain",
    "current_backend",
    "has_global_hooks",
    "implementation",
    "implementation_name",
    "is_traced",
    "kernels_of",
    "leave_out_of_ddp",
    "needs_operators",
]

BACKENDS = ("auto", "native", "triton", "compiled", "reference")
_ALIASES = {"fused": "auto"}
_global_backend = "auto"
_local_backend: ContextVar[str | None] = ContextVar("spherenet_backend", default=None)

LARGE_MAP = 1 << 19
"""Number of elements from which heads and losses process their classes in blocks: 2 MB of float32, one block.

Smaller maps have nothing to divide. For larger ones each whole-tensor operation leaves the cache, and a buffer of that
size may be returned to the system when it is freed, so that the next operation has to map its pages again."""


class backend:  # noqa: N801
    """Choose the implementation of layers, heads and losses.

        sn.backend("reference")            # from now on, in all threads
        with sn.backend("reference"):      # inside the block, in this thread
            loss = model(images, labels)

    Args:
        name: "auto" (the default), "reference" for the plain differentiable formulas, or one implementation: "native",
            "triton" or "compiled". Calls that a named implementation does not support (tracing, torch.func,
            forward-mode derivatives, custom g) use the plain formula.

    Raises:
        ValueError: If the name is unknown or the implementation is not available.
    """

    def __init__(self, name: str) -> None:
        global _global_backend
        self._name = require_one_of("backend", _ALIASES.get(name, name), BACKENDS)
        if self._name == "native" and not native.available():
            raise ValueError("backend must not be 'native': the native kernels are not available.")
        if self._name == "triton" and not _has_triton():
            raise ValueError("backend must not be 'triton': Triton cannot be imported.")
        self._before: str | None = _global_backend
        self._tokens: list[Token[str | None]] = []
        _global_backend = self._name

    def __enter__(self) -> None:
        global _global_backend
        if self._before is not None:  # used in a with statement: the choice is local
            _global_backend, self._before = self._before, None
        self._tokens.append(_local_backend.set(self._name))

    def __exit__(self, *_: object) -> None:
        _local_backend.reset(self._tokens.pop())


def current_backend() -> str:
    """Return the name of the backend in use, "auto" by default."""
    return _local_backend.get() or _global_backend


def implementation(
    x: Tensor, *parameters: Tensor | float | None, has_kernel: bool = True, native_only: bool = False
) -> str:
    """Return the name of the implementation for an input: "native", "triton", "compiled" or "plain".

    Args:
        x: Input of the layer.
        parameters: Its weight, and its other parameters. Kernels read memory without a check, so that all must be on
            the device of x; for others the plain formula raises torch's error.
        has_kernel: Whether there is a kernel for the layer's angle function.
        native_only: Whether only the native kernels support the layer: centered layers, magnitude functions and some
            angle functions. For dispatch modes and tensor subclasses the plain formula is used, which consists of
            torch's own operators.
    """
    if torch.compiler.is_compiling():  # the compiler cannot read a context variable
        return "plain"
    name = _local_backend.get() or _global_backend
    if not has_kernel or name == "reference" or x.numel() == 0 or is_traced(x) or forward_ad._current_level >= 0:
        return "plain"
    name = _of_device(x.device.type) if name == "auto" else name
    if name == "native" and not x.is_cpu:
        return "plain"
    tensors = [value for value in parameters if isinstance(value, Tensor)]
    if any(value.device != x.device for value in tensors):
        return "plain"
    if native_only and (name == "triton" or needs_operators(x, *tensors[:1])):
        return "plain"
    return name


@lru_cache(maxsize=16)
def _of_device(device_type: str) -> str:
    if device_type == "cpu":
        return "native" if native.available() else "plain"
    if device_type == "cuda":
        return "triton" if _has_triton() else "plain"
    return "plain" if device_type == "meta" else "compiled"


def implementation_name(device_type: str) -> str:
    """Return the implementation of layers on a device for display, e.g. "native (avx512)"."""
    chosen = current_backend()
    name = {"auto": _of_device(device_type), "reference": "plain"}.get(chosen, chosen)
    return f"native ({native.instruction_set()})" if name == "native" else name


@lru_cache(maxsize=4)
def kernels_of(name: str) -> ModuleType:
    """Return the module of an implementation: "native" or "triton".

    Both have the functions `unit_weight`, `unit_weight_backward`, `forward`, `backward` and `correct`.
    """
    if name == "native":
        return native
    use_private_compiler_cache()
    return importlib.import_module("spherenet.kernels.sphere_conv.triton")


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    """Return whether the Triton kernels can be imported; called for GPU tensors only, because the import is slow."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        kernels_of("triton")
    except Exception as error:  # Triton of another version, or for another system
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(f"spherenet runs without Triton, which cannot be imported: {cause}", RuntimeWarning, stacklevel=2)
        return False
    return True


def blockwise(elements: int, *tensors: Tensor) -> bool:
    """Return whether heads and losses should process a map of this many elements in blocks.

    False while tracing, because a compiler fuses the plain form, and for forward-mode derivatives, which only the plain
    form has.
    """
    if elements < LARGE_MAP or is_traced(*tensors) or forward_ad._current_level >= 0:
        return False
    return current_backend() != "reference"


# --- private torch API -----------------------------------------------------------------------------------------


def is_traced(*tensors: Tensor) -> bool:
    """Return whether values cannot be read or kernels not be called: torch.compile, export, jit.trace, torch.func."""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    if torch._C._is_tracing():  # torch.jit.trace
        return True
    functorch = torch._C._functorch  # torch.autograd.grad(is_grads_batched=True) uses the legacy form
    return any(functorch.is_functorch_wrapped_tensor(t) or functorch.is_legacy_batchedtensor(t) for t in tensors)


def can_read_values(tensor: Tensor) -> bool:
    """Return whether the values of a tensor can be checked; on a GPU a check would synchronize every step."""
    return tensor.device.type == "cpu" and not is_traced(tensor)


def needs_operators(*tensors: Tensor) -> bool:
    """Return whether kernels must be called through torch's dispatcher: for dispatch modes and tensor subclasses."""
    if _get_current_dispatch_mode() is not None:
        return True
    return any(type(tensor) is not Tensor and type(tensor) is not Parameter for tensor in tensors)


def has_global_hooks() -> bool:
    """Return whether torch calls hooks for every module, which fused layers would skip."""
    return bool(_has_any_global_hook())  # type: ignore[no-untyped-call]


def below_autograd() -> AbstractContextManager[object]:
    """Return a context in which operators run without autograd, for the implementation of an autograd kernel."""
    return torch._C._AutoDispatchBelowAutograd()


def leave_out_of_ddp(model: Module, names: Sequence[str]) -> None:
    """Let DDP neither copy nor reduce these parameters of a model that is wrapped afterwards."""
    if names:
        ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        ignore(model, list(names))


@lru_cache(maxsize=64)
def _empty(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


class ChangeDetector:
    """Detect whether a tensor has been changed in place.

    Autograd refuses a saved tensor that was changed, and an in-place ReLU after a layer is common. The detector keeps
    an alias that shares the tensor's version counter but not its memory.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._alias = tensor.detach()
        if not needs_operators(tensor):  # dispatch modes do not support this assignment
            self._alias.data = _empty(tensor.dtype, tensor.device)
        self._version = self._alias._version

    @property
    def changed(self) -> bool:
        """Whether the tensor has been written to."""
        return self._alias._version != self._version


# --- the plain formula through torch's compiler ------------------------------------------------------------------

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
