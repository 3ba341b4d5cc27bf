"""Measure how accurate networks of the speed recipe are in uneven light: Q1 of results/PLAN.md.

    python -m spherenet_paper.light run FOLDER --data-dir DATA     # trains and evaluates; start it twice for two cores
    python -m spherenet_paper.light table FOLDER -o paper/results/light.csv
    python -m spherenet_paper.light judge paper/results/light.csv

Everything is a command of the library, which `run --dry-run` prints. A run that is complete is not repeated, one that
was stopped continues, and one that another process works on is left to it. Training takes about four minutes per run on
one core of an AMD EPYC with bfloat16 instructions.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from filelock import FileLock, Timeout

from spherenet_paper.comparisons import Comparison, compare, read_rows, write_rows

__all__ = ["ARMS", "BASELINES", "CONTROLS", "LIGHT", "Row", "judge", "light_accuracy"]

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


def train_command(arm: str, seed: int, run: Path, data_dir: str | None) -> list[str]:
    """Return the command that trains an arm, or resumes it."""
    location = [] if data_dir is None else ["--data-dir", data_dir]
    resume = ["--resume"] if (run / "config.json").exists() else []
    options = [*_TRAIN.split(), *ARMS[arm].split(), "--seed", str(seed), *location, "--output", str(run), *resume]
    return [*spherenet_command("train"), *options]


def evaluate_command(run: Path, data_dir: str | None) -> list[str]:
    """Return the command that evaluates a run on all corruptions."""
    texts = [f"{kind}:{strength:g}" for kind, values in (LIGHT | CONTROLS).items() for strength in values]
    location = [] if data_dir is None else ["--data-dir", data_dir]
    return [*spherenet_command("evaluate"), str(run), "--threads", "1", "--json", *location, "--corrupt", *texts]


def spherenet_command(verb: str) -> list[str]:
    """Return the start of a command of this installation of the library."""
    return [sys.executable, "-m", "spherenet", verb]


def run_all(folder: Path, data_dir: str | None, arms: Sequence[str], dry_run: bool) -> int:
    """Train and evaluate what is missing, all arms of a seed before the next one; return 1 if a run fails."""
    failed = 0
    for seed, arm in ((seed, arm) for seed in CLAIM_SEEDS for arm in arms if seed in seeds_of(arm)):
        run = folder / f"{arm}-seed{seed}"
        numbers = run.with_suffix(".json")
        if dry_run:
            print(" ".join(train_command(arm, seed, run, data_dir)))
            continue
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(Timeout), FileLock(run.with_suffix(".lock"), timeout=0):
            if not (run / "summary.json").exists():
                subprocess.run(train_command(arm, seed, run, data_dir), check=False)  # noqa: S603 - our own command
            if (run / "summary.json").exists() and not numbers.exists():
                command = evaluate_command(run, data_dir)
                result = subprocess.run(command, check=False, stdout=subprocess.PIPE)  # noqa: S603
                if result.returncode == 0:
                    numbers.write_bytes(result.stdout)
            failed += not numbers.exists()
    return int(failed > 0)


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, collect or judge."""
    parser = argparse.ArgumentParser(
        prog="python -m spherenet_paper.light",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True)
    running = actions.add_parser("run", help="train and evaluate all arms")
    running.add_argument("folder", type=Path, metavar="FOLDER")
    running.add_argument("--data-dir", metavar="DIR", help="folder of CIFAR-10")
    running.add_argument(
        "--arms", nargs="+", choices=list(ARMS), default=list(ARMS), metavar="ARM", help="default: all"
    )
    running.add_argument("--dry-run", action="store_true", help="print the commands of the trainings")
    table = actions.add_parser("table", help="write the accuracies of all evaluated runs")
    table.add_argument("folder", type=Path, metavar="FOLDER")
    table.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="CSV file")
    judging = actions.add_parser("judge", help="compare the arms of the claim")
    judging.add_argument("table", type=Path, metavar="TABLE")
    options = parser.parse_args(arguments)
    if options.action == "run":
        return run_all(options.folder, options.data_dir, options.arms, options.dry_run)
    if options.action == "table":
        write_rows(collect(options.folder), Row, options.output)
        return 0
    comparisons = judge(read_rows(options.table, Row))
    if not comparisons:
        print(f"No verdict: {options.table} lacks planned runs of {', '.join(('patch', *BASELINES))}.")
    for one in comparisons:
        print(f"patch − {one.name}: {one}, p = {one.p:.3f} (Holm): {one.decision}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
