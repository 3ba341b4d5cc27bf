"""The one place that decides how a layer, head or loss is computed, and that touches private torch API.

| backend | what it is | when |
|---|---|---|
| winograd | C++ library, `sphere_conv/winograd.py` | 3×3 convolutions of CPU tensors where it is faster than native |
| native | C++ library, `sphere_conv/native.py` | other CPU tensors, if the library was built |
| triton | Triton kernels, `sphere_conv/triton` | CUDA and ROCm tensors, if Triton can be imported |
| compiled | the plain formula through `torch.compile`, `compiled.py` | other devices |
| plain | the plain formula of `ops/` | everything else: tracing, torch.func, dispatch modes, subclasses, custom g |

`sphere_layer` is the way of every layer: check, choose (`choose`), ask the gate whether kernels may read the memory of
the tensors (`readable`), run. Fused backends run inside `SphereConvFunction`:

    forward    c = P·r,  out = β·(h·g(c) + b) + γ               P the convolution's output, r = 1/‖patch‖, h = h(1/r)
    backward   D = ∂L/∂P = grad·β·h·g'(c)·r,  s = r·Σ grad·β·(r·h·g'(c)·c − h'·g(c)) over the filters of a group
               gx = convᵀ(D) − x·m + n,  m and n the transposed window sums of s and of s·mean(patch)

h = 1 unless the layer has a magnitude function (Eq. 15), and n = 0 unless its patches are centered (Eq. 14). Like a
convolution the layer saves its input and weight, and beside them 1/‖patch‖ and its own output, which takes no memory if
the next layer saves its input (BatchNorm does): the cosine is recovered from it. In half precision (unless g = cos),
with an affine map, a magnitude function or a g that does not determine the cosine, the cosine is saved instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Module, Parameter
from torch.nn.modules import module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

from spherenet.angles.elementary import gradients_of
from spherenet.kernels import library
from spherenet.kernels.backends import Backend, BackendError, Case, Pass, PlainBackend, Saved, has_triton, load_backend
from spherenet.kernels.settings import BACKEND, CONVOLUTION
from spherenet.kernels.sphere_conv import winograd
from spherenet.ops import sphere_conv as plain
from spherenet.ops.geometry import Geometry, resolve_padding
from spherenet.ops.norms import autocast_is_on, without_autocast
from spherenet.ops.operation import Operation, Parameters, check_dtypes, check_shapes, dequantized, require_per_filter

__all__ = [
    "SphereConvFunction",
    "allows_kernels",
    "blockwise",
    "can_read_values",
    "choose",
    "convolution_plan",
    "has_global_hooks",
    "implementation_name",
    "is_transformed",
    "leave_out_of_ddp",
    "per_filter",
    "readable",
    "serves_recurrence",
    "sphere_layer",
    "without_modes",
]

PLAIN = PlainBackend()

LARGE_MAP = 1 << 19
"""Number of elements from which heads and losses process their classes in blocks: 2 MB of float32, one block.

