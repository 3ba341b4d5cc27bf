"""The base of functions whose derivatives are written out: autograd's own chain takes two or three times as many steps.

Backward of such a function uses only its inputs, its outputs and differentiable operations, so that it can be
differentiated any number of times, mapped and, through `jvp`, differentiated in forward mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["ShortDerivative", "keep", "short"]


class ShortDerivative(torch.autograd.Function):
    """A function of tensors whose subclass defines `forward`, `setup_context`, `backward` and `jvp`."""

    generate_vmap_rule = True


def short(function: type[ShortDerivative]) -> Callable[..., Any]:
    """Return what evaluates a function, also while torch.compile traces it, which admits no forward-mode derivative."""
    without_jvp = {"jvp": staticmethod(torch.autograd.Function.jvp)}
    traceable: type[ShortDerivative] = type(function.__name__, (function,), without_jvp)

    def evaluate(*inputs: Any) -> Any:
        if torch.compiler.is_compiling():
            return traceable.apply(*inputs)  # type: ignore[no-untyped-call]
        return function.apply(*inputs)  # type: ignore[no-untyped-call]

    return evaluate


def keep(ctx: Any, *tensors: Tensor | None) -> None:
    """Save inputs or outputs for backward and for forward mode; gradients of unused outputs arrive as None."""
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)
    if not torch.compiler.is_compiling():
        ctx.save_for_forward(*tensors)
