"""Tune the CNN and the SphereNet of the speed recipe on held-out training images, with the same budget.

    python -m spherenet_paper.tuning run FOLDER --data-dir DATA     # eight candidates each; the best get more seeds
    python -m spherenet_paper.tuning table FOLDER -o paper/results/tuning.csv
    python -m spherenet_paper.tuning judge paper/results/tuning.csv

The accuracy is that on 5,000 of the training images, which are not trained on. Test images are not used. A run takes
about three minutes on one core of an AMD EPYC with bfloat16 instructions.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from spherenet_paper.question import Question, Training, run_trainings

__all__ = ["CANDIDATES", "FINAL_SEEDS", "QUESTION", "Candidate", "best", "ranking", "trainings"]

_MUON = "--optimizer muon:momentum=0.6"
CANDIDATES = {
    "cnn": "--operator none",
    "cnn-rate-0.12": "--operator none --learning-rate 0.12",
    "cnn-rate-0.48": "--operator none --learning-rate 0.48",
    "cnn-rest-0.0265": f"--operator none {_MUON},rest_learning_rate=0.0265",
    "cnn-rest-0.106": f"--operator none {_MUON},rest_learning_rate=0.106",
    "cnn-head-halved": f"--operator none {_MUON},head_learning_rate=0.00131",
    "cnn-head-doubled": f"--operator none {_MUON},head_learning_rate=0.00523",
    "cnn-he": "--operator none --set initialization=he",
    "sphere": "--operator cosine",
    "sphere-rate-0.12": "--operator cosine --learning-rate 0.12",
    "sphere-rate-0.48": "--operator cosine --learning-rate 0.48",
    "sphere-sigmoid": "--operator sigmoid:k=0.3",
    "sphere-patch": "--operator cosine --center patch",
    "sphere-sigmoid-patch": "--operator sigmoid:k=0.3 --center patch",
    "sphere-log": "--operator cosine --magnitude log",
    "sphere-he": "--operator cosine --set initialization=he",
}
"""Options of each candidate; the first of each network is the recipe as it is."""

NETWORKS = ("cnn", "sphere")
FIRST_SEEDS, FINAL_SEEDS, FINALISTS = (0,), (0, 1, 2), 2
_TRAIN = (
    "--recipe speed --widths 32 128 128 --epochs 3 --validation-fraction 0.1 --eval-every 100 --checkpoint-every 100 "
    "--threads 1 --set tta=none"
)


class Candidate(NamedTuple):
    """Accuracy of one training on held-out images, as a fraction."""

    candidate: str
    seed: int
    accuracy: float


def network_of(candidate: str) -> str:
    """Return which of the two networks a candidate is a setting of."""
    return candidate.partition("-")[0]


def trainings(candidates: Sequence[str], seeds: Sequence[int]) -> Iterator[Training]:
    """Return the trainings of candidates, all of a seed before the next one."""
    for seed in seeds:
        yield from (Training(name, seed, f"{_TRAIN} {CANDIDATES[name]}") for name in candidates)


def run_all(folder: Path, data_dir: str | None, names: Sequence[str], dry_run: bool) -> int:
    """Train all candidates once, then the best two and the recipe of each network with more seeds.

    Returns:
        1 if a run fails, else 0.
    """
    failed = run_trainings(trainings(names, FIRST_SEEDS), folder, data_dir, dry_run)
    rows = list(collect(folder))
    if failed or dry_run or {row.candidate for row in rows} != set(CANDIDATES):
        return failed
    finalists = [name for network in NETWORKS for name in dict.fromkeys([*best(rows, network), network])]
    return run_trainings(trainings(finalists, FINAL_SEEDS), folder, data_dir)


def collect(folder: Path) -> Iterator[Candidate]:
    """Return the rows of all finished trainings of a folder: the last accuracy on the held-out images."""
    for training in trainings(list(CANDIDATES), FINAL_SEEDS):
        run = folder / training.name
        if (run / "summary.json").exists():
            rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
            accuracy = [row["accuracy"] for row in rows if row["split"] == "validation"][-1]
            yield Candidate(training.arm, training.seed, accuracy)


def best(rows: Sequence[Candidate], network: str) -> list[str]:
    """Return the two candidates of a network with the highest accuracies for seed 0, the better one first."""
    first = [row for row in rows if row.seed in FIRST_SEEDS and network_of(row.candidate) == network]
    return [row.candidate for row in sorted(first, key=lambda row: -row.accuracy)[:FINALISTS]]


def ranking(rows: Sequence[Candidate]) -> list[tuple[str, list[float]]]:
    """Return candidates with accuracies in percent by seed; those with most seeds first, then by mean accuracy."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        by_name[row.candidate].append(100 * row.accuracy)
    return sorted(by_name.items(), key=lambda item: (-len(item[1]), -fmean(item[1])))


def judge(rows: Sequence[Candidate], table: Path) -> Iterator[str]:
    """Return a line per candidate, the best of each network first."""
    for network in NETWORKS:
        for name, values in ranking([row for row in rows if network_of(row.candidate) == network]):
            spread = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
            yield f"{name}: {fmean(values):.2f}{spread} %, n = {len(values)} ({CANDIDATES[name]})"
    if missing := set(CANDIDATES) - {row.candidate for row in rows}:
        yield f"No choice yet: {table} lacks {', '.join(sorted(missing))}."


QUESTION = Question(
    module="spherenet_paper.tuning",
    description=__doc__,
    run=lambda options: run_all(options.folder, options.data_dir, options.arms, options.dry_run),
    collect=collect,
    arms=list(CANDIDATES),
    row=Candidate,
    judge=judge,
)

if __name__ == "__main__":
    sys.exit(QUESTION.main())
