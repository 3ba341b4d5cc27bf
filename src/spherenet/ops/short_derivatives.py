"""The base of functions whose derivatives are written out: autograd's own chain takes two or three times as many steps.

Backward of such a function uses only its inputs, its outputs and differentiable operations, so that it can be
differentiated any number of times, mapped and, through `jvp`, differentiated in forward mode.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

__all__ = ["ShortDerivative", "keep"]


class ShortDerivative(torch.autograd.Function):
    """A function of tensors whose subclass defines `forward`, `setup_context`, `backward` and `jvp`."""

    generate_vmap_rule = True
    traceable: ClassVar[type[torch.autograd.Function]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "traceable" not in vars(cls):
            # torch.compile does not admit functions with a forward-mode derivative.
            jvp = staticmethod(torch.autograd.Function.jvp)
            cls.traceable = type(cls.__name__, (cls,), {"jvp": jvp, "traceable": None})

    @classmethod
    def call(cls, *inputs: Any) -> Any:
        """Evaluate the function."""
        if torch.compiler.is_compiling():
            return cls.traceable.apply(*inputs)  # type: ignore[no-untyped-call]
        return cls.apply(*inputs)  # type: ignore[no-untyped-call]


def keep(ctx: Any, *tensors: Tensor | None) -> None:
    """Save inputs or outputs for backward and for forward mode; gradients of unused outputs arrive as None."""
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)
    if not torch.compiler.is_compiling():
        ctx.save_for_forward(*tensors)
