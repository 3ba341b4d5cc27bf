"""What all optimizers share: their parameters as a list, and a step with a closure and without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from spherenet._util.validation import require_memory
from spherenet.errors import InvalidArgumentType

__all__ = ["SteppingOptimizer", "as_list"]

T = TypeVar("T")


def as_list(name: str, params: Iterable[T]) -> list[T]:
    """Return parameters or groups as a list; raise TypeError for a tensor, a module, an optimizer or the like."""
    given: Any = params
    if isinstance(given, (Tensor, str, Mapping)) or not isinstance(given, Iterable):
        raise InvalidArgumentType(
            name, f"must be parameters or groups of them, such as model.parameters(), got {type(given).__name__}."
        )
    return list(params)


class SteppingOptimizer(Optimizer):
    """Base class of optimizers, which implement `_step`."""

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make one step; return the loss of the closure, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    state = self.state[weight].values() if weight in self.state else ()
                    require_memory(weight, weight.grad, *(each for each in state if isinstance(each, Tensor)))
        self._step()
        return loss

    def _step(self) -> None:
        """Make one step with the gradients of the parameters."""
        raise NotImplementedError
