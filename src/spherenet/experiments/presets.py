"""The three sizes of every experiment: as in the paper, for two cores, and for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from spherenet.experiments.config import TrainConfig
from spherenet.ops.arguments import require_one_of

__all__ = ["OPERATORS", "cifar", "operator_options"]

OPERATORS: dict[str, dict[str, Any]] = {
    "sigmoid-0.1": {"operator": "sigmoid", "k": 0.1},
    "sigmoid-0.3": {"operator": "sigmoid", "k": 0.3},
    "sigmoid-0.7": {"operator": "sigmoid", "k": 0.7},
    "linear": {"operator": "linear"},
    "cosine": {"operator": "cosine"},
    "none": {"operator": None},
}
"""The rows of the paper's tables."""


def operator_options(name: str) -> dict[str, Any]:
    """The options of an operator by its name in the tables."""
    return dict(OPERATORS[require_one_of("operator", name, OPERATORS)])


def cifar(
    preset: str, *, iterations_cpu: int = 500, widths_cpu: tuple[int, ...] = (16, 24, 32), **options: Any
) -> TrainConfig:
    """A run on CIFAR-10 with the settings of SPEC 4, whole or shrunk; `options` are those of `TrainConfig`.

    paper: 64,000 iterations at the paper's widths. cpu: pictures of 16 × 16, batches of 64, a quarter of the widths and
    `iterations_cpu`, the learning rate falling at the same fractions. smoke: a few steps of a tiny network on the
    embedded digits.
    """
    if preset == "paper":
        full: dict[str, Any] = {"data": "cifar10", "iterations": 64_000, "milestones": [34_000, 54_000]}
        return TrainConfig(**{**full, "eval_every": 500, "checkpoint_every": 1000, "log_every": 100, **options})
    if preset == "cpu":
        small: dict[str, Any] = {"data": "cifar10", "image_size": 16, "batch_size": 64, "widths": list(widths_cpu)}
        length = {"iterations": iterations_cpu, "eval_every": iterations_cpu // 5}
        return TrainConfig(**{**small, **length, "checkpoint_every": iterations_cpu // 2, **options})
    require_one_of("preset", preset, ("paper", "cpu", "smoke"))
    few = {"iterations": 2, "batch_size": 8, "eval_every": 1, "checkpoint_every": 2, "log_every": 1}
    tiny = {"widths": [4] * len(widths_cpu), "eval_batch_size": 500}
    chosen = {**options, **few, **tiny, "augmentation": None, "milestones": None}
    return replace(TrainConfig(**chosen), data="mnist5k", image_size=None)
