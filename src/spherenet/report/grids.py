"""Grids of runs: the cells and claims of an experiment with its finished runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from spherenet.errors import RunError
from spherenet.files import read_json
from spherenet.report.runs import QUANTITIES, Curve, ReportedRun, final_accuracy, read_run
from spherenet.text import as_number

__all__ = ["Grid", "GridCell", "GridClaim", "Requirement", "TimeToAccuracy", "is_grid", "read_grid"]

EXPERIMENT_FILE = "experiment.json"


class TimeToAccuracy(NamedTuple):
    """Iterations and seconds until a run reached the final accuracy of another, as fractions of that run."""

    iterations: float
    seconds: float | None


def time_to_accuracy(run: ReportedRun, other: ReportedRun) -> TimeToAccuracy | None:
    """Return when a run first reached the final test accuracy of another; None if it did not.

    Seconds are those of training and evaluation as recorded; None if a run did not record them.
    """
    target, rows = final_accuracy(other), other.rows
    last = rows[-1]["step"]
    for row in run.rows_of("test"):
        accuracy = as_number(row.get("accuracy"))
        if accuracy is not None and 100 * accuracy >= target:
            seconds, total = as_number(row.get("seconds")), as_number((other.summary or {}).get("seconds"))
            return TimeToAccuracy(row["step"] / last, None if seconds is None or not total else seconds / total)
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
        curves = [run.curve("test", "accuracy") for run in self.runs.values()]
        by_step = [dict(zip(curve.steps, curve.values, strict=True)) for curve in curves]
        steps = sorted(set(by_step[0]).intersection(*by_step)) if by_step else []
        return Curve(steps, [fmean(points[step] for points in by_step) for step in steps])


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
    def statement(self) -> str:
        """The text with the BatchNorm statistics, if they are part of the claim, and the source."""
        statistics = "" if self.protocol is None else f", {self.protocol} BatchNorm statistics"
        return f"{self.text}{statistics} ({self.source})"


@dataclass(frozen=True)
class Grid:
    """An experiment: its cells in the order of the paper, its claims, and messages about runs that were left out.

    `baseline` is the row with which the others are compared in the time to its final accuracy, or None.
    """

    id: str
    title: str
    shows: str
    preset: str
    cells: list[GridCell]
    claims: list[GridClaim]
    problems: list[str]
    baseline: str | None = None

    def cell(self, name: str) -> GridCell | None:
        """Return the cell with this name."""
        return next((cell for cell in self.cells if cell.name == name), None)

    def times_to_baseline(self) -> list[tuple[GridCell, list[TimeToAccuracy | None]]]:
        """Return for each cell, per seed, when it first reached the final accuracy of the baseline in its column."""
        baselines = {cell.column: cell for cell in self.cells if cell.row == self.baseline}
        times = []
        for cell in self.cells:
            other = baselines.get(cell.column)
            if other is None or other is cell:
                continue
            seeds = sorted(cell.runs.keys() & other.runs.keys())
            if seeds:
                times.append((cell, [time_to_accuracy(cell.runs[seed], other.runs[seed]) for seed in seeds]))
        return times


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
        baseline = content.get("baseline")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"{file} does not describe an experiment ({error!r}).") from None
    return Grid(id, title, shows, preset, cells, claims, problems, None if baseline is None else str(baseline))


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
