"""Which implementation runs, for layers, heads and losses: the only place that decides, and that knows torch's insides.

| implementation | what it is | when |
|---|---|---|
| native | C++ library, `kernels/native.py` | CPU tensors, if the library was built |
| triton | Triton kernels, `kernels/triton` | CUDA and ROCm tensors, if Triton can be imported |
| compiled | the plain formula through `torch.compile` | other devices |
| plain | the plain formula of `ops/` | everything else: tracing, torch.func, forward mode, g of your own |

`backend("reference")` switches to the plain formula everywhere. Private torch API is called in this module only, behind
functions that say what they ask; tests/kernels/test_dispatch.py fails when torch changes one of them.

The plain formula through torch's compiler, for devices without kernels of their own.

The formula is compiled out of place, once per kind of layer and once more when the batch size changes. A compilation
that fails (no compiler, an unsupported device) leaves that kind of call to the plain formula, with one warning; errors
of the computation itself, such as running out of memory, propagate.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import _get_current_dispatch_mode

from spherenet.kernels import native
from spherenet.validation import require_one_of

__all__ = [
    "BACKENDS",
    "ChangeDetector",
    "backend",
    "below_autograd",
    "blockwise",
    "can_look_at_values",
    "compiled_or_plain",
    "current_backend",
    "implementation",
    "implementation_name",
    "is_traced",
    "kernels_of",
    "needs_operators",
]

BACKENDS = ("auto", "native", "triton", "compiled", "reference")
_ALIASES = {"fused": "auto"}
_backend: ContextVar[str] = ContextVar("spherenet_backend", default="auto")

LARGE_MAP = 1 << 19
"""Elements from which heads and losses walk over their classes in blocks: 2 MB of float32, the size of one block.

Below there is nothing to divide. Above, each whole-tensor operation leaves the cache, and a buffer of that size may go
back to the system when it is freed, so that the next operation pays for its pages again."""


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Choose the implementation of layers, heads and losses inside a `with` block.

    Args:
        name: "auto" (the default outside), "reference" for the plain differentiable formulas, or the name of one
            implementation: "native", "triton" or "compiled". A named one still leaves to the plain formula what it
            cannot do (tracing, torch.func, forward-mode derivatives, g of your own).

    Raises:
        ValueError: if the name is unknown, or the implementation is not available.
    """
    name = _ALIASES.get(name, name)
    require_one_of("backend", name, BACKENDS)
    if name == "native" and not native.available():
        raise ValueError("backend must not be 'native': the native kernels are not available.")
    if name == "triton" and not _has_triton():
        raise ValueError("backend must not be 'triton': Triton cannot be imported.")
    token = _backend.set(name)
    try:
        yield
    finally:
        _backend.reset(token)


def current_backend() -> str:
    """The name that `backend` was given last, "auto" outside of it."""
    return _backend.get()


def implementation(x: Tensor, *, has_kernel: bool = True) -> str:
    """Return which implementation serves an input: "native", "triton", "compiled" or "plain".

    Args:
        x: the layer's input.
        has_kernel: whether the kernels know the layer's angle function.
    """
    if torch.compiler.is_compiling():  # the compiler cannot look into a context variable
        return "plain"
    chosen = _backend.get()
    if not has_kernel or chosen == "reference" or x.numel() == 0 or is_traced(x) or _in_forward_mode():
        return "plain"
    return _of_device(x.device.type) if chosen == "auto" else chosen


@lru_cache(maxsize=16)
def _of_device(device_type: str) -> str:
    if device_type == "cpu":
        return "native" if native.available() else "plain"
    if device_type == "cuda":
        return "triton" if _has_triton() else "plain"
    return "plain" if device_type == "meta" else "compiled"


def implementation_name(device_type: str) -> str:
    """Return the implementation of a device's layers in words, e.g. "native (avx512)"."""
    chosen = _backend.get()
    name = {"auto": _of_device(device_type), "reference": "plain"}.get(chosen, chosen)
    return f"native ({native.instruction_set()})" if name == "native" else name


def kernels_of(name: str) -> ModuleType:
    """Return the module with the five functions of `kernels/interface.py`."""
    if name == "native":
        return native
    return importlib.import_module("spherenet.kernels.triton")


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    """Whether the Triton kernels can be imported; asked for GPU tensors only, so that nobody else imports them."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        kernels_of("triton")
    except Exception as error:  # a Triton of another version, or one that does not fit this system
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(f"spherenet runs without Triton, which cannot be imported: {cause}", RuntimeWarning, stacklevel=2)
        return False
    return True


def blockwise(elements: int, *tensors: Tensor) -> bool:
    """Whether heads and losses should walk over a map of this many elements in blocks.

    Never while tracing, when a compiler fuses the plain form by itself, nor under forward-mode derivatives, which only
    the plain form has.
    """
    if elements < LARGE_MAP or is_traced(*tensors) or _in_forward_mode():
        return False
    return _backend.get() != "reference"


# --- private torch API -----------------------------------------------------------------------------------------


def is_traced(*tensors: Tensor) -> bool:
    """Whether values cannot be looked at now: inside torch.compile, torch.export or a torch.func transform."""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in tensors)


def can_look_at_values(tensor: Tensor) -> bool:
    """Whether the values of a tensor can be checked now.

    They are at hand on the CPU alone: elsewhere a check would make every step wait for the device.
    """
    return tensor.device.type == "cpu" and not is_traced(tensor)


def _in_forward_mode() -> bool:
    """Whether a forward-mode derivative is being taken."""
    return torch.autograd.forward_ad._current_level >= 0


def needs_operators(*tensors: Tensor) -> bool:
    """Whether calls must go through torch's dispatcher: a mode watches every operation, or a tensor is a subclass."""
    if _get_current_dispatch_mode() is not None:
        return True
    return any(type(tensor) is not Tensor and type(tensor) is not Parameter for tensor in tensors)


def below_autograd() -> AbstractContextManager[object]:
    """A context in which operators run without autograd, for the inside of an autograd kernel."""
    return torch._C._AutoDispatchBelowAutograd()


@lru_cache(maxsize=64)
def _empty(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


class ChangeDetector:
    """Notices whether a tensor has been changed in place since.

    Autograd refuses a saved tensor that was changed, and an in-place ReLU after a layer is what everybody writes. This
    keeps an alias that shares the tensor's version counter but none of its memory.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._alias = tensor.detach()
        if not needs_operators(tensor):  # tools that watch every operation do not know this one
            self._alias.data = _empty(tensor.dtype, tensor.device)
        self._version = self._alias._version

    @property
    def changed(self) -> bool:
        """Whether somebody has written to the tensor."""
        return self._alias._version != self._version


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
