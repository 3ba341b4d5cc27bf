"""What the runs at hand say about the paper's claims: confirmed, refuted or not decided, never by wish.

The runs of an experiment with the paper's values: what `spherenet reproduce` left in a folder.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from spherenet.errors import RunError
from spherenet.files import read_json
from spherenet.report.runs import Curve, ReportedRun, read_run

__all__ = [
    "LEVEL",
    "ClaimOfGrid",
    "Grid",
    "GridCell",
    "Verdict",
    "early_accuracy",
    "final_accuracy",
    "is_grid",
    "judge",
    "read_grid",
]

LEVEL = 0.05
"""A difference counts when chance alone would give one as large in fewer than one of twenty repetitions."""


@dataclass(frozen=True)
class Verdict:
    """A claim and its statistics: the mean difference over seeds, and how sure it is."""

    claim: ClaimOfGrid
    verdict: str
    difference: float | None
    deviation: float | None
    seeds: int
    pairs: int
    p: float | None

    @property
    def words(self) -> str:
        """The statistics in words."""
        if self.difference is None:
            return "no pair of cells has finished runs of the same seed"
        _, unit, digits = QUANTITIES[self.claim.quantity]
        spread = "" if self.deviation is None else f" ± {self.deviation:.{digits}f}"
        sure = "" if self.p is None else f", p = {self.p:.3f} (two-sided t-test over seeds)"
        pairs = f"{self.pairs} pair{'s' if self.pairs > 1 else ''}"
        seeds = f"n = {self.seeds} seed{'s' if self.seeds > 1 else ''}"
        return f"{self.difference:+.{digits}f}{spread} {unit} over {pairs}, {seeds}{sure}"


def judge(grid: Grid, claim: ClaimOfGrid) -> Verdict:
    """Decide a claim by a t-test over seeds of the difference within pairs, averaged over the pairs.

    A seed is one observation, however many pairs it has: pairs of one seed share their luck. One seed decides nothing.
    """
    measure = QUANTITIES[claim.quantity].measure
    by_seed: dict[int, list[float]] = {}
    pairs = set()
    for first, second in claim.pairs:
        better, worse = grid.cell(first), grid.cell(second)
        if better is None or worse is None:
            continue
        for seed in better.runs.keys() & worse.runs.keys():
            by_seed.setdefault(seed, []).append(measure(better.runs[seed]) - measure(worse.runs[seed]))
            pairs.add((first, second))
    # Seeds that have only some of the pairs would compare apples with pears.
    whole = [fmean(differences) for differences in by_seed.values() if len(differences) == len(pairs)]
    if not whole:
        return Verdict(claim, "not decided", None, None, 0, len(pairs), None)
    mean = fmean(whole)
    if len(whole) < 2:
        return Verdict(claim, "not decided", mean, None, len(whole), len(pairs), None)
    from scipy.stats import ttest_1samp  # type: ignore[import-untyped]

    deviation = stdev(whole)
    p = float(ttest_1samp(whole, 0.0).pvalue) if deviation > 0 else 0.0
    decided = p < LEVEL
    verdict = ("confirmed" if mean > 0 else "refuted") if decided else "not decided"
    return Verdict(claim, verdict, mean, deviation, len(whole), len(pairs), p)


_FILE = "experiment.json"


def final_accuracy(run: ReportedRun) -> float:
    """The test accuracy at the end of a run, in per cent."""
    return 100 * run.curve("test", "accuracy").values[-1]


def _first_half(curve: Curve) -> list[float]:
    """The values in the first half of the iterations, at least one."""
    first = [value for step, value in zip(curve.steps, curve.values, strict=True) if step <= curve.steps[-1] / 2]
    return first or curve.values[:1]


def early_accuracy(run: ReportedRun) -> float:
    """The mean test accuracy over the evaluations of the first half of a run, in per cent."""
    return 100 * fmean(_first_half(run.curve("test", "accuracy")))


def steadiness(run: ReportedRun) -> float:
    """Minus the mean fall of test accuracy from one evaluation to the next, a rise being no fall, in per cent.

    Over the first half of the run: later the learning rate is low, and all are steady.
    """
    first = _first_half(run.curve("test", "accuracy"))
    return -100 * fmean([max(0.0, before - after) for before, after in itertools.pairwise(first)] or [0.0])


def narrowing_of_k(run: ReportedRun) -> float:
    """How much wider the learned k lie in the first stage than in the last, as standard deviations; 0 without such."""
    spreads = [stdev(values) for values in run.k_of_stages().values() if len(values) > 1]
    return spreads[0] - spreads[-1] if spreads else 0.0


def rise_of_k(run: ReportedRun) -> float:
    """How much larger the mean learned k of the last convolution is than that of the first; 0 without such."""
    means = [fmean(values) for layer, values in run.learned_k().items() if ".stages." in layer and values]
    return means[-1] - means[0] if means else 0.0


class Quantity(NamedTuple):
    """A number of a run that a claim is about, and how differences of it are written."""

    measure: Callable[[ReportedRun], float]
    unit: str = "points"
    digits: int = 2


QUANTITIES = {
    "accuracy": Quantity(final_accuracy),
    "early": Quantity(early_accuracy),
    "steadiness": Quantity(steadiness, "points less of a fall between evaluations"),
    "rise": Quantity(rise_of_k, "in the mean of k", digits=4),
    "narrowing": Quantity(narrowing_of_k, "in the spread of k", digits=4),
}


@dataclass(frozen=True)
class GridCell:
    """A cell with its finished runs, by seed."""

    name: str
    row: str
    column: str
    paper: float | None
    runs: dict[int, ReportedRun] = field(default_factory=dict)

    def values(self, quantity: str = "accuracy") -> list[float]:
        """A quantity of each run."""
        return [QUANTITIES[quantity].measure(run) for run in self.runs.values()]

    def mean_and_std(self) -> tuple[float, float | None] | None:
        """Mean and standard deviation of the final accuracy; no deviation of one run, nothing of none."""
        values = self.values()
        if not values:
            return None
        return fmean(values), stdev(values) if len(values) > 1 else None

    def mean_curve(self) -> Curve:
        """The mean test accuracy over the seeds at each evaluation that all of them have."""
        curves = [run.curve("test", "accuracy") for run in self.runs.values()]
        by_step = [dict(zip(curve.steps, curve.values, strict=True)) for curve in curves]
        steps = sorted(set(by_step[0]).intersection(*by_step)) if by_step else []
        return Curve(steps, [fmean(points[step] for points in by_step) for step in steps])


@dataclass(frozen=True)
class ClaimOfGrid:
    """A claim of the paper and the pairs of cells that decide it."""

    text: str
    source: str
    pairs: list[tuple[str, str]]
    quantity: str


@dataclass(frozen=True)
class Grid:
    """An experiment: its cells in the order of the paper, its claims, and what could not be read."""

    id: str
    title: str
    shows: str
    preset: str
    cells: list[GridCell]
    claims: list[ClaimOfGrid]
    complaints: list[str]

    def cell(self, name: str) -> GridCell | None:
        """The cell of a name."""
        return next((cell for cell in self.cells if cell.name == name), None)


def is_grid(path: str | Path) -> bool:
    """Whether a folder holds an experiment rather than a run."""
    return (Path(path) / _FILE).is_file()


def read_grid(path: str | Path) -> Grid:
    """Read an experiment's folder; runs that are unfinished or damaged are left out and named in `complaints`.

    Raises RunError where experiment.json is missing, damaged or of another version.
    """
    folder = Path(path)
    try:
        told = read_json(folder / _FILE)
    except (OSError, ValueError) as error:
        raise RunError(f"{folder / _FILE} cannot be read ({error}).") from None
    if not isinstance(told, dict) or told.get("format") != 1:
        raise RunError(f"{folder} holds results of another version.")
    complaints: list[str] = []
    try:
        cells = [_cell(folder, described, complaints) for described in told["cells"]]
        claims = [_claim(described) for described in told["claims"]]
        id, title, shows, preset = (str(told[name]) for name in ("id", "title", "shows", "preset"))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"{folder / _FILE} does not describe an experiment ({error!r}).") from None
    return Grid(id, title, shows, preset, cells, claims, complaints)


def _claim(told: dict[str, Any]) -> ClaimOfGrid:
    if told["quantity"] not in QUANTITIES:
        raise ValueError(f"a claim is about {told['quantity']!r}")
    pairs = [(str(first), str(second)) for first, second in told["pairs"]]
    return ClaimOfGrid(str(told["text"]), str(told["source"]), pairs, told["quantity"])


def _cell(folder: Path, told: dict[str, Any], complaints: list[str]) -> GridCell:
    name, paper = str(told["name"]), told.get("paper")
    if name != Path(name).name:
        raise ValueError(f"a cell has the name {name!r}")
    cell = GridCell(name, str(told["row"]), str(told["column"]), float(paper) if paper is not None else None)
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
            complaints.append(str(error))
    return cell
