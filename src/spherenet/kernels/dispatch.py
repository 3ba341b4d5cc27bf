"""The one place that decides how a layer, head or loss is computed, and what is saved for backward.

| backend | what it is | when |
|---|---|---|
| native | C++ library, `sphere_conv/native.py` | CPU tensors, if the library was built |
| triton | Triton kernels, `sphere_conv/triton` | CUDA and ROCm tensors, if Triton can be imported |
| compiled | the plain formula through `torch.compile`, `compiled.py` | other devices |
| plain | the plain formula of `ops/` | everything else: tracing, torch.func, dispatch modes, subclasses, custom g |

`sphere_layer` is the way of every layer: check, choose (`choose`), ask the gate whether kernels may
read the memory of the tensors (`readable`), run. Fused backends run inside `SphereConvFunction`:

    forward    c = P·r,  out = β·(h·g(c) + b) + γ               P the convolution's output, r = 1/‖patch‖, h = h(1/r)
    backward   D = ∂L/∂P = grad·β·h·g'(c)·r,  s = r·Σ grad·β·(r·h·g'(c)·c − h'·g(c)) over the filters of a group
               gx = convᵀ(D) − x·m + n,  m and n the transposed window sums of s and of s·mean(patch)

h = 1 unless the layer has a magnitude function (Eq. 15), and n = 0 unless its patches are centered (Eq. 14). Like a
convolution the layer saves its input and weight, and beside them 1/‖patch‖ and its own output, which takes no memory if
the next layer saves its input (BatchNorm does): the cosine is recovered from it. In half precision (unless g = cos),
with an affine map, a magnitude function or a g that does not determine the cosine, the cosine is saved instead.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from spherenet._util.caches import use_private_compiler_cache
from spherenet._util.validation import require_one_of
from spherenet.angles.elementary import gradients_of
from spherenet.errors import InvalidArgument
from spherenet.kernels import library
from spherenet.kernels.backends import Backend, BackendError, Case, Pass, PlainBackend, Saved
from spherenet.kernels.convolution import current_algorithm
from spherenet.kernels.torch_internals import is_transformed, readable
from spherenet.ops import sphere_conv as plain
from spherenet.ops.geometry import resolve_padding
from spherenet.ops.norms import autocast_is_on, without_autocast
from spherenet.ops.operation import Operation, Parameters, check_dtypes, check_shapes, dequantized, require_per_filter

__all__ = [
    "BACKENDS",
    "SphereConvFunction",
    "backend",
    "blockwise",
    "choose",
    "current_backend",
    "implementation_name",
    "per_filter",
    "set_backend",
    "sphere_layer",
]

BACKENDS, PLAIN = ("auto", "native", "triton", "compiled", "reference"), PlainBackend()
_MODULES = {"native": "sphere_conv.native", "triton": "sphere_conv.triton", "compiled": "compiled"}
_global_backend = "auto"
_local_backend: ContextVar[str | None] = ContextVar("spherenet_backend", default=None)

LARGE_MAP = 1 << 19
"""Number of elements from which heads and losses process their classes in blocks: 2 MB of float32, one block.

For larger maps each whole-tensor operation leaves the cache, and the system maps the pages of each buffer again."""


# --- the user's choice ---------------------------------------------------------------------------------------------


def set_backend(name: str) -> None:
    """Choose the implementation of layers, heads and losses from now on, in all threads.

    Args:
        name: "auto" (the default), "reference" for the plain differentiable formulas, or one implementation: "native",
            "triton" or "compiled". Calls that a named implementation does not support (tracing, torch.func,
            forward-mode derivatives, custom g) use the plain formula.

    Raises:
        ValueError: If the name is unknown or the implementation is not available.
    """
    global _global_backend
    _global_backend = _require_available(name)


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Choose the implementation inside a `with` block, in this thread: `with sn.backend("reference"): …`.

    Args:
        name: As in `set_backend`.

    Raises:
        ValueError: As in `set_backend`.
    """
    token = _local_backend.set(_require_available(name))
    try:
        yield
    finally:
        _local_backend.reset(token)


def current_backend() -> str:
    """Return the name of the backend in use, "auto" by default."""
    return _local_backend.get() or _global_backend


def _require_available(name: str) -> str:
    require_one_of("backend", name, BACKENDS)
    if name == "native" and not library.available():
        raise InvalidArgument("backend", "must not be 'native': the native kernels are not available.")
    if name == "triton" and not _has_triton():
        raise InvalidArgument("backend", "must not be 'triton': Triton cannot be imported.")
    return name


