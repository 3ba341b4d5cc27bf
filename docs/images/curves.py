"""Curves of test accuracy over iterations, which several figures draw."""

from statistics import fmean, stdev
from typing import Any, NamedTuple

from matplotlib.axes import Axes

from spherenet_paper.report.grids import Grid
from spherenet_paper.style import color_of

__all__ = ["DASHED", "Line", "draw_curves"]

DASHED = (0, (4, 1.5))


class Line(NamedTuple):
    """A cell of a grid: its name in the legend, its method, which decides on the color, and its dashes."""

    label: str
    method: str
    dashes: Any = "solid"


def draw_curves(axes: Axes, grid: Grid, cells: dict[str, Line], title: str) -> None:
    """Draw mean test accuracy over iterations with a band of ± one standard deviation over seeds."""
    for name, line in cells.items():
        cell = grid.cell(name)
        assert cell is not None, name
        steps = cell.mean_curve().steps
        seeds = [run.curve("test", "accuracy").values for run in cell.runs.values()]
        points = [[100 * value for value in values] for values in zip(*seeds, strict=True)]
        color, mean = color_of(line.method), [fmean(values) for values in points]
        axes.plot(steps, mean, label=line.label, color=color, linestyle=line.dashes)
        low, high = ([m + sign * stdev(v) for m, v in zip(mean, points, strict=True)] for sign in (-1, 1))
        axes.fill_between(steps, low, high, color=color, alpha=0.18, linewidth=0)
    axes.set_title(title)
    axes.set_xlabel("iterations")
