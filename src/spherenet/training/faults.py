"""Losses, gradients and weights that are not finite: when a run stops, and what it reports."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from spherenet.errors import TrainingError
from spherenet.runs.checkpoints import Checkpoints
from spherenet.training.distributed import Processes
from spherenet.training.sharding import local

__all__ = ["MAX_SKIPPED_IN_A_ROW", "fault_error", "require_finite_weights", "skip_error"]

MAX_SKIPPED_IN_A_ROW = 25
"""Consecutive skipped steps after which a run is stopped. A float16 loss scale needs about ten to settle."""


def fault_error(
    step: int, loss: float, learning_rate: float, indices: Tensor, checkpoints: Checkpoints
) -> TrainingError:
    """Return the error of a step whose loss, or else its gradient, is not finite."""
    quantity = "gradient" if math.isfinite(loss) else "loss"
    shown = ", ".join(map(str, indices[:8].tolist())) + (", …" if len(indices) > 8 else "")
    return TrainingError(
        f"the {quantity} is not finite at step {step} (loss {loss:g}, learning rate {learning_rate:g}, "
        f"training images {shown}); {checkpoints.last()}; --on-nan skip skips such steps."
    )


def skip_error(step: int, in_a_row: int, checkpoints: Checkpoints) -> TrainingError:
    """Return the error of too many skipped steps."""
    return TrainingError(
        f"the loss or its gradient is not finite at step {step}, as in the {in_a_row - 1} steps before it; "
        f"{checkpoints.last()}; try a lower learning rate or another precision."
    )


def require_finite_weights(
    model: nn.Module, processes: Processes, step: int, state: Mapping[str, Tensor], checkpoints: Checkpoints
) -> None:
    """Raise TrainingError in all processes if a weight or buffer is not finite. Such a model is never saved.

    `state` has further tensors that are saved, by name. An optimizer whose state is infinite makes steps of size 0.
    """
    named = {**model.state_dict(), **state}
    tensors = {name: local(tensor) for name, tensor in named.items() if tensor.is_floating_point()}
    bad = [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]
    if processes.total(torch.tensor(float(bool(bad)), device=processes.device)).item():
        which = f" (first: {bad[0]})" if bad else ""
        raise TrainingError(
            f"weights or their optimizer state are not finite after step {step}{which}; {checkpoints.last()}; "
            "try a lower learning rate."
        )
