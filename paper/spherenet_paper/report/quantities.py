"""The numbers of a run that claims compare."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from statistics import fmean, stdev
from typing import NamedTuple

from spherenet.cli.plugin import as_number
from spherenet.errors import RunError
from spherenet.report import Curve, ReportedRun

__all__ = [
    "QUANTITIES",
    "STEADY",
    "Quantity",
    "early_accuracy",
    "final_accuracy",
    "has_steady_pace",
    "mean_between",
    "training_accuracy",
]


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
