"""Runs and grids of runs as reports read them, and the verdicts on claims."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from spherenet.errors import RunError, require_extra
from spherenet.files import read_json
from spherenet.runs import RunDirectory
from spherenet.text import as_number, plain

__all__ = [
    "LEVEL",
    "Curve",
    "Grid",
    "GridCell",
    "GridClaim",
    "ReportedRun",
    "Verdict",
    "distinct_names",
    "early_accuracy",
    "final_accuracy",
    "is_grid",
    "judge",
    "provenance",
    "read_grid",
    "read_run",
]


@dataclass(frozen=True)
class Curve:
    """A quantity over the iterations."""

    steps: list[int]
    values: list[float]


@dataclass(frozen=True)
class ReportedRun:
    """The content of config.json, metrics.jsonl and summary.json of a run; `summary` is None if it is not finished."""

    name: str
    path: str
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    summary: dict[str, Any] | None

    def curve(self, split: str, quantity: str) -> Curve:
        """Return a quantity of a split over the iterations, without the rows that do not have it."""
        rows = [(row["step"], as_number(row.get(quantity))) for row in self.rows if row["split"] == split]
        points = [(step, value) for step, value in rows if value is not None]
        return Curve([step for step, _ in points], [value for _, value in points])

    def learned_k(self) -> dict[str, list[float]]:
        """Return the final k of the filters of each layer, or an empty dictionary if k was not learned."""
        # Earlier versions named the rows of probes "observed".
        rows = [row for row in self.rows if row["split"] in ("probes", "observed")]
        observed = [row["k"] for row in rows if isinstance(row.get("k"), dict)]
        if self.setting("operator") != "learnable" or not observed:
            return {}
        layers = {layer: values for layer, values in observed[-1].items() if isinstance(values, list)}
        return {layer: [k for k in map(as_number, values) if k is not None] for layer, values in layers.items()}

    def learned_k_of_stages(self) -> dict[str, list[float]]:
        """Return the final k of the first layer of each stage, as in the paper's figure."""
        return {
            layer: values for layer, values in self.learned_k().items() if layer.endswith(".0.0") or "." not in layer
        }

    def setting(self, name: str) -> Any:
        """Return an option of the training configuration, or None if it is missing."""
        return _dict(self.config.get("train")).get(name)


def read_run(path: str | Path) -> ReportedRun:
    """Read a run, finished or not.

    Raises:
        RunError: The folder is not a run, or it has no evaluation yet.
    """
    directory = RunDirectory.open(path)
    rows = directory.metrics.read()
    summary = directory.summary if directory.finished else None
    run = ReportedRun(directory.path.resolve().name, str(path), directory.config, rows, summary)
    if not run.curve("test", "accuracy").values:
        raise RunError(f"{directory.path} has no evaluation yet.")
    return run


def distinct_names(runs: Sequence[ReportedRun]) -> list[str]:
    """Return the folder name of each run, or its path if several runs have the same folder name."""
    names = [run.name for run in runs]
    return [run.path if names.count(run.name) > 1 else run.name for run in runs]


def provenance(run: ReportedRun) -> str:
    """Return the command of a run with its versions and hardware.

    The operator is added to a command that does not state it, because its default differs between versions.
    """
    recorded = run.config.get("command")
    command = [str(word) for word in recorded] if isinstance(recorded, list) else []
    operator = run.setting("operator")
    if command[1:2] == ["train"] and not {"--operator", "--resume", "--config"}.intersection(command):
        command[2:2] = ["--operator", "none" if operator is None else str(operator)]
    details = {**_dict(run.config.get("versions")), **_dict(run.config.get("hardware"))}
    return f"{plain(' '.join(command))} ({', '.join(f'{name} {value}' for name, value in details.items())})"


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


LEVEL = 0.05
"""Significance level of verdicts."""

EXPERIMENT_FILE = "experiment.json"


def final_accuracy(run: ReportedRun) -> float:
    """Return the last test accuracy of a run in percent."""
    return 100 * run.curve("test", "accuracy").values[-1]


def early_accuracy(run: ReportedRun) -> float:
    """Return the mean test accuracy in percent over the evaluations in the first half of a run."""
    return 100 * fmean(_first_half(run.curve("test", "accuracy")))


def steadiness(run: ReportedRun) -> float:
    """Return minus the mean drop of test accuracy between evaluations in percent, counting a rise as 0.

    Only the first half of the run counts; later the learning rate is low and all runs are steady.
    """
    first = _first_half(run.curve("test", "accuracy"))
    return -100 * fmean([max(0.0, before - after) for before, after in itertools.pairwise(first)] or [0.0])


def _first_half(curve: Curve) -> list[float]:
    """Return the values in the first half of the iterations, at least one."""
    first = [value for step, value in zip(curve.steps, curve.values, strict=True) if step <= curve.steps[-1] / 2]
    return first or curve.values[:1]


