"""What the runs at hand say about the paper's claims: confirmed, refuted or not decided, never by wish."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, stdev

from spherenet.report.grids import QUANTITIES, ClaimOfGrid, Grid

__all__ = ["LEVEL", "Verdict", "judge"]

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