For larger maps each whole-tensor operation leaves the cache, and the system maps the pages of each buffer again."""


# --- the choice ----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def choose(case: Case) -> Backend:
    """Check the shapes of a case and return the first backend that supports it; asked once per case."""
    check_shapes(case.x_shape, case.weight_shape, case.geometry)
    if 0 not in case.x_shape:
        for candidate in _candidates(case.backend, case.device_type):
            if candidate.supports(case):
                return candidate.prepared(case)
    return PLAIN


@lru_cache(maxsize=32)
def _candidates(name: str, device_type: str) -> tuple[Backend, ...]:
    """Return the backends to ask, in order, for a choice of the user."""
    if name == "auto":
        name = {"cpu": "native", "cuda": "triton", "meta": "reference"}.get(device_type, "compiled")
    if name == "native" and device_type == "cpu" and library.available():
        return load_backend("winograd"), load_backend("native")
    if name in ("reference", "native") or (name == "triton" and not has_triton()):
        return ()
    return (load_backend(name),)


def implementation_name(device_type: str) -> str:
    """Return the implementation of layers on a device for display, e.g. "native (avx512, winograd)"."""
    name = (_candidates(BACKEND.current(), device_type) or (PLAIN,))[-1].name
    if name != "native":
        return name
    return f"native ({library.instruction_set()}, {'direct' if CONVOLUTION.current() == 'direct' else 'winograd'})"


def blockwise(elements: int, *tensors: Tensor) -> bool:
    """Return whether heads and losses should process a map of this many elements in blocks.

    False while tracing, because a compiler fuses the plain form, and under transforms, which only the plain form has.
    Blocks consist of torch's own operators, so that dispatch modes see them.
    """
    if elements < LARGE_MAP or torch.compiler.is_compiling() or not allows_kernels():
        return False
    return not is_transformed(*tensors)


def allows_kernels() -> bool:
    """Return whether heads and losses may use kernels where they have one."""
    return BACKEND.current() != "reference"


def serves_recurrence(h: Tensor, weight: Tensor, operation: Operation) -> bool:
    """Return whether the native kernels compute a recurrent layer with states h [N, H]."""
    case = Case(
        BACKEND.current(), "direct", torch.get_num_threads(), h.device.type, h.dtype, operation.angle.kernel_id, None,
        None, operation.geometry, h.shape, h.stride(), weight.shape,
    )  # fmt: skip
    return choose(case).name == "native"


def convolution_plan(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> winograd.Plan | None:
    """Return how the engine of sphere layers computes a plain convolution of a batch, or None if torch computes it."""
    if torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled() or x.dtype != weight.dtype:
        return None
    if winograd.BACKEND not in _candidates(BACKEND.current(), x.device.type) or not readable(x, weight, bias):
        return None
    return winograd.plan_for(x, weight.shape[0], geometry)


# --- the gate ------------------------------------------------------------------------------------------------------

_functorch = torch._C._functorch
_dispatch_keys, _dispatch_modes = torch._C._dispatch_keys, torch._C._len_torch_dispatch_stack
_comparable = getattr(torch._C.DispatchKeySet, "raw_repr", str)  # torch < 2.5 has the text only


@lru_cache(maxsize=16)
def _plain_keys(device_type: str) -> frozenset[int | str]:
    """Return the dispatch keys of plain tensors on a device, in and out of inference mode, to compare."""
    tensors = [torch.empty(0, device=device_type)]
    with torch.inference_mode():
        tensors.append(torch.empty(0, device=device_type))
    return frozenset(_comparable(_dispatch_keys(tensor)) for tensor in tensors)


_CPU_KEYS = _plain_keys("cpu")


def readable(*tensors: Tensor | float | None) -> bool:
    """Return whether kernels may read the memory of these tensors; entries that are not tensors do not matter.

    A kernel takes an address. Only plain strided tensors and parameters have one that it may use: not subclasses
    (quantized, sharded, fake), not tensors whose dispatch keys say that they are conjugated, negated, functional,
    batched, zero or sparse, not tensors of several devices, and none at all while a dispatch mode watches every
    operation or a transform traces it.

    Raises:
        RuntimeError: If the memory of a plain tensor was freed; torch's own operations would read it.
    """
    if torch.compiler.is_compiling() or _dispatch_modes() or torch._C._is_tracing():
        return False
    if _functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return False
    home = None
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            continue
        kind, keys, device = type(tensor), _comparable(_dispatch_keys(tensor)), tensor.device
        if kind is not Tensor and kind is not Parameter:
            return False
        if keys not in _CPU_KEYS and (tensor.is_cpu or tensor.is_meta or keys not in _plain_keys(device.type)):
            return False
        if home is not None and device != home:
            return False
        home = device
        end, size = tensor.storage_offset(), tensor.untyped_storage().nbytes()
        if tensor.is_contiguous():
            end += tensor.numel()
        elif tensor.numel():
            end += 1
            for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
                end += (length - 1) * stride
        if end * tensor.element_size() > size and tensor.numel():
            raise RuntimeError(
                f"tensor must have allocated memory, got shape {list(tensor.shape)} in a storage of {size} bytes."
            )
    return True


def is_transformed(*tensors: Tensor) -> bool:
    """Return whether `torch.jit.trace` records, or a transform of `torch.func` or a forward derivative is active."""
    if torch._C._is_tracing() or _functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return True
    wrapped = _functorch.is_functorch_wrapped_tensor, _functorch.is_legacy_batchedtensor
    return any(is_wrapped(tensor) for tensor in tensors for is_wrapped in wrapped)


def can_read_values(tensor: Tensor) -> bool:
    """Return whether the values of a tensor can be checked; on a GPU a check would synchronize every step."""
    return not torch.compiler.is_compiling() and tensor.is_cpu and readable(tensor)


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
    x, dims = input, weight.dim()
    is_batch = x.dim() == dims
    if compiling or not is_batch or geometry.padding_mode != "zeros" or isinstance(geometry.padding, str):
        check_shapes(x.shape, weight.shape, geometry)
        if dims > 2:
            x, geometry = resolve_padding(x, geometry)
            operation = operation._replace(geometry=geometry)
        if not is_batch:
            x = x.unsqueeze(0) if dims > 2 else x.reshape(-1, weight.shape[1])
    if compiling:  # the compiler can read neither a context variable nor a cache
        chosen: Backend = PLAIN
    else:
        h = None if magnitude is None else magnitude.kernel_id or 0
        chosen = choose(Case(
            BACKEND.here.get() or BACKEND.everywhere, CONVOLUTION.here.get() or CONVOLUTION.everywhere,
            torch.get_num_threads(), x.device.type, x.dtype, angle.kernel_id, h, center, geometry, x.shape, x.stride(),
            weight.shape,
        ))  # fmt: skip
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
    if is_batch:
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
        ctx.operation, ctx.backend, ctx.alias, saved_map = operation, chosen, None, saved.map
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
        saved = Saved(unit_weight, scale, inverse_norm, saved_map, mean, is_output)
        needs = ctx.needs_input_grad[:7]
        asked = Pass(operation, parameters, saved, needs)
        try:
            grad_x, grad_weight, sums = ctx.backend.backward(grad, x, weight.dtype, asked)
        except BackendError:
            return _plain_gradients(grad, x, weight, operation, parameters, needs)
        return grad_x, grad_weight, *((None,) * 5 if sums is None else asked.parameter_gradients(sums)), None, None


def _plain_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, operation: Operation, parameters: Parameters, needs: Any
) -> tuple[Any, ...]:
    """Return the gradients of the plain formula, which can be differentiated again."""

    def formula(x: Tensor, weight: Tensor, *values: Any) -> list[Tensor]:
        return [plain.sphere_conv(x, weight, operation, Parameters(*values)).to(grad.dtype)]

    gradients = gradients_of(formula, (x, weight, *parameters), [grad])
    return (*(value if need else None for value, need in zip(gradients, needs[:7], strict=True)), None, None)


# --- other private torch API; tests/kernels fail when torch changes it -----------------------------------------------


def has_global_hooks() -> bool:
    """Return whether torch calls hooks for every module, which fused layers would skip."""
    return bool(
        module._global_backward_pre_hooks
        or module._global_backward_hooks
        or module._global_forward_pre_hooks
        or module._global_forward_hooks
    )


def leave_out_of_ddp(model: Module, names: Sequence[str]) -> None:
    """Let DDP neither copy nor reduce these parameters of a model that is wrapped afterwards."""
    if names:
        ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        ignore(model, list(names))


def without_modes() -> AbstractContextManager[object]:
    """Return a context in which tensors have values, also under a dispatch mode like `FakeTensorMode`."""
    context: AbstractContextManager[object] = _disable_current_modes()
    return context
