"""The table of runs, as rows of text: for a terminal, a page, Markdown.

An experiment as a table: the paper's value, ours with its spread, the difference; rich, Markdown and CSV.

The confusion matrix as a picture.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from spherenet.files import replacing
from spherenet.report.grids import Grid, GridCell, Verdict, judge
from spherenet.report.runs import Curve, ReportedRun, distinct_names, how_made
from spherenet.text import as_number, csv_cell, markdown, plain

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "COLUMNS",
    "NUMBERS",
    "SETTINGS",
    "as_csv",
    "as_markdown",
    "cell_text",
    "draw_confusion",
    "markdown_page",
    "paper_table",
    "shape_of",
    "sparkline",
    "table_rows",
]

SETTINGS = ("network", "operator", "loss", "parameters", "iterations")
COLUMNS = ("run", *SETTINGS, "accuracy", "best", "seconds", "curve")
NUMBERS = ("parameters", "iterations", "accuracy", "best", "seconds")


def sparkline(curve: Curve) -> str:
    """A curve as a word of bars, the lowest value the shortest."""
    if not curve.values:
        return ""
    low, high = min(curve.values), max(curve.values)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (value - low) / ((high - low) or 1))] for value in curve.values)


def table_rows(runs: Sequence[ReportedRun]) -> list[tuple[str, ...]]:
    """A row a run in the order of `COLUMNS`; accuracies in per cent, the curve is the test accuracy's."""
    return [_row(name, run) for name, run in zip(distinct_names(runs), runs, strict=True)]


def _row(name: str, run: ReportedRun) -> tuple[str, ...]:
    curve = run.curve("test", "accuracy")
    parameters = run.summary.get("parameters") if run.summary else None
    operator = run.setting("operator")
    return (
        name,
        str(run.setting("model")),
        "none" if operator is None else str(operator),
        str(run.setting("loss")),
        f"{parameters:,}" if isinstance(parameters, int) else "–",
        f"{curve.steps[-1]}" + ("" if run.summary else " so far"),
        f"{curve.values[-1]:.2%}",
        f"{max(curve.values):.2%}",
        f"{as_number(run.rows[-1].get('seconds')) or 0:.0f}",
        sparkline(curve),
    )


def shape_of(grid: Grid) -> tuple[list[str], list[str], dict[tuple[str, str], GridCell]]:
    """Rows, columns, and the cells at their crossings."""
    rows = list(dict.fromkeys(cell.row for cell in grid.cells))
    columns = list(dict.fromkeys(cell.column for cell in grid.cells))
    return rows, columns, {(cell.row, cell.column): cell for cell in grid.cells}


def best_of(column: Sequence[GridCell]) -> GridCell | None:
    """The cell with the highest mean in a column, None where fewer than two have runs."""
    measured = [cell for cell in column if cell.runs]
    return max(measured, key=lambda cell: (cell.mean_and_std() or (0.0,))[0]) if len(measured) > 1 else None


def cell_text(cell: GridCell) -> tuple[str, str]:
    """Ours and the paper's: "63.21 ± 0.40 (3)" and "91.08"; a dash where there is nothing."""
    found = cell.mean_and_std()
    paper = "–" if cell.paper is None else f"{cell.paper:.2f}"
    if found is None:
        return "–", paper
    mean, deviation = found
    return f"{mean:.2f}" + ("" if deviation is None else f" ± {deviation:.2f}") + f" ({len(cell.runs)})", paper


def paper_table(grid: Grid) -> Table:
    """The table for a terminal: ours, and the paper's in brackets below it."""
    from rich.markup import escape
    from rich.table import Table

    rows, columns, cells = shape_of(grid)
    made = Table(
        title=escape(plain(f"{grid.title} (preset {grid.preset})")),
        caption="test accuracy %, mean ± std (runs); \\[paper's value]; the best of a column is bold",
        show_lines=True,
    )
    made.add_column("")
    for column in columns:
        made.add_column(escape(plain(column)), justify="right")
    best = [best_of([cells[row, column] for row in rows if (row, column) in cells]) for column in columns]
    for row in rows:
        shown = []
        for column, winner in zip(columns, best, strict=True):
            cell = cells.get((row, column))
            ours, paper = cell_text(cell) if cell is not None else ("", "")
            ours = f"[bold]{ours}[/bold]" if cell is not None and cell is winner else ours
            shown.append(ours if paper in ("", "–") else f"{ours}\n\\[{paper}]")
        made.add_row(escape(plain(row)), *shown)
    return made


def as_markdown(grid: Grid) -> str:
    """The table and the claims as Markdown."""
    rows, columns, cells = shape_of(grid)
    best = [best_of([cells[row, column] for row in rows if (row, column) in cells]) for column in columns]
    lines = [f"| | {' | '.join(map(markdown, columns))} |", "|---" * (len(columns) + 1) + "|"]
    for row in rows:
        shown = []
        for column, winner in zip(columns, best, strict=True):
            cell = cells.get((row, column))
            ours, paper = cell_text(cell) if cell is not None else ("", "–")
            ours = f"**{ours}**" if cell is not None and cell is winner else ours
            shown.append(ours if paper == "–" else f"{ours} [{paper}]")
        lines.append(f"| {markdown(row)} | {' | '.join(shown)} |")
    lines += ["", *(_claim_line(judge(grid, claim)) for claim in grid.claims)]
    return "\n".join(lines) + "\n"


