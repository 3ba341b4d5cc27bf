"""How a run is trained: numbers and switches, no objects."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

__all__ = ["PRECISIONS", "Settings"]

PRECISIONS = ("float32", "bfloat16", "float16")
OPTIMIZERS = ("adam", "sgd")
ON_NAN = ("stop", "skip")


@dataclass(frozen=True)
class Settings:
    """The settings of a training run; SPEC 4's are the defaults.

    iterations: optimiser steps, as the paper counts. batch_size: pictures a step over all processes.
    accumulate: in so many pieces a process takes its share of a batch, for less memory at the same gradient.
    weight_decay: L2 on plain weights only, or with `decay_all` on every parameter.
    milestones: iterations after which the learning rate is multiplied by `decay`.
    precision: "float32", or autocast to "bfloat16" or "float16" (the latter with loss scaling).
    on_nan: "stop" at a step whose loss or gradient is not finite, or "skip" it.
    Raises ValueError for a number out of range.
    """

    iterations: int
    batch_size: int = 128
    accumulate: int = 1
    optimizer: str = "adam"
    learning_rate: float = 1e-3
    momentum: float = 0.9
    weight_decay: float = 5e-4
    decay_all: bool = False
    milestones: tuple[int, ...] = ()
    decay: float = 0.1
    precision: str = "float32"
    channels_last: bool = True
    compile: bool = False
    sync_batch_norm: bool = True
    log_every: int = 50
    eval_every: int = 500
    eval_batch_size: int = 256
    checkpoint_every: int = 500
    workers: int = 0
    seed: int = 0
    on_nan: str = "stop"

    def __post_init__(self) -> None:
        at_least_one = ("iterations", "batch_size", "accumulate", "log_every", "eval_every", "eval_batch_size",
                        "checkpoint_every")  # fmt: skip
        for name in at_least_one:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        for name in ("learning_rate", "momentum", "weight_decay", "decay", "workers", "seed"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a finite number of at least 0, got {value}.")
        for name, allowed in (("optimizer", OPTIMIZERS), ("precision", PRECISIONS), ("on_nan", ON_NAN)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}.")

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of step 0, 1, …: a function of the step alone, so that nothing has to be resumed."""
        return self.learning_rate * self.decay ** sum(step >= milestone for milestone in self.milestones)

    def as_dict(self) -> dict[str, object]:
        """The settings as JSON takes them."""
        made = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**made, "milestones": list(self.milestones)}
