"""The figure of a grid with a baseline: test accuracy over iterations as an SVG file for light and dark pages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from html import escape
from statistics import fmean

from spherenet.cli.plugin import plain
from spherenet.errors import InvalidArgument
from spherenet_paper.report.grids import Grid, GridCell, presets_of
from spherenet_paper.report.tables import GridLayout, cell_text, row_name
from spherenet_paper.style import COLORS, Color, method_of

__all__ = ["draw_curves", "figure_cells", "main_grid"]

WIDTH, HEIGHT = 600, 420
LEFT, RIGHT, TOP, BOTTOM = 52, 566, 38, 362
"""Borders of the axes. The font is large, because a phone shows the figure at little more than half of its size."""

STYLE = """\
svg { color-scheme: light dark; --text: #1c2024; --faint: #60646c; --line: #e4e5e9; %s }
@media (prefers-color-scheme: dark) { svg { --text: #edeef0; --faint: #b0b4ba; --line: #3a3f4a; %s } }
text { font: 16px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--text); }
.faint { fill: var(--faint); }
.grid { stroke: var(--line); stroke-width: 1; }
.curve { fill: none; stroke-width: 2.5; stroke-linejoin: round; }
.band { opacity: 0.18; }"""


def main_grid(grids: Sequence[Grid]) -> Grid | None:
    """Return the grid that a page starts with: the first of the largest preset with a baseline and runs, or None."""
    own = [grid for grid in grids if grid.preset == presets_of(grids)[0] and grid.baseline is not None]
    return next((grid for grid in own if figure_cells(grid)), None)


def figure_cells(grid: Grid) -> list[GridCell]:
    """Return the cells of the figure, the baseline first: those with runs in the first column that has any."""
    layout = GridLayout(grid)
    rows = sorted(layout.rows, key=lambda row: row != grid.baseline)
    for column in layout.columns:
        cells = [layout.cell(row, column) for row in rows]
        measured = [cell for cell in cells if cell is not None and cell.points()]
        if measured:
            return measured
    return []


def draw_curves(grid: Grid) -> str:
    """Return an SVG with the mean test accuracy over iterations, and the range over seeds as a band.

    The final accuracies are in the legend. Colors follow the color scheme of the page.

    Raises:
        ValueError: The grid has no runs.
    """
    cells = figure_cells(grid)
    if not cells:
        raise InvalidArgument("the grid", f"must have runs to draw, got none of {grid.id}.")
    points = {cell.name: cell.points() for cell in cells}
    last = max(max(steps) for steps in points.values())
    axes = _Axes(last, _limits(points.values(), last))
    colors = _colors([row_name(grid, cell.row) for cell in cells])
    light, dark = (" ".join(f"--c{index}: {pair[side]};" for index, pair in enumerate(colors)) for side in (0, 1))
    title = f"Test accuracy over iterations, {cells[0].column}: {', '.join(row_name(grid, c.row) for c in cells)}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'role="img">',
        f"<title>{escape(plain(title))}</title>",
        f"<style>{STYLE % (light, dark)}</style>",
        f'<clipPath id="axes"><rect x="{LEFT}" y="{TOP}" width="{RIGHT - LEFT}" height="{BOTTOM - TOP}"/></clipPath>',
        f'<text class="faint" x="14" y="22">test accuracy %, {escape(plain(cells[0].column))}</text>',
        *axes.ticks(),
        '<g clip-path="url(#axes)">',
    ]
    for index, cell in enumerate(cells):
        lines.append(f'<path class="band" d="{axes.band(points[cell.name])}" fill="var(--c{index})"/>')
    for index, cell in enumerate(cells):
        dashes = ' stroke-dasharray="7 5"' if cell.row == grid.baseline else ""
        path = axes.curve(points[cell.name])
        lines.append(f'<path class="curve" d="{path}" stroke="var(--c{index})"{dashes}/>')
    lines += ["</g>", *_legend(grid, cells), "</svg>"]
    return "\n".join(lines) + "\n"


def _colors(names: Sequence[str]) -> list[Color]:
    """Return the color of the method of each name; names whose color is used already share the remaining ones."""
    methods = [method_of(name) for name in names]
    spare = itertools.cycle([method for method in COLORS if method not in methods] or COLORS)
    return [COLORS[method if method not in methods[:index] else next(spare)] for index, method in enumerate(methods)]


def _limits(curves: Iterable[dict[int, list[float]]], last: int) -> tuple[int, int]:
    """Return the range of accuracies in percent, without the first tenth of the run, in which they rise from chance."""
    values = [100 * value for points in curves for step, accuracies in points.items()
              if step >= last / 10 for value in accuracies]  # fmt: skip
    low, high = 10 * math.floor(min(values) / 10), 5 * math.ceil(max(values) / 5)
    return low, max(high, low + 5)


class _Axes:
    """Positions of iterations and accuracies in the figure."""

    def __init__(self, last: int, limits: tuple[int, int]) -> None:
        self.last = last
        self.low, self.high = limits

    def x(self, step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / self.last

    def y(self, percent: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (percent - self.low) / (self.high - self.low)

    def point(self, step: int, value: float) -> str:
        return f"{self.x(step):.1f} {self.y(100 * value):.1f}"

    def curve(self, points: dict[int, list[float]]) -> str:
        """Return the path of the mean."""
        return "M" + "L".join(self.point(step, fmean(values)) for step, values in points.items())

    def band(self, points: dict[int, list[float]]) -> str:
        """Return the path around the range over seeds."""
        upper = [self.point(step, max(values)) for step, values in points.items()]
        lower = [self.point(step, min(values)) for step, values in points.items()]
        return "M" + "L".join([*upper, *reversed(lower)]) + "Z"

    def ticks(self) -> list[str]:
        """Return grid lines and numbers of both axes."""
        lines = []
        spacing = 5 if self.high - self.low <= 30 else 10
        for percent in range(self.low, self.high + 1, spacing):
            y = self.y(percent)
            lines.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{RIGHT}"/>')
            lines.append(f'<text class="faint" x="{LEFT - 10}" y="{y + 5:.1f}" text-anchor="end">{percent}</text>')
        spacing = next(n for n in (10**i * j for i in range(12) for j in (1, 2, 5)) if self.last / n <= 6)
        for step in range(0, self.last + 1, spacing):
            text = f'<text class="faint" x="{self.x(step):.1f}" y="{BOTTOM + 22}" text-anchor="middle">{step:,}</text>'
            lines.append(text)
        middle = (LEFT + RIGHT) / 2
        return [*lines, f'<text class="faint" x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">iterations</text>']


def _legend(grid: Grid, cells: Sequence[GridCell]) -> list[str]:
    """Return names and final accuracies in the lower right corner, which rising curves leave free."""
    names = [f"{row_name(grid, cell.row)}  {cell_text(cell)[0]}" for cell in cells]
    width = min(RIGHT - LEFT, 50 + 8.6 * max(map(len, names)))
    left, top = RIGHT - width, BOTTOM - 12 - 24 * len(cells)
    lines = []
    for index, (cell, name) in enumerate(zip(cells, names, strict=True)):
        y = top + 24 * index + 18
        dashes = ' stroke-dasharray="7 5"' if cell.row == grid.baseline else ""
        lines.append(f'<path class="curve" d="M{left + 8:.0f} {y - 5}h28" stroke="var(--c{index})"{dashes}/>')
        lines.append(f'<text x="{left + 44:.0f}" y="{y}" xml:space="preserve">{escape(plain(name))}</text>')
    return lines
