"""Grids of runs: an experiment with its finished runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from spherenet.cli.plugin import as_number
from spherenet.report import Curve, ReportedRun
from spherenet_paper.experiments import EXPERIMENTS
from spherenet_paper.experiments.experiment import PRESETS as SIZES
from spherenet_paper.experiments.experiment import Claim, Experiment, Logs
from spherenet_paper.records import RESULTS, Key, Record, read_records, read_runs
from spherenet_paper.report.quantities import QUANTITIES, final_accuracy, has_steady_pace

__all__ = [
    "PRESETS",
    "Grid",
    "GridCell",
    "TimeToAccuracy",
    "by_preset",
    "grid_of_runs",
    "presets_of",
    "stored_grid",
    "stored_grids",
]

PRESETS = {
    "paper": "The paper's settings.",
    "long": "CIFAR-10 images of 32 × 32, batches of 128 (except in fig-spherenorm), half or a quarter of the paper's "
    "widths, and at most an eighth of its 64,000 iterations, in bfloat16; fig-ultradeep with images of 16 × 16. "
    "`paper/results/PLAN.md` was written before the runs.",
    "cpu": "Reduced for two CPU cores: images of 16 × 16, half the batch size, a quarter of the paper's widths (except "
    "in fig-width) and 300 to 2,000 of its 64,000 iterations. Accuracies are therefore far below the paper's; only "
    "differences between cells can be compared.",
    "cpu-32": "As in the preset cpu, but with images of 32 × 32, batches of 128 and 600 iterations.",
    "smoke": "A few steps of tiny networks: the numbers only show that everything runs.",
}
"""What the runs of a preset are, the largest preset first."""


class TimeToAccuracy(NamedTuple):
    """When a run reached the final accuracy of another.

    Attributes:
        step: Iteration.
        fraction: Iteration as a fraction of the other run.
        seconds: Seconds since the start of the run, or None if the times of the two runs cannot be compared.
        seconds_fraction: Seconds as a fraction of the other run, or None.
    """

    step: int
    fraction: float
    seconds: float | None = None
    seconds_fraction: float | None = None


def time_to_accuracy(run: ReportedRun, other: ReportedRun) -> TimeToAccuracy | None:
    """Return when a run first reached the final test accuracy of another; None if it did not.

    Seconds are those of training and evaluation as recorded, if both runs had a steady pace.
    """
    target, last = final_accuracy(other), other.rows[-1]["step"]
    for row in run.rows_of("test"):
        accuracy = as_number(row.get("accuracy"))
        if accuracy is not None and 100 * accuracy >= target:
            seconds, total = as_number(row.get("seconds")), as_number((other.summary or {}).get("seconds"))
            if seconds is None or not total or not has_steady_pace(run) or not has_steady_pace(other):
                return TimeToAccuracy(row["step"], row["step"] / last)
            return TimeToAccuracy(row["step"], row["step"] / last, seconds, seconds / total)
    return None


@dataclass(frozen=True)
class GridCell:
    """A cell of an experiment with its finished runs by seed, and the seeds that failed or are not finished."""

    name: str
    row: str
    column: str
    paper: float | None
    runs: dict[int, ReportedRun] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)

    def values(self, quantity: str = "accuracy", protocol: str | None = None) -> list[float]:
        """Return a quantity of each run."""
        return [QUANTITIES[quantity].measure(run, protocol) for run in self.runs.values()]

    def mean_and_std(self) -> tuple[float, float | None] | None:
        """Return mean and standard deviation of the final accuracy; the latter is None for one run, both for none."""
        values = self.values()
        if not values:
            return None
        return fmean(values), stdev(values) if len(values) > 1 else None

    def mean_curve(self) -> Curve:
        """Return the mean test accuracy over the seeds at the evaluations that all of them have."""
        points = self.points()
        return Curve(list(points), [fmean(values) for values in points.values()])

    def points(self) -> dict[int, list[float]]:
        """Return the test accuracy of each seed at the evaluations that all seeds have, by iteration."""
        curves = [run.curve("test", "accuracy") for run in self.runs.values()]
        by_step = [dict(zip(curve.steps, curve.values, strict=True)) for curve in curves]
        steps = sorted(set(by_step[0]).intersection(*by_step)) if by_step else []
        return {step: [accuracies[step] for accuracies in by_step] for step in steps}


@dataclass(frozen=True)
class Grid:
    """An experiment with its runs.

    Attributes:
        id: Name of the experiment.
        title: Heading.
        shows: What its numbers are.
        preset: Preset, also with a suffix, e.g. "cpu-32" for runs of the preset cpu with other options.
        cells: Cells in the order of the paper.
        claims: Claims.
        problems: Messages about runs that were left out.
        baseline: Row with which the others are compared in the time to its final accuracy, or None.
        seeds: Number of seeds that were planned for each cell; empty without a plan.
        logs: Averages of published logs, or None.
    """

    id: str
    title: str
    shows: str
    preset: str
    cells: list[GridCell]
    claims: list[Claim]
    problems: list[str]
    baseline: str | None = None
    seeds: dict[str, int] = field(default_factory=dict)
    logs: Logs | None = None

    @property
    def has_runs(self) -> bool:
        """Whether any run is finished."""
        return any(cell.runs for cell in self.cells)

    def missing(self) -> dict[str, list[int]]:
        """Return the planned seeds that are not finished, by cell, without the cells that are complete."""
        lacking = {
            cell.name: [seed for seed in range(self.seeds.get(cell.name, 0)) if seed not in cell.runs]
            for cell in self.cells
        }
        return {name: seeds for name, seeds in lacking.items() if seeds}

    def lacks_runs_of(self, names: Iterable[str]) -> bool:
        """Return whether one of these cells has no runs, or misses a planned or failed seed, or one of 0, 1, …."""
        if self.seeds:
            return not self.missing().keys().isdisjoint(names)
        chosen = set(names)
        cells = [cell for cell in self.cells if cell.name in chosen]
        return any(cell.failed or not cell.runs or len(cell.runs) <= max(cell.runs) for cell in cells)

    def cell(self, name: str) -> GridCell | None:
        """Return the cell with this name."""
        return next((cell for cell in self.cells if cell.name == name), None)

    def times_to_baseline(self) -> list[tuple[GridCell, list[TimeToAccuracy | None]]]:
        """Return for each cell, per seed, when it first reached the final accuracy of the baseline in its column.

        The baseline itself is included: it often reaches its final accuracy long before its end, too.
        """
        baselines = {cell.column: cell for cell in self.cells if cell.row == self.baseline}
        times = []
        for cell in self.cells:
            other = baselines.get(cell.column)
            if other is None:
                continue
            seeds = sorted(cell.runs.keys() & other.runs.keys())
            if seeds:
                times.append((cell, [time_to_accuracy(cell.runs[seed], other.runs[seed]) for seed in seeds]))
        return times


def presets_of(grids: Sequence[Grid]) -> list[str]:
    """Return the presets of grids in the order of `PRESETS`, and then others."""
    order = [*PRESETS]
    names = dict.fromkeys(grid.preset for grid in grids)
    return sorted(names, key=lambda preset: order.index(preset) if preset in order else len(order))


def by_preset(grids: Sequence[Grid]) -> list[Grid]:
    """Return grids in the order of their presets, otherwise in the given order."""
    order = presets_of(grids)
    return sorted(grids, key=lambda grid: order.index(grid.preset))


def stored_grids(folder: Path = RESULTS) -> list[Grid]:
    """Return the grids of the tables in a folder, the largest preset first. Those that are planned have no runs yet.

    Raises:
        RunError: A table is missing or invalid.
    """
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in read_records(folder):
        groups.setdefault((record.key.preset, record.key.experiment), []).append(record)
    for experiment in EXPERIMENTS.values():
        if any(preset == "long" for preset, _ in groups) and experiment.planned_seeds("long"):
            groups.setdefault(("long", experiment.id), [])
    known = sorted((preset, id) for preset, id in groups if _size(preset) and id in EXPERIMENTS)
    return by_preset([_grid(EXPERIMENTS[id], preset, groups[preset, id]) for preset, id in known])


def stored_grid(preset: str, id: str, folder: Path = RESULTS) -> Grid:
    """Return a grid of the tables in a folder.

    Raises:
        RunError: A table is missing or invalid.
    """
    records = [record for record in read_records(folder) if record.key[:2] == (preset, id)]
    return _grid(EXPERIMENTS[id], preset, records)


def grid_of_runs(experiment: Experiment, preset: str, folder: Path, seeds: int = 0) -> Grid:
    """Return the grid of the run directories FOLDER/CELL/seed-N. Others are listed in `problems`.

    Args:
        experiment: The experiment.
        preset: Preset of its cells.
        folder: Folder of the cells.
        seeds: Number of seeds that were requested for each cell; those without a finished run count as failed.
    """
    grid = _grid(experiment, preset, *read_runs(folder, preset, experiment.id))
    for cell in grid.cells:
        cell.failed.update(set(range(seeds)) - cell.runs.keys())
    return grid


def _size(preset: str) -> str | None:
    """Return the size that a preset has the cells of: "cpu" for "cpu-32", its runs with other options."""
    return next((size for size in SIZES if preset == size or preset.startswith(f"{size}-")), None)


def _grid(
    experiment: Experiment, preset: str, records: Iterable[Record], problems: Sequence[tuple[Key, str]] = ()
) -> Grid:
    described = experiment.cells(_size(preset) or preset)
    runs: dict[str, dict[int, ReportedRun]] = {}
    for record in records:
        runs.setdefault(record.key.cell, {})[record.key.seed] = record.run
    data = {str(run.setting("data")) for own in runs.values() for run in own.values()}
    on_digits = data == {"mnist5k"} or (not data and preset == "smoke")  # no number of the paper is about them
    text = _on_digits if on_digits else str
    cells = [
        GridCell(
            cell.name,
            cell.row,
            text(cell.column),
            None if on_digits else cell.paper,
            dict(sorted(runs.get(cell.name, {}).items())),
            {key.seed for key, _ in problems if key.cell == cell.name},
        )
        for cell in described
    ]
    return Grid(
        experiment.id,
        text(experiment.title),
        text(experiment.shows),
        preset,
        cells,
        experiment.claims_about(described),
        [problem for _, problem in problems],
        experiment.baseline,
        experiment.planned_seeds(preset),
        None if on_digits else experiment.logs,
    )


def _on_digits(text: str) -> str:
    """Return a text about the paper's data sets for runs on the digits."""
    return re.sub(r"CIFAR-100?\+?( and CIFAR-100?\+?)?", "digits", text)
