"""Grids of runs: the cells and claims of an experiment with its finished runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from spherenet._util.files import read_json
from spherenet._util.text import as_number
from spherenet.errors import RunError
from spherenet.report import Curve, ReportedRun, read_run
from spherenet_paper.report.quantities import QUANTITIES, final_accuracy, has_steady_pace

__all__ = [
    "PRESETS",
    "Grid",
    "GridCell",
    "GridClaim",
    "Logs",
    "Requirement",
    "TimeToAccuracy",
    "by_preset",
    "is_grid",
    "presets_of",
    "read_grid",
]

EXPERIMENT_FILE = "experiment.json"

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
    """A cell of an experiment with its finished runs by seed."""

    name: str
    row: str
    column: str
    paper: float | None
    runs: dict[int, ReportedRun] = field(default_factory=dict)

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
class Requirement:
    """A condition without which the runs cannot test a claim: a quantity of the cells is at least a minimum.

    Attributes:
        quantity: Name of the quantity.
        minimum: Smallest mean over seeds, in the unit of the quantity.
        cells: "both" for all cells of the claim, or "second" for the second cell of each pair.
    """

    quantity: str
    minimum: float
    cells: str

    def __str__(self) -> str:
        """Return the condition as text."""
        cells = "every network" if self.cells == "both" else "the network it is compared with"
        article = "an" if self.quantity[0] in "aeiou" else "a"
        return f"{article} {self.quantity} of at least {self.minimum:g} % of {cells}"


@dataclass(frozen=True)
class GridClaim:
    """A claim of the paper: in each pair of cells the first has the larger quantity under an evaluation protocol."""

    text: str
    source: str
    pairs: list[tuple[str, str]]
    quantity: str
    requires: Requirement | None = None
    protocol: str | None = None

    @property
    def full_text(self) -> str:
        """The text with the BatchNorm statistics, if they are part of the claim."""
        return self.text if self.protocol is None else f"{self.text}, {self.protocol} BatchNorm statistics"

    @property
    def statement(self) -> str:
        """The text with the BatchNorm statistics, and the source."""
        return f"{self.full_text} ({self.source})"


@dataclass(frozen=True)
class Logs:
    """Mean training and test accuracy in percent, by cell, in logs that others published, from `first` to `last`."""

    source: str
    first: int
    last: int
    accuracies: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Grid:
    """An experiment with its runs.

    Attributes:
        id: Name of the experiment.
        title: Heading.
        shows: What its numbers are.
        preset: Preset, or the name of the folder of presets if it is the preset with a suffix, e.g. "cpu-32" for runs
            of the preset cpu with other options.
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
    claims: list[GridClaim]
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


def is_grid(path: str | Path) -> bool:
    """Return whether a folder holds an experiment rather than a run."""
    return (Path(path) / EXPERIMENT_FILE).is_file()


def read_grid(path: str | Path) -> Grid:
    """Read the folder of an experiment. Unfinished and corrupt runs are left out and listed in `problems`.

    Raises:
        RunError: experiment.json is missing, corrupt or of another version.
    """
    folder = Path(path)
    file = folder / EXPERIMENT_FILE
    try:
        content = read_json(file)
    except (OSError, ValueError) as error:
        raise RunError(f"{file} cannot be read ({error}).") from None
    if not isinstance(content, dict) or content.get("format") != 1:
        raise RunError(f"{folder} holds results of another version.")
    problems: list[str] = []
    try:
        cells = [_read_cell(folder, entry, problems) for entry in content["cells"]]
        claims = [_read_claim(entry) for entry in content["claims"]]
        id, title, shows, preset = (str(content[name]) for name in ("id", "title", "shows", "preset"))
        if preset and folder.resolve().parent.name.startswith(f"{preset}-"):
            preset = folder.resolve().parent.name
        baseline = content.get("baseline")
        seeds = {str(name): int(number) for name, number in content.get("seeds", {}).items()}
        logs = None if content.get("logs") is None else _read_logs(content["logs"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"{file} does not describe an experiment ({error!r}).") from None
    baseline = None if baseline is None else str(baseline)
    data = {str(run.setting("data")) for cell in cells for run in cell.runs.values()}
    if data == {"mnist5k"} or (not data and preset == "smoke"):  # no number of the paper is about them
        title, shows, logs = _on_digits(title), _on_digits(shows), None
        cells = [replace(cell, column=_on_digits(cell.column), paper=None) for cell in cells]
    return Grid(id, title, shows, preset, cells, claims, problems, baseline, seeds, logs)


def _on_digits(text: str) -> str:
    """Return a text about the paper's data sets for runs on the digits."""
    return re.sub(r"CIFAR-100?\+?( and CIFAR-100?\+?)?", "digits", text)


def _read_logs(entry: dict[str, Any]) -> Logs:
    accuracies = {str(name): (float(train), float(test)) for name, (train, test) in entry["accuracies"].items()}
    return Logs(str(entry["source"]), int(entry["first"]), int(entry["last"]), accuracies)


def _read_claim(entry: dict[str, Any]) -> GridClaim:
    pairs = [(str(first), str(second)) for first, second in entry["pairs"]]
    requires = entry.get("requires")
    if requires is not None:
        cells = requires["cells"]
        if cells not in ("both", "second"):
            raise ValueError(f"cells must be both or second, got {cells!r}")
        requires = Requirement(_quantity(requires["quantity"]), float(requires["minimum"]), cells)
    protocol = entry.get("protocol")
    return GridClaim(
        str(entry["text"]),
        str(entry["source"]),
        pairs,
        _quantity(entry["quantity"]),
        requires,
        None if protocol is None else str(protocol),
    )


def _quantity(name: Any) -> str:
    if name not in QUANTITIES:
        raise ValueError(f"quantity must be one of {', '.join(QUANTITIES)}, got {name!r}")
    return str(name)


def _read_cell(folder: Path, entry: dict[str, Any], problems: list[str]) -> GridCell:
    name, paper = str(entry["name"]), entry.get("paper")
    if name != Path(name).name:
        raise ValueError(f"the name of a cell must be a file name, got {name!r}")
    cell = GridCell(name, str(entry["row"]), str(entry["column"]), float(paper) if paper is not None else None)
    for path in sorted((folder / name).glob("seed-*")):
        seed = path.name.removeprefix("seed-")
        if not path.is_dir() or not seed.isdecimal():
            continue
        try:
            run = read_run(path)
            if run.summary is None:
                raise RunError(f"{path} has not finished.")
            cell.runs[int(seed)] = run
        except RunError as error:
            problems.append(str(error))
    return cell
