"""The private torch API that we use; tests/kernels fail when torch changes it.

Most of it is the gate `readable`: whether kernels may read the memory of tensors.
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

__all__ = [
    "can_read_values",
    "has_global_hooks",
    "is_transformed",
    "leave_out_of_ddp",
    "readable",
    "without_modes",
]

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
