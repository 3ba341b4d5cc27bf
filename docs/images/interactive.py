"""Write `docs/assets/curves/data.js`: the curves of three figures, which curves.js of that folder makes interactive.

python docs/images/interactive.py [FILE]

Means and bands are those of the figures. Without JavaScript the figures stay as they are.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import deep  # modules beside this one
import small_batches
from curves import DASHED, Line, deviation, points_of

from spherenet_paper.report.figure import figure_cells, main_grid
from spherenet_paper.report.grids import Grid, stored_grid, stored_grids
from spherenet_paper.report.tables import row_name
from spherenet_paper.style import COLORS, method_of

OUTPUT = Path(__file__).parents[1] / "assets" / "curves" / "data.js"
START = """\
"use strict";
/* Written by docs/images/interactive.py: [iteration, mean, lower, upper end of the band], test accuracy in percent. */
"""
Panel = dict[str, Any]


def extent(values: Any) -> tuple[float, float]:
    """Return the smallest and the largest value."""
    return min(values), max(values)


def panel(grid: Grid, title: str, cells: dict[str, Line], band: Any = deviation) -> Panel:
    """Return one panel of a figure: its title and a curve per cell."""
    curves = [
        {
            "name": line.label,
            "color": COLORS[line.method],
            "dashed": line.dashes == DASHED,
            "points": [
                [step, *(round(value, 2) for value in values)] for step, values in points_of(grid, cell, band).items()
            ],
        }
        for cell, line in cells.items()
    ]
    seeds = {len(found.runs) for name in cells if (found := grid.cell(name)) is not None}
    return {"title": title, "seeds": "–".join(map(str, sorted(seeds))), "curves": curves}


def limits(panels: list[Panel]) -> tuple[int, int]:
    """Return the range of the axis for all panels, without the first tenth of a run, in which accuracies rise."""
    points = [point for each in panels for curve in each["curves"] for point in curve["points"]]
    last = max(point[0] for point in points)
    later = [value for point in points if point[0] >= last / 10 for value in point[2:]]
    return 10 * math.floor(min(later) / 10), 5 * math.ceil(max(later) / 5)


def figures() -> dict[str, Any]:
    """Return the content of the file by the name of the figure."""
    main = main_grid(stored_grids())
    assert main is not None
    names = {cell.name: row_name(main, cell.row) for cell in figure_cells(main)}
    lines = {cell: Line(name, method_of(name), DASHED if name == "CNN" else "solid") for cell, name in names.items()}
    made = {"headline": ([panel(main, "", lines, extent)], "smallest to largest")}
    for name, module in (("small_batches", small_batches), ("deep", deep)):
        panels = [panel(stored_grid("long", experiment), title, cells) for experiment, title, cells in module.PANELS]
        made[name] = (panels, "± one standard deviation")
    return {name: {"band": band, "limits": limits(panels), "panels": panels} for name, (panels, band) in made.items()}


def main(path: Path) -> None:
    """Write the file, a figure per line."""
    rows = [f"{json.dumps(name)}: {json.dumps(figure, ensure_ascii=False)}" for name, figure in figures().items()]
    path.write_text(START + "window.spherenetCurves = {\n" + ",\n".join(rows) + "\n};\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT)
