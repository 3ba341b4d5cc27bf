"""Tables of experiments for terminals, and their cells as text for other formats."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spherenet.cli.plugin import plain
from spherenet_paper.report.grids import Grid, GridCell

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["GridLayout", "cell_text", "paper_tables", "row_name"]


class GridLayout:
    """Rows and columns of an experiment's table.

    Attributes:
        rows: Names of the rows.
        columns: Names of the columns.
        best: Cell with the highest mean of each column, or None if fewer than two of its cells have runs.
    """

    def __init__(self, grid: Grid) -> None:
        self.rows = list(dict.fromkeys(cell.row for cell in grid.cells))
        self.columns = list(dict.fromkeys(cell.column for cell in grid.cells))
        self._cells = {(cell.row, cell.column): cell for cell in grid.cells}
        self.best = {column: self._best_cell(column) for column in self.columns}

    def _best_cell(self, column: str) -> GridCell | None:
        means = [
            (statistics[0], cell)
            for cell in (self.cell(row, column) for row in self.rows)
            if cell is not None and (statistics := cell.mean_and_std()) is not None
        ]
        return max(means, key=lambda entry: entry[0])[1] if len(means) > 1 else None

    def cell(self, row: str, column: str) -> GridCell | None:
        """Return the cell at this position."""
        return self._cells.get((row, column))


ROW_NAMES = {
    "batchnorm": "CNN, BatchNorm",
    "groupnorm": "CNN, GroupNorm",
    "spherenorm": "SphereNorm",
    "centered_weight": "SphereNorm, centered kernels",
    "centered_patch": "SphereNorm, centered patches",
}
"""Names of the normalizations of fig-spherenorm for readers."""


def row_name(grid: Grid, row: str) -> str:
    """Return the name of a row in figures and tables: CNN for the baseline "none", which has no operator."""
    return "CNN" if row == grid.baseline == "none" else ROW_NAMES.get(row, row)


def cell_text(cell: GridCell | None) -> tuple[str, str]:
    """Return our value and the paper's, e.g. "63.21 ± 0.40 (3)" and "91.08"; "–" for a missing value."""
    if cell is None:
        return "", "–"
    paper = "–" if cell.paper is None else f"{cell.paper:.2f}"
    statistics = cell.mean_and_std()
    if statistics is None:
        return "–", paper
    mean, deviation = statistics
    return f"{mean:.2f}" + ("" if deviation is None else f" ± {deviation:.2f}") + f" ({len(cell.runs)})", paper


def paper_tables(grid: Grid, width: int = 80) -> list[Table]:
    """Return tables for a terminal with the paper's values in brackets below ours.

    Args:
        grid: An experiment.
        width: Width of the terminal. Columns that do not fit are in a second table, and so on.
    """
    from rich.markup import escape
    from rich.table import Table

    layout = GridLayout(grid)
    data = dict.fromkeys(str(run.setting("data")) for cell in grid.cells for run in cell.runs.values())
    used = f", data {', '.join(data)}" if data else ""
    tables = []
    for columns in _fitting_columns(layout, width):
        table = Table(
            title=escape(plain(f"{grid.title} (preset {grid.preset}{used})")),
            caption="test accuracy %, mean ± std (runs); \\[paper's value]; the best of a column is bold",
            show_lines=True,
        )
        table.add_column("", no_wrap=True)
        for column, fixed in columns.items():
            table.add_column(escape(plain(column)), justify="right", width=fixed)
        for row in layout.rows:
            texts = []
            for column in columns:
                cell = layout.cell(row, column)
                ours, paper = cell_text(cell)
                ours = f"[bold]{ours}[/bold]" if cell is not None and cell is layout.best[column] else ours
                texts.append(ours if paper == "–" else f"{ours}\n\\[{paper}]")
            table.add_row(escape(plain(row)), *texts)
        tables.append(table)
    return tables


def _fitting_columns(layout: GridLayout, width: int) -> list[dict[str, int | None]]:
    """Divide the columns into as few groups as fit a width, without line breaks in numbers.

    The value of a column is the width to which its heading is wrapped, or None if the headings of its group fit.
    """
    border = 3  # a line and a space on each side
    first = 1 + border + max((len(plain(row)) for row in layout.rows), default=0)
    groups: list[dict[str, int | None]] = []
    used = width
    for column in layout.columns:
        texts = [*plain(column).split(), *(cell_text(layout.cell(row, column))[0] for row in layout.rows)]
        least = max(map(len, texts), default=0)
        if not groups or used + border + least > width:
            groups.append({})
            used = first
        groups[-1][column] = least
        used += border + least
    for group in groups:
        widest = [max(len(plain(column)), least or 0) for column, least in group.items()]
        if first + sum(border + natural for natural in widest) <= width:
            group.update(dict.fromkeys(group))
    return groups
