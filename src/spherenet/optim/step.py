"""The part of a step that all optimizers share: the closure, and no gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import overload

import torch
from torch.optim import Optimizer

__all__ = ["SteppingOptimizer"]


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
        self._step()
        return loss

    def _step(self) -> None:
        """Make one step with the gradients of the parameters."""
        raise NotImplementedError
