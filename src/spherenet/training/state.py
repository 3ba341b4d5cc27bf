"""The state of a run as tensors and JSON: model, optimizer and counters, and their validation when they are loaded."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spherenet.errors import CheckpointError
from spherenet.optim import MixedOptimizer

__all__ = [
    "Counters",
    "Outcome",
    "buffer_copies",
    "load_model_tensors",
    "load_optimizer_tensors",
    "optimizer_tensors",
    "require_fitting",
    "require_number",
    "restore_buffers",
]


@dataclass(frozen=True)
class Outcome:
    """Result of `Trainer.train`.

    Attributes:
        step: Number of steps done.
        signal: Signal that stopped the run, None if it is complete.
        stopped_early: Whether the accuracy did not improve for `TrainConfig.patience` evaluations.
        accuracy: Test accuracy of the last evaluation, None if there was none.
        tta_accuracy: The same with test-time augmentation, None without it.
        balanced_accuracy: Mean recall of the classes in that evaluation.
        best_accuracy: Best accuracy on the validation images, or on the test images if there are no validation images.
        best_step: Step of the best accuracy.
        seconds: Duration of training, including earlier sessions.
    """

    step: int
    signal: int | None
    accuracy: float | None
    best_accuracy: float | None
    best_step: int | None
    seconds: float
    stopped_early: bool = False
    balanced_accuracy: float | None = None
    tta_accuracy: float | None = None


@dataclass
class Counters:
    """Counters of a run. All of them are saved in checkpoints; −1 means that there was no evaluation yet.

    `not_better` is the number of evaluations since the best one. `loss_sum`, `correct` and `count` are sums since the
    last row of training metrics.
    """

    seconds: float = 0.0
    best_accuracy: float = -1.0
    best_step: int = -1
    accuracy: float = -1.0
    balanced_accuracy: float = -1.0
    skipped: int = 0
    skipped_in_a_row: int = 0
    not_better: int = 0
    loss_sum: float = 0.0
    correct: float = 0.0
    count: float = 0.0
    tta_accuracy: float = -1.0

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Counters:
        """Return the counters of a checkpoint's state. Raises CheckpointError if one is not a number."""
        counters = state.get("progress", {})
        progress = cls(**{name: require_number(counters, name) for name in asdict(cls())})  # type: ignore[arg-type]
        progress.best_step = int(progress.best_step)
        return progress

    def add(self, loss_sum: float, correct: float, images: float) -> None:
        """Add the sums of steps to those of the next row of training metrics."""
        self.loss_sum += loss_sum
        self.correct += correct
        self.count += images

    def is_best(self, accuracy: float, step: int) -> bool:
        """Count an evaluation and return whether its accuracy is the best so far."""
        self.not_better += 1
        if accuracy > self.best_accuracy:
            self.best_accuracy, self.best_step, self.not_better = accuracy, step, 0
        return self.not_better == 0

    def outcome(self, step: int, signal: int | None, *, stopped_early: bool = False) -> Outcome:
        """Return the outcome of a run that has made `step` steps and was stopped by `signal`, if any."""
        if self.best_step < 0:
            return Outcome(step, signal, None, None, None, self.seconds)
        numbers = self.accuracy, self.best_accuracy, self.best_step, self.seconds
        measured = [None if value < 0 else value for value in (self.balanced_accuracy, self.tta_accuracy)]
        return Outcome(step, signal, *numbers, stopped_early, *measured)


def require_number(state: Mapping[str, Any], key: str) -> float:
    """Return a finite number of a checkpoint's state. Raises CheckpointError if it is something else."""
    value = state.get(key) if isinstance(state, Mapping) else None
    # The comparison also rejects integers that no float can hold.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise CheckpointError(f"{key} in the checkpoint's state must be a number, got {str(value)[:100]!r}.")
    return value


