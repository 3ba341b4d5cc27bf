"""Private torch API outside of the gate in `dispatch`; tests/kernels fail when torch changes it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch.nn import Module
from torch.nn.modules import module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["has_global_hooks", "leave_out_of_ddp", "without_modes"]


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