# --- the choice ----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def choose(name: str, case: Case) -> Backend:
    """Check the shapes of a case and return the first backend that supports it; asked once per case."""
    check_shapes(case.x_shape, case.weight_shape, case.geometry)
    if 0 not in case.x_shape:
        for candidate in _candidates(name, case.device_type):
            if candidate.supports(case):
                return candidate
    return PLAIN


@lru_cache(maxsize=32)
def _candidates(name: str, device_type: str) -> tuple[Backend, ...]:
    """Return the backends to ask, in order, for a choice of the user."""
    if name == "auto":
        name = {"cpu": "native", "cuda": "triton", "meta": "reference"}.get(device_type, "compiled")
    if name == "reference" or (name == "native" and not (device_type == "cpu" and library.available())):
        return ()
    if name == "triton" and not _has_triton():
        return ()
    return (_load(name),)


@lru_cache(maxsize=8)
def _load(name: str) -> Backend:
    """Return a backend by name; its module is imported here, because the import of a compiler is slow."""
    if name != "native":
        use_private_compiler_cache()
    loaded: Backend = importlib.import_module(f"spherenet.kernels.{_MODULES[name]}").BACKEND
    return loaded


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    """Return whether the Triton kernels can be imported; called for GPU tensors only, because the import is slow."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        _load("triton")
    except Exception as error:  # Triton of another version, or for another system
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(f"spherenet runs without Triton, which cannot be imported: {cause}", RuntimeWarning, stacklevel=2)
        return False
    return True


def implementation_name(device_type: str) -> str:
    """Return the implementation of layers on a device for display, e.g. "native (avx512, winograd)"."""
    name = (_candidates(current_backend(), device_type) or (PLAIN,))[0].name
    return f"native ({library.instruction_set()}, {current_algorithm()})" if name == "native" else name


def blockwise(elements: int, *tensors: Tensor) -> bool:
    """Return whether heads and losses should process a map of this many elements in blocks.

    False while tracing, because a compiler fuses the plain form, and under transforms, which only the plain form has.
    Blocks consist of torch's own operators, so that dispatch modes see them.
    """
    if elements < LARGE_MAP or torch.compiler.is_compiling() or current_backend() == "reference":
        return False
    return not is_transformed(*tensors)


# --- layers --------------------------------------------------------------------------------------------------------


def sphere_layer(
    input: Tensor, weight: Tensor, operation: Operation, parameters: Parameters, *, checked: bool = False
) -> Tensor:
    """Check the tensors of a sphere layer and return its output: the way of all functions and layers.

    Args:
        input: Batched or unbatched input.
        weight: Kernels [O, C/groups, *kernel], [C, O/groups, *kernel] if the geometry is transposed, or [out, in].
        operation: What the layer computes, with padding in any form that torch.nn accepts.
        parameters: Its tensors; None for k and radius takes those of the angle and magnitude function.
        checked: Whether the dtypes have been checked.
    """
    angle, geometry, _, center, magnitude = operation
    k, bias, beta, gamma, radius = parameters
    if type(weight) is not Parameter:
        weight = dequantized(weight)
    if not checked and (not isinstance(input, Tensor) or input.dtype != weight.dtype or not input.is_floating_point()):
        check_dtypes(input, weight)
    compiling = torch.compiler.is_compiling()
    if (compiling or torch._C._is_any_autocast_enabled()) and autocast_is_on(input):
        x = input if input.dtype == torch.float64 else input.to(torch.get_autocast_dtype(input.device.type))
        with without_autocast(x):
            return sphere_layer(x, weight, operation, parameters, checked=True)
    if k is None:
        k = angle.k
    if radius is None and magnitude is not None:
        radius = magnitude.radius
    if not (k is bias is beta is gamma is radius is None):
        parameters = Parameters(k, bias, beta, gamma, radius)
        require_per_filter(geometry.filters(weight), **parameters._asdict())
    if compiling:  # the compiler can read neither a context variable nor a cache
        check_shapes(input.shape, weight.shape, geometry)
        chosen: Backend = PLAIN
    else:
        h = None if magnitude is None else magnitude.kernel_id or 0
        case = Case(input.device.type, input.dtype, angle.kernel_id, h, center, geometry, input.shape, weight.shape)
        chosen = choose(_local_backend.get() or _global_backend, case)
    x, dims = input, weight.dim()
    if dims > 2 and (geometry.padding_mode != "zeros" or isinstance(geometry.padding, str)):
        x, geometry = resolve_padding(x, geometry)
        operation = operation._replace(geometry=geometry)
    if x.dim() != dims:
        x = x.unsqueeze(0) if dims > 2 else x.reshape(-1, weight.shape[1])
    chosen = chosen if chosen is PLAIN or readable(x, weight, k, bias, beta, gamma, radius) else PLAIN
    if not (chosen.uses_autograd or bias is beta is gamma is None):
        bias, beta, gamma = (per_filter(value, weight) for value in (bias, beta, gamma))
        parameters = Parameters(k, bias, beta, gamma, radius)
    is_learned = torch.is_grad_enabled() and (
        x.requires_grad
        or weight.requires_grad
        or any(isinstance(value, Tensor) and value.requires_grad for value in parameters)
    )
    out: Tensor
    try:
        if chosen.uses_autograd or not is_learned:
            out = chosen.infer(x, weight, operation, parameters)
        else:
            out = SphereConvFunction.apply(x, weight, *parameters, operation, chosen)  # type: ignore[no-untyped-call]
    except BackendError:
        out = plain.sphere_conv(x, weight, operation, parameters)
    if input.dim() == dims:
        return out
    return out.squeeze(0) if dims > 2 else out.reshape(*input.shape[:-1], weight.shape[0])


def per_filter(value: Tensor | float | None, weight: Tensor) -> Tensor | None:
    """Return a number per filter as the kernels take it: a tensor [filters]."""
    if value is None or isinstance(value, Tensor):
        return value if value is None or value.shape == weight.shape[:1] else value.expand(weight.shape[0])
    return torch.full((weight.shape[0],), value, dtype=weight.dtype, device=weight.device)


@lru_cache(maxsize=64)
def _empty(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


class SphereConvFunction(torch.autograd.Function):
    """A fused backend for autograd; for double backward, autograd differentiates the plain formula."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        """Return the output; inputs are x, weight, the five parameters, the operation and the backend."""
        x, weight, k, bias, beta, gamma, radius, operation, chosen = inputs
        angle = operation.angle
        save_cosine = (
            not (bias is beta is gamma is None)
            or operation.magnitude is not None
            or not angle.is_recoverable
            or (x.element_size() < 4 and not angle.is_identity)
        )
        out: Tensor
        out, saved = chosen.forward(x, weight, operation, Parameters(*inputs[2:7]), save_cosine)
        ctx.set_materialize_grads(False)
        ctx.operation, ctx.backend, ctx.plan, ctx.alias, saved_map = operation, chosen, saved.plan, None, saved.map
        if not save_cosine:
            # An in-place ReLU after a layer is common, and autograd refuses a saved tensor that was changed. The alias
            # shares the version counter of the output but not its memory.
            saved_map, alias = out.data, out.detach()
            alias.data = _empty(out.dtype, out.device)
            ctx.alias, ctx.version = alias, alias._version
        ctx.constants = None if isinstance(k, Tensor) else k, None if isinstance(radius, Tensor) else radius
        ctx.save_for_backward(
            x, weight, k if isinstance(k, Tensor) else None, bias, beta, gamma,
            radius if isinstance(radius, Tensor) else None,
            saved.unit_weight, saved.scale, saved.inverse_norm, saved_map, saved.mean,
        )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        """Return the gradients of x, weight and the five parameters."""
        if grad is None:
            return (None,) * 9
        x, weight, k, bias, beta, gamma, radius, unit_weight, scale, inverse_norm, saved_map, mean = ctx.saved_tensors
        operation: Operation = ctx.operation
        constant_k, constant_radius = ctx.constants
        k, radius = constant_k if k is None else k, constant_radius if radius is None else radius
        parameters = Parameters(k, bias, beta, gamma, radius)
        if torch.is_grad_enabled() or not readable(grad, x):  # create_graph=True, a batch of gradients, a mode
            return _plain_gradients(grad, x, weight, operation, parameters, ctx.needs_input_grad)
        is_output = ctx.alias is not None
        if is_output and ctx.alias._version != ctx.version:  # changed in place: convolve again
            saved_map, is_output = plain.cosines(x, unit_weight, operation), False
        saved = Saved(unit_weight, scale, inverse_norm, saved_map, mean, is_output, ctx.plan)
        needs = ctx.needs_input_grad[:7]
        try:
            gradients = ctx.backend.backward(grad, x, weight.dtype, Pass(operation, parameters, saved, needs))
        except BackendError:
            return _plain_gradients(grad, x, weight, operation, parameters, needs)
        return *gradients, None, None


def _plain_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, operation: Operation, parameters: Parameters, needs: Any
) -> tuple[Any, ...]:
    """Return the gradients of the plain formula, which can be differentiated again."""

    def formula(x: Tensor, weight: Tensor, *values: Any) -> list[Tensor]:
        return [plain.sphere_conv(x, weight, operation, Parameters(*values)).to(grad.dtype)]

    gradients = gradients_of(formula, (x, weight, *parameters), [grad])
    return (*(value if need else None for value, need in zip(gradients, needs[:7], strict=True)), None, None)
