"""What the questions of results/PLAN.md share: trainings that continue where they stopped, tables, commands."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from spherenet_paper.comparisons import Comparison, read_rows, write_rows

__all__ = ["Question", "Training", "evaluate", "run_trainings", "spherenet_command", "verdicts"]


class Training(NamedTuple):
    """One network of a question.

    Attributes:
        arm: Name of the network in the table.
        seed: Seed of weights, order and augmentation.
        options: Options of `spherenet train`.
        evaluation: Options of `spherenet evaluate`, whose numbers are kept; none if those of the run are sufficient.
    """

    arm: str
    seed: int
    options: str
    evaluation: Sequence[str] = ()

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return f"{self.arm}-seed{self.seed}"

    def train_command(self, run: Path, data_dir: str | None) -> list[str]:
        """Return the command that trains the network, or resumes it."""
        if (run / "config.json").exists():
            return [*spherenet_command("train"), "--resume", str(run)]
        options = [*self.options.split(), "--seed", str(self.seed), *_location(data_dir), "--output", str(run)]
        return [*spherenet_command("train"), *options]


def spherenet_command(verb: str) -> list[str]:
    """Return the start of a command of this installation of the library."""
    return [sys.executable, "-m", "spherenet", verb]


def evaluate(run: Path, options: Sequence[str], numbers: Path, data_dir: str | None, dry_run: bool = False) -> bool:
    """Write what `spherenet evaluate` prints as JSON, if it is missing; return whether it is there."""
    command = [*spherenet_command("evaluate"), str(run), "--threads", "1", "--json", *_location(data_dir), *options]
    if dry_run:
        print(" ".join(command))
    elif not numbers.exists():
        result = subprocess.run(command, check=False, stdout=subprocess.PIPE)  # noqa: S603 - our own command
        if result.returncode == 0:
            numbers.write_bytes(result.stdout)
    return numbers.exists()


def run_trainings(trainings: Iterable[Training], folder: Path, data_dir: str | None, dry_run: bool = False) -> int:
    """Train and evaluate what is missing in FOLDER/ARM-seedN; return 1 if a run fails.

    A run that is complete is not repeated, one that was stopped continues, and one that another process works on is
    left to it. Start it twice for two cores.
    """
    failed = 0
    for training in trainings:
        run = folder / training.name
        if dry_run:
            print(" ".join(training.train_command(run, data_dir)))
            continue
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(Timeout), FileLock(folder / f"{training.name}.lock", timeout=0):
            if not (run / "summary.json").exists():
                subprocess.run(training.train_command(run, data_dir), check=False)  # noqa: S603 - our own command
            done = (run / "summary.json").exists()
            if done and training.evaluation:
                done = evaluate(run, training.evaluation, folder / f"{training.name}.json", data_dir)
            failed += not done
    return int(failed > 0)


def verdicts(comparisons: Sequence[Comparison], table: Path, label: str = "{}") -> Iterator[str]:
    """Return a line per comparison, or why there is none."""
    if not comparisons:
        yield f"No verdict: {table} lacks planned runs or evaluations."
    for one in comparisons:
        yield f"{label.format(one.name)}: {one}, p = {one.p:.3f} (Holm): {one.decision}"


def _location(data_dir: str | None) -> list[str]:
    return [] if data_dir is None else ["--data-dir", data_dir]


@dataclass(frozen=True)
class Question:
    """The commands `run`, `table` and `judge` of one question.

    Attributes:
        module: Name of its module, which is run with python -m.
        description: Text of `--help`.
        run: Function of the folder, the folder of the data and the namespace of options that makes what is missing.
        collect: Function of the folder that returns the rows of the table.
        arms: Names of the networks, in the order of the table.
        row: Type of a row, a named tuple whose first entries are the network and the seed.
        judge: Function of the rows and the table's path that returns the lines to print.
    """

    module: str
    description: str | None
    run: Callable[[argparse.Namespace], int]
    collect: Callable[[Path], Iterable[Any]]
    arms: Sequence[str]
    row: Any
    judge: Callable[[Sequence[Any], Path], Iterable[str]]

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Run, collect or judge; return the exit code."""
        options = self._parser().parse_args(arguments)
        if options.action == "run":
            return self.run(options)
        if options.action == "table":
            write_rows(self._merged(list(self.collect(options.folder)), options.output), self.row, options.output)
            return 0
        for line in self.judge(read_rows(options.table, self.row), options.table):
            print(line)
        return 0

    def _merged(self, rows: list[Any], table: Path) -> list[Any]:
        """Return rows and those of the table whose network and seed they lack, in the order of the networks."""
        new = {row[:2] for row in rows}
        kept = [row for row in read_rows(table, self.row) if row[:2] not in new] if table.exists() else []
        return sorted([*kept, *rows], key=lambda row: (self.arms.index(row[0]), row[1]))

    def _parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            prog=f"python -m {self.module}",
            description=self.description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        actions = parser.add_subparsers(dest="action", required=True)
        running = actions.add_parser("run", help="train or evaluate what is missing")
        running.add_argument("folder", type=Path, metavar="FOLDER")
        running.add_argument("--data-dir", metavar="DIR", help="folder of CIFAR-10")
        running.add_argument(
            "--arms", nargs="+", choices=self.arms, default=self.arms, metavar="ARM", help="default: all"
        )
        running.add_argument("--dry-run", action="store_true", help="print the commands")
        table = actions.add_parser("table", help="write what is complete; other rows of the table stay")
        table.add_argument("folder", type=Path, metavar="FOLDER")
        table.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="CSV file")
        judging = actions.add_parser("judge", help="compare the networks of a table")
        judging.add_argument("table", type=Path, metavar="TABLE")
        return parser
