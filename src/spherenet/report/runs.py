"""Runs as reports read them, and the numbers of a run that claims compare."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from spherenet._util.text import as_number, plain
from spherenet.errors import RunError
from spherenet.runs import RunDirectory

__all__ = [
    "QUANTITIES",
    "Curve",
    "Quantity",
    "ReportedRun",
    "command_and_details",
    "distinct_names",
    "early_accuracy",
    "final_accuracy",
    "has_steady_pace",
    "mean_between",
    "provenance",
    "read_run",
    "training_accuracy",
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

    def curve(self, split: str, quantity: str, protocol: str | None = None) -> Curve:
        """Return a quantity of a split over the iterations, without the rows that do not have it.

        Args:
            split: "train", "test" or "probes".
            quantity: Key of the rows.
            protocol: BatchNorm statistics of the evaluations; None for the first ones that the run names.
        """
        rows = [(row["step"], as_number(row.get(quantity))) for row in self.rows_of(split, protocol)]
        points = [(step, value) for step, value in rows if value is not None]
        return Curve([step for step, _ in points], [value for _, value in points])

    def rows_of(self, split: str, protocol: str | None = None) -> list[dict[str, Any]]:
        """Return the rows of a split. Rows without a protocol belong to all of them."""
        protocol = protocol or self.protocols()[0]
        return [row for row in self.rows if row["split"] == split and row.get("protocol", protocol) == protocol]

    def protocols(self) -> list[str]:
        """Return the BatchNorm statistics of the evaluations, the primary ones first."""
        names = self.setting("bn_eval")
        return [str(name) for name in names] if isinstance(names, list) and names else ["running"]

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
    """Return the command of a run, and those that resumed it with changes, with its versions and hardware."""
    return "{} ({})".format(*command_and_details(run))


def command_and_details(run: ReportedRun) -> tuple[str, str]:
    """Return the command of a run with those that resumed it with changes, and its versions and hardware.

    The operator is added to a command that does not state it, because its default differs between versions.
    """
    recorded = run.config.get("command")
    command = [str(word) for word in recorded] if isinstance(recorded, list) else []
    operator = run.setting("operator")
    if command[1:2] == ["train"] and not {"--operator", "--resume", "--config"}.intersection(command):
        command[2:2] = ["--operator", "none" if operator is None else str(operator)]
    details = {**_dict(run.config.get("versions")), **_dict(run.config.get("hardware"))}
    history = run.config.get("history")
    entries = [_dict(entry) for entry in history[1:]] if isinstance(history, list) else []
    changes = [str(entry.get("command")) for entry in entries if entry.get("changes")]
    shown = ", ".join(f"{name} {value}" for name, value in details.items())
    return plain("; ".join([shlex.join(command), *changes])), shown


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def final_accuracy(run: ReportedRun, protocol: str | None = None) -> float:
    """Return the last test accuracy of a run in percent."""
    return 100 * _test_accuracy(run, protocol).values[-1]


def training_accuracy(run: ReportedRun, protocol: str | None = None) -> float:
    """Return the training accuracy in percent at the end of a run, over the steps of its last row; 0 without rows."""
    return 100 * (run.curve("train", "accuracy").values or [0.0])[-1]


def early_accuracy(run: ReportedRun, protocol: str | None = None) -> float:
    """Return the mean test accuracy in percent over the evaluations in the first half of a run."""
    return 100 * fmean(_first_half(_test_accuracy(run, protocol)))


def mean_accuracy(run: ReportedRun, protocol: str | None = None) -> float:
    """Return the mean test accuracy in percent over all evaluations of a run."""
    return 100 * fmean(_test_accuracy(run, protocol).values)


def mean_between(run: ReportedRun, split: str, first: int, last: int, protocol: str | None = None) -> float | None:
    """Return the mean accuracy of a split in percent from one iteration to another; None without rows."""
    curve = run.curve(split, "accuracy", protocol)
    values = [value for step, value in zip(curve.steps, curve.values, strict=True) if first <= step <= last]
    return 100 * fmean(values) if values else None


def lag(run: ReportedRun, protocol: str | None = None) -> float:
    """Return how many points of mean accuracy a run loses with lagging instead of precise BatchNorm statistics."""
    return mean_accuracy(run, "precise") - mean_accuracy(run, "lagging")


def steadiness(run: ReportedRun, protocol: str | None = None) -> float:
    """Return minus the mean drop of test accuracy between evaluations in percent, counting a rise as 0.

    Only the first half of the run counts; later the learning rate is low and all runs are steady.
    """
    first = _first_half(_test_accuracy(run, protocol))
    return -100 * fmean([max(0.0, before - after) for before, after in itertools.pairwise(first)] or [0.0])


STEADY = 1.2
"""Largest ratio of the slow steps of a run (ninth decile) to the fast ones (first decile) at a steady pace."""


def has_steady_pace(run: ReportedRun) -> bool | None:
    """Return whether a run seems to have had its cores to itself: its slow steps took little longer than its fast ones.

    The seconds per step are those between two rows of training without an evaluation between them, if there are such
    rows. With fewer than ten of them the return value is None.
    """
    evaluated = {row["step"] for row in run.rows if row["split"] != "train"}
    points = [(row["step"], as_number(row.get("seconds"))) for row in run.rows if row["split"] == "train"]
    paces: dict[bool, list[float]] = {True: [], False: []}
    for (step, start), (after, end) in itertools.pairwise(points):
        if start is not None and end is not None and after > step:
            paces[step in evaluated].append((end - start) / (after - step))
    chosen = sorted(paces[False] or paces[True])
    if len(chosen) < 10:
        return None
    slow, fast = chosen[len(chosen) * 9 // 10], chosen[len(chosen) // 10]
    return 0 < slow <= STEADY * fast


def _test_accuracy(run: ReportedRun, protocol: str | None) -> Curve:
    """Return the test accuracy over the iterations with these BatchNorm statistics.

    Raises:
        RunError: The run was not evaluated with them.
    """
    curve = run.curve("test", "accuracy", protocol)
    if not curve.values:
        raise RunError(f"{run.path} has no evaluation with {protocol} BatchNorm statistics.")
    return curve


def _first_half(curve: Curve) -> list[float]:
    """Return the values in the first half of the iterations, at least one."""
    first = [value for step, value in zip(curve.steps, curve.values, strict=True) if step <= curve.steps[-1] / 2]
    return first or curve.values[:1]


def narrowing_of_k(run: ReportedRun, protocol: str | None = None) -> float:
    """Return the standard deviation of the learned k in the first stage minus that in the last; 0 without learned k."""
    spreads = [stdev(values) for values in run.learned_k_of_stages().values() if len(values) > 1]
    return spreads[0] - spreads[-1] if spreads else 0.0


def rise_of_k(run: ReportedRun, protocol: str | None = None) -> float:
    """Return the mean learned k of the last convolution minus that of the first; 0 without learned k."""
    means = [fmean(values) for layer, values in run.learned_k().items() if ".stages." in layer and values]
    return means[-1] - means[0] if means else 0.0


class Quantity(NamedTuple):
    """A number of a run, for BatchNorm statistics by name, that claims compare, and how its differences are printed."""

    measure: Callable[[ReportedRun, str | None], float]
    unit: str = "points"
    digits: int = 2


QUANTITIES = {
    "accuracy": Quantity(final_accuracy),
    "training accuracy": Quantity(training_accuracy),
    "early": Quantity(early_accuracy),
    "mean": Quantity(mean_accuracy),
    "lag": Quantity(lag, "points that lagging statistics cost"),
    "steadiness": Quantity(steadiness, "points smaller mean drop between evaluations"),
    "rise": Quantity(rise_of_k, "in the mean of k", digits=4),
    "narrowing": Quantity(narrowing_of_k, "in the spread of k", digits=4),
}
