"""Choosing operator, k and s by cross-validation, as the paper says to: a grid of settings, each on every fold."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from spherenet.errors import RunError
from spherenet.experiments.experiment import Job
from spherenet.runs import RunDirectory
from spherenet.text import as_number
from spherenet.training.config import TrainConfig

__all__ = ["Score", "best_score", "jobs_of_tuning", "score", "settings_of"]


@dataclass(frozen=True)
class Score:
    """A setting and its accuracies (fractions) on the folds that are done."""

    name: str
    config: TrainConfig
    accuracies: list[float]

    @property
    def mean(self) -> float:
        """Over the folds."""
        return fmean(self.accuracies)

    @property
    def deviation(self) -> float | None:
        """Over the folds; None of one."""
        return stdev(self.accuracies) if len(self.accuracies) > 1 else None


def settings_of(
    config: TrainConfig, operators: Sequence[str], ks: Sequence[float], losses: Sequence[str], scales: Sequence[float]
) -> dict[str, TrainConfig]:
    """Every combination that means something, by name: k only where the operator has one, s only where the loss has."""
    found: dict[str, TrainConfig] = {}
    for operator, loss in product(operators, losses):
        takes_k = operator in ("sigmoid", "learnable")
        takes_s = loss.startswith("s-") or loss in ("cosface", "arcface")
        for k, s in product(ks if takes_k and ks else [None], scales if takes_s and scales else [None]):
            parts = [operator, *([f"k{k:g}"] if k is not None else []), loss, *([f"s{s:g}"] if s is not None else [])]
            chosen: dict[str, Any] = {
                "operator": None if operator == "none" else operator,
                "k": k,
                "loss": loss,
                "s": s,
            }
            found["_".join(parts)] = replace(config, **chosen)
    return found


def jobs_of_tuning(settings: dict[str, TrainConfig], folder: Path, folds: int) -> list[Job]:
    """A job for each setting and fold; fold by fold, so that all settings have a first number early."""
    return [
        Job(f"{name} fold {fold}", folder / name / f"fold-{fold}", replace(config, folds=folds, fold=fold))
        for fold in range(folds)
        for name, config in settings.items()
    ]


def score(name: str, config: TrainConfig, folder: Path, folds: int) -> Score:
    """What a setting's finished folds came to."""
    runs = [folder / name / f"fold-{fold}" for fold in range(folds)]
    accuracies = []
    for run in runs:
        with suppress(RunError):  # not finished, or corrupt: a fold without a number
            accuracies.append(as_number(RunDirectory.open(run).summary.get("accuracy")))
    return Score(name, config, [accuracy for accuracy in accuracies if accuracy is not None])


def best_score(scores: Sequence[Score], folds: int) -> Score | None:
    """The setting with the highest mean among those with every fold done; None without one."""
    whole = [found for found in scores if len(found.accuracies) == folds]
    return max(whole, key=lambda found: found.mean) if whole else None