PRESETS = {
    "paper": "The paper's settings.",
    "cpu": "Shrunk for two cores: pictures of 16 × 16 and batches of half the size, a quarter of the paper's widths "
    "(not in fig-width) and 300 to 2,000 of its 64,000 iterations, so accuracies lie far below the paper's. What can "
    "be compared is the difference between cells.",
    "smoke": "A few steps of tiny networks: these numbers mean nothing but that everything runs.",
}


def markdown_page(grids: Sequence[Grid], title: str) -> str:
    """The tables and claims of experiments of one preset as a page, with what they are to be taken for."""
    presets = dict.fromkeys(grid.preset for grid in grids)
    parts = [
        f"# {markdown(title)}",
        "Test accuracy in %: mean ± standard deviation (number of seeds), [the paper's value]; the best of a column is "
        "bold. A claim is confirmed or refuted where a two-sided t-test over seeds gives p < 0.05, else not decided.",
        *(PRESETS.get(preset, f"Preset {markdown(preset)}.") for preset in presets),
    ]
    if len(grids) > 1:
        parts.append(_overview(grids))
    for grid in grids:
        parts += [f"## {markdown(grid.id)}: {markdown(grid.title)}", as_markdown(grid).rstrip()]
        runs = [run for cell in grid.cells for run in cell.runs.values()]
        if runs:
            seconds = [as_number((run.summary or {}).get("seconds")) or 0.0 for run in runs]
            made = markdown(how_made(runs[0]))
            parts.append(f"{len(runs)} runs, {min(seconds):.0f} to {max(seconds):.0f} s each; {made}.")
        if grid.complaints:
            parts.append(f"Left out: {len(grid.complaints)} unfinished or unreadable runs.")
    return "\n\n".join(parts) + "\n"


def _overview(grids: Sequence[Grid]) -> str:
    """Every claim in a line, before the tables that decide them."""
    lines = ["| | the paper's claims | |", "|---|---|---|"]
    for grid in grids:
        for verdict in (judge(grid, claim) for claim in grid.claims):
            lines.append(f"| **{verdict.verdict}** | {markdown(verdict.claim.text)} | {markdown(grid.id)} |")
    return "\n".join(lines)


def _claim_line(verdict: Verdict) -> str:
    claim = f"{markdown(verdict.claim.text)} ({markdown(verdict.claim.source)})"
    return f"- **{verdict.verdict}**: {claim}. {verdict.words}."


def as_csv(grid: Grid) -> str:
    """A line a cell: names, the paper's value, ours, its deviation, runs, difference."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["experiment", "preset", "cell", "row", "column", "paper", "mean", "std", "runs", "difference"])
    for cell in grid.cells:
        mean, deviation = cell.mean_and_std() or (None, None)
        difference = None if mean is None or cell.paper is None else round(mean - cell.paper, 4)
        numbers = [None if value is None else round(value, 4) for value in (cell.paper, mean, deviation)]
        names = map(csv_cell, (grid.id, grid.preset, cell.name, cell.row, cell.column))
        writer.writerow([*names, *numbers, len(cell.runs), difference])
    return text.getvalue()


ALLOWED = (".png", ".svg", ".pdf")


def draw_confusion(confusion: Sequence[Sequence[int]], classes: Sequence[str], path: str) -> None:
    """Draw counts of (truth, answer) pairs as a map of shares of each truth, with the counts where there is room.

    Raises ValueError for a file of another kind than .png, .svg and .pdf, or without matplotlib.
    """
    if not path.lower().endswith(ALLOWED):
        raise ValueError(f"--picture must end in one of {', '.join(ALLOWED)}, got {path!r}.")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--picture needs the package matplotlib: pip install 'spherenet[plot]'.") from None
    side = max(4.0, min(14.0, 0.5 * len(classes) + 2))
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    # A dollar sign would begin a formula.
    names = [plain(name).replace("$", r"\$") for name in classes]
    shares = [[count / max(1, sum(row)) for count in row] for row in confusion]
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, ax=axes, label="share of the class", shrink=0.8)
    axes.set_xlabel("answer")
    axes.set_ylabel("truth")
    if len(classes) <= 40:
        axes.set_xticks(range(len(classes)), names, rotation=90 if len(classes) > 10 else 45, ha="right")
        axes.set_yticks(range(len(classes)), names)
    if len(classes) <= 20:
        for i, row in enumerate(confusion):
            for j, count in enumerate(row):
                if count:
                    colour = "white" if shares[i][j] > 0.5 else "black"
                    axes.text(j, i, str(count), ha="center", va="center", color=colour, fontsize=8)
    with replacing(Path(path)) as temporary:
        figure.savefig(temporary, dpi=150)
