"""Compare a SphereNet with the CNN at the full width of the speed recipe: Q2 of results/PLAN.md.

    python -m spherenet_paper.accuracy run FOLDER --data-dir DATA      # start it twice for two cores
    python -m spherenet_paper.accuracy table FOLDER -o paper/results/speed.csv
    python -m spherenet_paper.accuracy judge paper/results/speed.csv

A run takes about half an hour on one core of an AMD EPYC with bfloat16 instructions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from spherenet_paper.comparisons import Comparison, compare
from spherenet_paper.question import Question, Training, run_trainings, verdicts

__all__ = ["ARMS", "QUESTION", "SEEDS", "Accuracy", "judge", "trainings"]

ARMS = {"cnn": "--operator none", "cosine": "--operator cosine"}
"""Options of each network."""

SEEDS = range(5)
_TRAIN = "--recipe speed --data cifar10 --threads 1"


class Accuracy(NamedTuple):
    """Results of one run: accuracies as fractions, of the images themselves and of six views of each."""

    arm: str
    seed: int
    accuracy: float
    tta_accuracy: float
    seconds: float
    peak_megabytes: int
    parameters: int


def trainings(arms: Sequence[str]) -> Iterator[Training]:
    """Return the networks of the arms, all arms of a seed before the next one."""
    return (Training(arm, seed, f"{_TRAIN} {ARMS[arm]}") for seed in SEEDS for arm in arms)


def collect(folder: Path) -> Iterator[Accuracy]:
    """Return the rows of all finished runs of a folder."""
    for training in trainings(list(ARMS)):
        path = folder / training.name / "summary.json"
        if path.exists():
            numbers = json.loads(path.read_text())
            yield Accuracy(training.arm, *(numbers[name] for name in Accuracy._fields[1:]))


def judge(rows: Sequence[Accuracy]) -> list[Comparison]:
    """Return the comparison of each SphereNet with the CNN, none if a planned run is missing."""
    points = {row[:2]: 100 * row.accuracy for row in rows}
    if points.keys() != {(arm, seed) for arm in ARMS for seed in SEEDS}:
        return []
    return compare({arm: [points[arm, seed] - points["cnn", seed] for seed in SEEDS] for arm in ARMS if arm != "cnn"})


QUESTION = Question(
    module="spherenet_paper.accuracy",
    description=__doc__,
    run=lambda options: run_trainings(trainings(options.arms), options.folder, options.data_dir, options.dry_run),
    collect=collect,
    arms=list(ARMS),
    row=Accuracy,
    judge=lambda rows, table: verdicts(judge(rows), table, "{} − cnn"),
)

if __name__ == "__main__":
    sys.exit(QUESTION.main())
