"""One sentence about an experiment: how close its accuracies are to those of the paper."""

from __future__ import annotations

from itertools import combinations
from statistics import fmean

from spherenet_paper.report.grids import Grid, GridCell

__all__ = ["closeness"]


def closeness(grid: Grid) -> str:
    """Return how far the means of an experiment are from the paper's values, and how many pairs have its order.

    Pairs are those of the cells in one column. Their order can agree even if a smaller preset is far below the paper.
    """
    if grid.preset == "smoke":
        return "How close to the paper: a smoke test of a few steps, which cannot be compared."
    cells = [cell for cell in grid.cells if cell.runs and cell.paper is not None]
    if not cells:
        return "How close to the paper: it has no numbers for the finished cells."
    differences = {cell.name: _difference(cell) for cell in cells}
    mean, farthest = fmean(differences.values()), max(differences, key=lambda name: abs(differences[name]))
    one = len(cells) == 1
    count = "1 cell with a published number" if one else f"{len(cells)} cells with published numbers"
    far = "" if one else f" (farthest: {differences[farthest]:+.1f}, {farthest})"
    pairs = [(first, second) for first, second in combinations(cells, 2) if first.column == second.column]
    same = sum(_has_order_of_paper(first, second) for first, second in pairs)
    order = f"; {same} of {len(pairs)} pairs in a column are in the paper's order" if pairs else ""
    return f"How close to the paper: {mean:+.1f} points over {count}{far}{order}."


def _difference(cell: GridCell) -> float:
    """Return our mean minus the paper's value, in percent points."""
    assert cell.paper is not None
    return fmean(cell.values()) - cell.paper


def _has_order_of_paper(first: GridCell, second: GridCell) -> bool:
    assert first.paper is not None
    assert second.paper is not None
    ours, paper = fmean(first.values()) - fmean(second.values()), first.paper - second.paper
    return ours * paper > 0 or (paper == 0 and ours == 0)
