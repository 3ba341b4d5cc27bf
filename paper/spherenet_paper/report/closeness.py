"""How close the accuracies of an experiment are to those of the paper, as numbers and as a sentence."""

from __future__ import annotations

from itertools import combinations
from statistics import fmean
from typing import NamedTuple

from spherenet_paper.report.grids import Grid, GridCell

__all__ = ["Distance", "closeness", "distance"]


class Distance(NamedTuple):
    """How far the means of an experiment are from the paper's values.

    Attributes:
        differences: {cell: our mean minus the paper's value, in points}.
        pairs: Number of pairs of cells in the same column.
        same: Number of these pairs that have the paper's order.
    """

    differences: dict[str, float]
    pairs: int
    same: int

    @property
    def mean(self) -> float:
        """The mean difference."""
        return fmean(self.differences.values())


def distance(grid: Grid) -> Distance | None:
    """Return the distance of an experiment to the paper, or None if the paper has no number for a finished cell.

    Orders can agree even if a smaller preset is far below the paper.
    """
    cells = [cell for cell in grid.cells if cell.runs and cell.paper is not None]
    pairs = [(first, second) for first, second in combinations(cells, 2) if first.column == second.column]
    same = sum(_has_order_of_paper(first, second) for first, second in pairs)
    return Distance({cell.name: _difference(cell) for cell in cells}, len(pairs), same) if cells else None


def closeness(grid: Grid) -> str:
    """Return the distance of an experiment to the paper as a sentence."""
    if grid.preset == "smoke":
        return "How close to the paper: a smoke test of a few steps, which cannot be compared."
    measured = distance(grid)
    if measured is None:
        return "How close to the paper: it has no numbers for the finished cells."
    differences = measured.differences
    farthest = max(differences, key=lambda name: abs(differences[name]))
    one = len(differences) == 1
    count = "1 cell with a published number" if one else f"{len(differences)} cells with published numbers"
    far = "" if one else f" (farthest: {differences[farthest]:+.1f}, {farthest})"
    order = (
        f"; {measured.same} of {measured.pairs} pairs in a column are in the paper's order" if measured.pairs else ""
    )
    return f"How close to the paper: {measured.mean:+.1f} points over {count}{far}{order}."


def _difference(cell: GridCell) -> float:
    """Return our mean minus the paper's value, in percent points."""
    assert cell.paper is not None
    return fmean(cell.values()) - cell.paper


def _has_order_of_paper(first: GridCell, second: GridCell) -> bool:
    assert first.paper is not None
    assert second.paper is not None
    ours, paper = fmean(first.values()) - fmean(second.values()), first.paper - second.paper
    return ours * paper > 0 or (paper == 0 and ours == 0)