def narrowing_of_k(run: ReportedRun) -> float:
    """Return the standard deviation of the learned k in the first stage minus that in the last; 0 without learned k."""
    spreads = [stdev(values) for values in run.learned_k_of_stages().values() if len(values) > 1]
    return spreads[0] - spreads[-1] if spreads else 0.0


def rise_of_k(run: ReportedRun) -> float:
    """Return the mean learned k of the last convolution minus that of the first; 0 without learned k."""
    means = [fmean(values) for layer, values in run.learned_k().items() if ".stages." in layer and values]
    return means[-1] - means[0] if means else 0.0


class Quantity(NamedTuple):
    """A number of a run that claims compare, and how its differences are printed."""

    measure: Callable[[ReportedRun], float]
    unit: str = "points"
    digits: int = 2


QUANTITIES = {
    "accuracy": Quantity(final_accuracy),
    "early": Quantity(early_accuracy),
    "steadiness": Quantity(steadiness, "points smaller mean drop between evaluations"),
    "rise": Quantity(rise_of_k, "in the mean of k", digits=4),
    "narrowing": Quantity(narrowing_of_k, "in the spread of k", digits=4),
}


@dataclass(frozen=True)
class GridCell:
    """A cell of an experiment with its finished runs by seed."""

    name: str
    row: str
    column: str
    paper: float | None
    runs: dict[int, ReportedRun] = field(default_factory=dict)

    def values(self, quantity: str = "accuracy") -> list[float]:
        """Return a quantity of each run."""
        return [QUANTITIES[quantity].measure(run) for run in self.runs.values()]

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
class GridClaim:
    """A claim of the paper: in each pair of cells the first has the larger quantity."""

    text: str
    source: str
    pairs: list[tuple[str, str]]
    quantity: str


@dataclass(frozen=True)
class Grid:
    """An experiment: its cells in the order of the paper, its claims, and messages about runs that were left out."""

    id: str
    title: str
    shows: str
    preset: str
    cells: list[GridCell]
    claims: list[GridClaim]
    problems: list[str]

    def cell(self, name: str) -> GridCell | None:
        """Return the cell with this name."""
        return next((cell for cell in self.cells if cell.name == name), None)


@dataclass(frozen=True)
class Verdict:
    """The decision on a claim: "confirmed", "refuted" or "not decided", with the statistics of the difference."""

    claim: GridClaim
    verdict: str
    difference: float | None
    deviation: float | None
    seeds: int
    pairs: int
    p: float | None

    @property
    def statistics(self) -> str:
        """The statistics as text."""
        if self.difference is None:
            return "no pair of cells has finished runs of the same seed"
        _, unit, digits = QUANTITIES[self.claim.quantity]
        spread = "" if self.deviation is None else f" ± {self.deviation:.{digits}f}"
        p_value = "" if self.p is None else f", p = {self.p:.3f} (two-sided t-test over seeds)"
        pairs = f"{self.pairs} pair{'s' if self.pairs > 1 else ''}"
        seeds = f"n = {self.seeds} seed{'s' if self.seeds > 1 else ''}"
        return f"{self.difference:+.{digits}f}{spread} {unit} over {pairs}, {seeds}{p_value}"


def judge(grid: Grid, claim: GridClaim) -> Verdict:
    """Decide a claim by a two-sided t-test over seeds on the difference within pairs, averaged over the pairs.

    A seed is one observation however many pairs it has, because the pairs of a seed are not independent. One seed
    decides nothing.
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
    # Seeds without all pairs are left out: their average is over other pairs.
    means = [fmean(differences) for differences in by_seed.values() if len(differences) == len(pairs)]
    if len(means) < 2:
        return Verdict(claim, "not decided", means[0] if means else None, None, len(means), len(pairs), None)
    mean, deviation = fmean(means), stdev(means)
    p = _p_value(means) if deviation > 0 else 0.0
    decision = "confirmed" if mean > 0 else "refuted"
    return Verdict(claim, decision if p < LEVEL else "not decided", mean, deviation, len(means), len(pairs), p)


def _p_value(values: list[float]) -> float:
    """Return the two-sided p-value of Student's t-test for a mean of 0."""
    require_extra("report", "scipy")
    from scipy.stats import ttest_1samp  # type: ignore[import-untyped]

    return float(ttest_1samp(values, 0.0).pvalue)


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
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"{file} does not describe an experiment ({error!r}).") from None
    return Grid(id, title, shows, preset, cells, claims, problems)


def _read_claim(entry: dict[str, Any]) -> GridClaim:
    if entry["quantity"] not in QUANTITIES:
        raise ValueError(f"quantity must be one of {', '.join(QUANTITIES)}, got {entry['quantity']!r}")
    pairs = [(str(first), str(second)) for first, second in entry["pairs"]]
    return GridClaim(str(entry["text"]), str(entry["source"]), pairs, entry["quantity"])


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