def load_model_tensors(model: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Load a state dict strictly. Raises CheckpointError if it does not fit the model."""
    require_fitting(model, tensors, source)
    model.load_state_dict(dict(tensors))


def require_fitting(model: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Raise CheckpointError if a state dict has missing or unexpected tensors, or other shapes or types.

    Floating point tensors may have another precision.
    """
    own = model.state_dict()
    common = [name for name in own if name in tensors]
    for problem, names in (
        ("lacks", [name for name in own if name not in tensors]),
        ("has unexpected", [name for name in tensors if name not in own]),
        ("has other shapes of", [name for name in common if own[name].shape != tensors[name].shape]),
        ("has other types of", [name for name in common if not _same_type(own[name], tensors[name])]),
    ):
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise CheckpointError(f"{source} does not fit the model: it {problem} {shown}.")


def _same_type(own: Tensor, other: Tensor) -> bool:
    return own.dtype == other.dtype or (own.is_floating_point() and other.is_floating_point())


_OPTIMIZER_STATE: dict[type[Optimizer], tuple[str, ...]] = {
    torch.optim.Adam: ("step", "exp_avg", "exp_avg_sq"),
    torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq"),
    torch.optim.SGD: ("momentum_buffer",),
    MixedOptimizer: ("momentum_buffer",),
}
"""State of each optimizer per updated parameter."""


def optimizer_tensors(optimizer: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the optimizer's state as "quantity/parameter" → tensor. Its options come from the configuration."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{quantity}/{names[parameter]}": value
        for parameter, state in optimizer.state.items()
        for quantity, value in state.items()
        if isinstance(value, Tensor)
    }


def load_optimizer_tensors(
    optimizer: Optimizer, model: nn.Module, tensors: Mapping[str, Tensor], source: str
) -> list[str]:
    """Load what `optimizer_tensors` returned. Raises CheckpointError if it does not fit the parameters.

    The state of another type of optimizer is ignored.

    Returns:
        A warning if the state was ignored, else an empty list.
    """
    expected = _OPTIMIZER_STATE[type(optimizer)]
    if tensors and not any(key.partition("/")[0] in expected for key in tensors):
        return [f"{source} has the state of another optimizer: this one starts without state."]
    parameters = dict(model.named_parameters())
    updated = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for key, value in tensors.items():
        quantity, _, name = key.partition("/")
        parameter = parameters.get(name)
        if parameter is None or parameter not in updated:
            raise CheckpointError(f"{source} does not fit the model: the optimizer has no parameter {name!r}.")
        missing = [other for other in expected if f"{other}/{name}" not in tensors]
        if quantity not in expected or missing:
            problem = f"lacks {missing[0]}" if missing else f"has {quantity!r}"
            raise CheckpointError(f"{source} does not fit the optimizer: it {problem} of {name}.")
        if quantity == "step":
            fits = value.dim() == 0 and value.is_floating_point()
        else:
            fits = value.shape == parameter.shape and value.dtype == parameter.dtype
        if not fits:
            shown = f"{value.dtype} of shape {tuple(value.shape)}"
            raise CheckpointError(f"{source} does not fit the optimizer: {key} is {shown}.")
        on_device = value.dim() > 0 or any(group.get("fused") for group in optimizer.param_groups)
        # In the memory format of the parameter, which a fused step requires.
        restored = torch.empty_like(value if quantity == "step" else parameter)
        restored = restored.to(parameter.device) if on_device else restored
        optimizer.state[parameter][quantity] = restored.copy_(value)
    return []


def buffer_copies(buffers: Iterable[Tensor]) -> list[Tensor]:
    """Return copies of buffers, for `restore_buffers`."""
    return [buffer.clone() for buffer in buffers]


@torch.no_grad()
def restore_buffers(buffers: Iterable[Tensor], copies: Iterable[Tensor], condition: Tensor | None = None) -> None:
    """Undo the changes of a forward pass to buffers (running means, counters), if the scalar `condition` is true."""
    for buffer, copy in zip(buffers, copies, strict=True):
        buffer.copy_(copy if condition is None else torch.where(condition, copy, buffer))
