"""Measure how accurate networks of the speed recipe are in uneven light: Q1 of results/PLAN.md.

    python -m spherenet_paper.light run FOLDER --data-dir DATA     # trains and evaluates; start it twice for two cores
    python -m spherenet_paper.light table FOLDER -o paper/results/light.csv
    python -m spherenet_paper.light judge paper/results/light.csv

Everything is a command of the library, which `run --dry-run` prints. Training takes about four minutes per run on one
core of an AMD EPYC with bfloat16 instructions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from spherenet_paper.comparisons import Comparison, compare
from spherenet_paper.question import Question, Training, run_trainings, verdicts

__all__ = ["ARMS", "BASELINES", "CONTROLS", "LIGHT", "QUESTION", "Row", "judge", "light_accuracy", "trainings"]

_CNN, _UNWHITENED = "--operator none", "--model air-unwhitened --operator cosine"
ARMS = {
    "patch": f"{_UNWHITENED} --center patch",
    "cnn-standardized": f"{_CNN} --set standardize=image",
    "cnn-light": f"{_CNN} --augmentation light",
    "cnn": _CNN,
    "cnn-both": f"{_CNN} --augmentation light --set standardize=image",
    "cosine": _UNWHITENED,
    "first-patch": f"{_UNWHITENED} --center first-patch",
    "patch-no-bn": f"{_UNWHITENED} --center patch --set batch_norm=false",
    "cnn-unwhitened": "--model air-unwhitened --operator none --set standardize=image",
    "patch-light": f"{_UNWHITENED} --center patch --augmentation light",
}
"""Options of each arm, those of the claim first: `patch` against each network of `BASELINES`."""

BASELINES = ("cnn", "cnn-standardized", "cnn-light", "cnn-both")
CLAIM_SEEDS, OTHER_SEEDS = range(5), range(3)
LIGHT = {
    "spot": (0.5, 0.7, 0.85),
    "ramp": (0.7, 0.85, 0.95),
    "shadow": (0.5, 0.7, 0.85),
    "gamma": (1.5, 2.2, 3),
    "cast": (0.3, 0.5, 0.7),
}
"""Corruptions of the primary quantity: the mean of the accuracies with all of them."""

CONTROLS = {"contrast": (0.75,), "dark": (0.7,), "bright": (60,), "noise": (20,), "blur": (1,), "jpeg": (20,)}
_TRAIN = (
    "--recipe speed --widths 32 128 128 --epochs 4 --eval-every 50 --checkpoint-every 50 --threads 1 --set tta=none"
)


class Row(NamedTuple):
    """Accuracy of one network, as a fraction; clean images have an empty strength."""

    arm: str
    seed: int
    corruption: str
    strength: str
    accuracy: float


def seeds_of(arm: str) -> range:
    """Return the seeds of an arm: five if the claim rests on it, else three."""
    return CLAIM_SEEDS if arm in ("patch", *BASELINES) else OTHER_SEEDS


def trainings(arms: Sequence[str]) -> Iterator[Training]:
    """Return the networks of the arms, all arms of a seed before the next one."""
    corruptions = [f"{kind}:{strength:g}" for kind, values in (LIGHT | CONTROLS).items() for strength in values]
    for seed, arm in ((seed, arm) for seed in CLAIM_SEEDS for arm in arms if seed in seeds_of(arm)):
        yield Training(arm, seed, f"{_TRAIN} {ARMS[arm]}", ["--corrupt", *corruptions])


def collect(folder: Path) -> Iterator[Row]:
    """Return the rows of all evaluated runs of a folder."""
    for arm in ARMS:
        for seed in seeds_of(arm):
            path = folder / f"{arm}-seed{seed}.json"
            if path.exists():
                numbers = json.loads(path.read_text())
                yield Row(arm, seed, "clean", "", numbers["accuracy"])
                for one in numbers["corruptions"]:
                    yield Row(arm, seed, one["corruption"], f"{one['strength']:g}", one["accuracy"])


def light_accuracy(rows: Iterable[Row], arm: str) -> dict[int, float]:
    """Return the primary quantity of an arm in percent by seed; a seed with a missing evaluation is left out."""
    expected = {(kind, f"{strength:g}") for kind, values in LIGHT.items() for strength in values}
    by_seed: dict[int, dict[tuple[str, str], float]] = {}
    for row in rows:
        if row.arm == arm and (row.corruption, row.strength) in expected:
            by_seed.setdefault(row.seed, {})[row.corruption, row.strength] = row.accuracy
    return {seed: 100 * fmean(values.values()) for seed, values in by_seed.items() if values.keys() == expected}


def judge(rows: Sequence[Row]) -> list[Comparison]:
    """Return the four comparisons of the claim, none if a planned run is missing."""
    accuracies = {arm: light_accuracy(rows, arm) for arm in ("patch", *BASELINES)}
    if any(values.keys() != set(CLAIM_SEEDS) for values in accuracies.values()):
        return []
    return compare(
        {
            baseline: [accuracies["patch"][seed] - accuracies[baseline][seed] for seed in CLAIM_SEEDS]
            for baseline in BASELINES
        }
    )


QUESTION = Question(
    module="spherenet_paper.light",
    description=__doc__,
    run=lambda options: run_trainings(trainings(options.arms), options.folder, options.data_dir, options.dry_run),
    collect=collect,
    arms=list(ARMS),
    row=Row,
    judge=lambda rows, table: verdicts(judge(rows), table, "patch − {}"),
)

if __name__ == "__main__":
    sys.exit(QUESTION.main())
