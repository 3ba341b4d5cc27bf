"""Verdicts as a table: verdicts.csv has a row per claim and preset, which pages are rendered from."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from spherenet_paper.report.claims import Verdict, judge
from spherenet_paper.report.grids import Grid
from spherenet_paper.report.quantities import QUANTITIES

__all__ = ["VerdictRow", "read_verdicts", "verdict_rows", "write_verdicts"]


@dataclass(frozen=True)
class VerdictRow:
    """A row of verdicts.csv; all values are text. The id is EXPERIMENT.CLAIM; an empty verdict waits for runs."""

    id: str
    preset: str
    verdict: str
    claim: str
    source: str
    difference: str
    lower: str
    upper: str
    unit: str
    pairs: str
    seeds: str
    requires: str
    reached: str

    @property
    def experiment(self) -> str:
        """Name of the experiment."""
        return self.id.partition(".")[0]

    @property
    def statement(self) -> str:
        """The claim and its source."""
        return f"{self.claim} ({self.source})"

    @property
    def effect(self) -> str:
        """The difference with its interval, e.g. "+1.41 [−0.13, +2.95] points"."""
        interval = f" [{self.lower}, {self.upper}]" if self.lower else ""
        return f"{self.difference}{interval}".replace("-", "−") + f" {self.unit}"

    @property
    def shown(self) -> str:
        """The effect with the number of seeds; for claims out of reach also the reason."""
        effect = f"{self.effect}, n = {self.seeds}"
        if not self.reached:
            return effect
        return f"{self.verdict}, {effect}; requires {self.requires}, reached {self.reached} %"


def verdict_rows(grids: Iterable[Grid]) -> list[VerdictRow]:
    """Return a row for each claim on the grids that have runs."""
    return [_row(grid, judge(grid, claim)) for grid in grids if grid.has_runs for claim in grid.claims]


def _row(grid: Grid, verdict: Verdict) -> VerdictRow:
    claim, difference = verdict.claim, verdict.difference
    _, unit, digits = QUANTITIES[claim.quantity]
    waits = difference is None
    shown, lower, upper = ("" if number is None else f"{number:+.{digits}f}"
                           for number in (difference, *(verdict.interval or (None, None))))  # fmt: skip
    return VerdictRow(
        id=f"{grid.id}.{claim.id}",
        preset=grid.preset,
        verdict="" if waits else verdict.verdict,
        claim=claim.full_text,
        source=claim.source,
        difference=shown,
        lower=lower,
        upper=upper,
        unit=unit,
        pairs="" if waits else str(verdict.pairs),
        seeds="" if waits else str(verdict.seeds),
        requires="" if claim.requires is None else str(claim.requires),
        reached="" if verdict.unmet is None else f"{verdict.unmet:.1f}",
    )


def write_verdicts(rows: Sequence[VerdictRow], path: Path) -> None:
    """Write the table."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(field.name for field in fields(VerdictRow))
        writer.writerows(astuple(row) for row in rows)


def read_verdicts(path: Path) -> list[VerdictRow]:
    """Return the rows of the table."""
    with path.open(encoding="utf-8", newline="") as file:
        return [VerdictRow(**row) for row in csv.DictReader(file)]
