"""Losses that learn from the batches they have seen: their state, in buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spherenet.losses.additive_margins import FaceLoss

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["AdaptiveLoss"]


class AdaptiveLoss(FaceLoss):
    """A loss with running statistics, which are buffers: saved with the model, and the same in all processes.

    They change in training mode only, by the statistics of the batches of all processes together, so that all processes
    must call the loss. A batch with a statistic that is not finite leaves it as it was, so that an overflow, which a
    gradient scaler skips, does not spoil the steps after it. They stay in float32 if the model is converted to half
    precision, whose steps are too coarse for an average.
    """

    def reset_parameters(self) -> None:
        """Set the running statistics to their initial values."""
        raise NotImplementedError

    def _running(self, name: str) -> None:
        """Register a running statistic; `reset_parameters` sets its value."""
        self.register_buffer(name, torch.zeros(()))

    @torch.no_grad()
    def _update(self, name: str, value: Tensor, momentum: float, count: Tensor | int) -> None:
        """Move a running statistic to a value if it is finite and the batch has at least one row that counts."""
        state: Tensor = getattr(self, name)
        moved = state + momentum * (value.to(state.dtype) - state)
        is_used = (torch.as_tensor(count, device=state.device) > 0) & moved.isfinite()
        # In place, because DDP keeps a list of the buffers.
        state.copy_(torch.where(is_used, moved, state))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, state in before.items():
            after = self._buffers[name]
            if name != "class_weight" and after is not None and after.dtype != state.dtype and not state.is_meta:
                self._buffers[name] = state.to(after.device)
        return self
