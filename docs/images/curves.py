"""Curves of test accuracy over iterations, which several figures draw."""

from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from matplotlib.axes import Axes

from spherenet_paper.report.grids import Grid
from spherenet_paper.style import color_of

__all__ = ["DASHED", "Line", "deviation", "draw_curves", "points_of"]

DASHED = (0, (4, 1.5))


class Line(NamedTuple):
    """A cell of a grid: its name in the legend, its method, which decides on the color, and its dashes."""

    label: str
    method: str
    dashes: Any = "solid"


def deviation(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of the values minus and plus one standard deviation."""
    return fmean(values) - stdev(values), fmean(values) + stdev(values)


Band = Callable[[Sequence[float]], tuple[float, float]]


def points_of(grid: Grid, cell: str, band: Band = deviation) -> dict[int, tuple[float, float, float]]:
    """Return mean, lower and upper end of the band of the test accuracy in percent over seeds, by iteration."""
    found = grid.cell(cell)
    assert found is not None, cell
    percent = {step: [100 * value for value in values] for step, values in found.points().items()}
    return {step: (fmean(values), *band(values)) for step, values in percent.items()}


def draw_curves(axes: Axes, grid: Grid, cells: dict[str, Line], title: str) -> None:
    """Draw mean test accuracy over iterations with a band of ± one standard deviation over seeds."""
    for name, line in cells.items():
        points, color = points_of(grid, name), color_of(line.method)
        mean, low, high = zip(*points.values(), strict=True)
        axes.plot([*points], mean, label=line.label, color=color, linestyle=line.dashes)
        axes.fill_between([*points], low, high, color=color, alpha=0.18, linewidth=0)
    axes.set_title(title)
    axes.set_xlabel("iterations")
