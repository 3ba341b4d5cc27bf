"""Verdicts on claims: effect sizes with intervals over seeds, and conditions without which a claim is out of reach."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean, stdev

from spherenet.errors import RunError, require_extra
from spherenet_paper.experiments.experiment import Claim, Requirement
from spherenet_paper.report.grids import Grid
from spherenet_paper.report.quantities import QUANTITIES

__all__ = [
    "CONFIDENCE",
    "CONFIRMED",
    "NOT_DECIDED",
    "OUT_OF_REACH",
    "REFUTED",
    "Verdict",
    "confidence_interval",
    "judge",
]

CONFIDENCE = 0.95
"""Confidence of the intervals. A claim is decided if the interval of the difference does not contain 0."""

CONFIRMED, REFUTED, NOT_DECIDED, OUT_OF_REACH = "confirmed", "refuted", "not decided", "out of reach"


@dataclass(frozen=True)
class Verdict:
    """The decision on a claim, and the difference it rests on.

    Attributes:
        claim: The claim.
        verdict: "confirmed", "refuted", "not decided", or "out of reach" if the runs do not meet its requirement.
        difference: Mean difference over seeds, or None without a common seed, or if planned runs are missing.
        interval: Confidence interval of the difference, or None for fewer than two seeds.
        seeds: Number of seeds.
        pairs: Number of pairs of cells.
        unmet: Smallest mean of the required quantity if the requirement is not met, else None.
    """

    claim: Claim
    verdict: str
    difference: float | None
    interval: tuple[float, float] | None
    seeds: int
    pairs: int
    unmet: float | None = None

    @property
    def effect(self) -> str:
        """The difference with its interval, e.g. "+1.41 [+0.13, +2.69] points"; "–" without a difference."""
        if self.difference is None:
            return "–"
        _, unit, digits = QUANTITIES[self.claim.quantity]
        interval = "" if self.interval is None else " [{:+.{d}f}, {:+.{d}f}]".format(*self.interval, d=digits)
        return f"{self.difference:+.{digits}f}{interval} {unit}"

    @property
    def statistics(self) -> str:
        """The difference with its interval, the number of pairs and seeds, and a requirement that is not met."""
        if self.difference is None:
            return "runs of its cells are missing"
        pairs = f"{self.pairs} pair{'s' if self.pairs > 1 else ''}"
        seeds = f"n = {self.seeds} seed{'s' if self.seeds > 1 else ''}"
        unmet = "" if self.unmet is None else f"; a test requires {self.claim.requires}, reached {self.unmet:.1f} %"
        return f"{self.effect} over {pairs}, {seeds}{unmet}"


def judge(grid: Grid, claim: Claim) -> Verdict:
    """Decide a claim by the t-interval over seeds of the difference within pairs, averaged over the pairs.

    A seed is one observation however many pairs it has, because the pairs of a seed are not independent. One seed
    decides nothing. If a requirement is not met, the claim is out of reach whatever the difference is. A claim waits
    until all runs of its cells are finished: those that happen to be first decide nothing, nor do those that did not
    fail.
    """
    if grid.lacks_runs_of(name for pair in claim.pairs for name in pair):
        return Verdict(claim, NOT_DECIDED, None, None, 0, 0)
    measure, protocol = QUANTITIES[claim.quantity].measure, claim.protocol
    by_seed: dict[int, list[float]] = {}
    pairs = set()
    for first, second in claim.pairs:
        better, worse = grid.cell(first), grid.cell(second)
        if better is None or worse is None:
            continue
        for seed in better.runs.keys() & worse.runs.keys():
            with suppress(RunError):  # a run without evaluations of this protocol
                difference = measure(better.runs[seed], protocol) - measure(worse.runs[seed], protocol)
                by_seed.setdefault(seed, []).append(difference)
                pairs.add((first, second))
    # Seeds without all pairs are left out: their average is over other pairs.
    means = [fmean(differences) for differences in by_seed.values() if len(differences) == len(pairs)]
    mean, interval, decision = fmean(means) if means else None, None, NOT_DECIDED
    if mean is not None and len(means) > 1:
        interval = confidence_interval(means)
        if interval[0] > 0 or interval[1] < 0:
            decision = CONFIRMED if mean > 0 else REFUTED
    unmet = None
    if pairs and claim.requires is not None:
        smallest = _smallest_mean(grid, claim.requires, pairs)
        if smallest < claim.requires.minimum:
            decision, unmet = OUT_OF_REACH, smallest
    return Verdict(claim, decision, mean, interval, len(means), len(pairs), unmet)


def _smallest_mean(grid: Grid, requirement: Requirement, pairs: set[tuple[str, str]]) -> float:
    """Return the smallest mean of the required quantity among the cells that must meet it."""
    names = {name for pair in pairs for name in (pair if requirement.cells == "both" else pair[1:])}
    cells = [cell for cell in grid.cells if cell.name in names]
    return min(fmean(cell.values(requirement.quantity)) for cell in cells)


def confidence_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the interval of the mean of two or more values by Student's t-distribution."""
    return mean_test(values)[1]


def mean_test(values: Sequence[float]) -> tuple[float, tuple[float, float], float]:
    """Return the mean of two or more values, its interval by Student's t-distribution, and p of the mean 0."""
    require_extra("report", "scipy")
    from scipy.stats import t  # type: ignore[import-untyped]

    mean, error = fmean(values), stdev(values) / len(values) ** 0.5
    half = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * error
    p = 2 * float(t.sf(abs(mean) / error, len(values) - 1)) if error else float(mean == 0)
    return mean, (mean - half, mean + half), p


def holm(probabilities: Sequence[float]) -> list[float]:
    """Return the probabilities of several tests, corrected by Holm's method, in the order given."""
    order = sorted(range(len(probabilities)), key=lambda index: probabilities[index])
    corrected = [0.0] * len(probabilities)
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * probabilities[index]))
        corrected[index] = largest
    return corrected
