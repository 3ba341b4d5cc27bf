"""Select operator, k, loss and s by cross-validation: a grid of settings, each trained on every fold."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean, stdev

from spherenet.angles import ANGLES
from spherenet.errors import RunError
from spherenet.experiments.jobs import Job
from spherenet.runs import RunDirectory
from spherenet.text import as_number
from spherenet.training.config import TrainConfig

__all__ = ["Score", "best_score", "create_settings", "create_tuning_jobs", "read_score"]


@dataclass(frozen=True)
class Score:
    """A setting and its accuracies (fractions) on the finished folds."""

    name: str
    config: TrainConfig
    accuracies: list[float]

    @property
    def mean(self) -> float:
        """Mean accuracy over the finished folds."""
        return fmean(self.accuracies)

    @property
    def deviation(self) -> float | None:
        """Standard deviation over the finished folds, or None for a single fold."""
        return stdev(self.accuracies) if len(self.accuracies) > 1 else None


def create_settings(
    config: TrainConfig, operators: Sequence[str], ks: Sequence[float], losses: Sequence[str], scales: Sequence[float]
) -> dict[str, TrainConfig]:
    """Return every combination by name; k varies only for operators that use it, s only for losses that use it."""
    settings: dict[str, TrainConfig] = {}
    for operator, loss in product(operators, losses):
        uses_k = operator in ANGLES and ANGLES[operator].takes_k
        uses_s = loss.startswith("s-") or loss in ("cosface", "arcface")
        for k, s in product(ks if uses_k and ks else [None], scales if uses_s and scales else [None]):
            labels = [operator, *([f"k{k:g}"] if k is not None else []), loss, *([f"s{s:g}"] if s is not None else [])]
            chosen = None if operator == "none" else operator
            settings["_".join(labels)] = replace(config, operator=chosen, k=k, loss=loss, s=s)
    return settings


def create_tuning_jobs(settings: dict[str, TrainConfig], folder: Path, folds: int) -> list[Job]:
    """Return one job per setting and fold, ordered by fold so that every setting has a first number early."""
    return [
        Job(f"{name} fold {fold}", folder / name / f"fold-{fold}", replace(config, folds=folds, fold=fold))
        for fold in range(folds)
        for name, config in settings.items()
    ]


def read_score(name: str, config: TrainConfig, folder: Path, folds: int) -> Score:
    """Read the accuracies of the finished folds of a setting."""
    accuracies = []
    for fold in range(folds):
        with suppress(RunError):  # not finished, or corrupt
            run = RunDirectory.open(folder / name / f"fold-{fold}")
            accuracies.append(as_number(run.summary.get("accuracy")))
    return Score(name, config, [accuracy for accuracy in accuracies if accuracy is not None])


def best_score(scores: Sequence[Score], folds: int) -> Score | None:
    """Return the score with the highest mean among those with all folds finished, or None if there is none."""
    complete = [score for score in scores if len(score.accuracies) == folds]
    return max(complete, key=lambda score: score.mean) if complete else None
