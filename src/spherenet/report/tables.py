"""Tables of runs and experiments for terminals, Markdown and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from spherenet.report.claims import CONFIRMED, NOT_DECIDED, OUT_OF_REACH, REFUTED, Verdict, judge
from spherenet.report.grids import Grid, GridCell
from spherenet.report.runs import Curve, ReportedRun, distinct_names, provenance
from spherenet.text import as_number, csv_cell, markdown, plain

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "COLUMNS",
    "NUMBERS",
    "PROTOCOLS",
    "SETTINGS",
    "GridLayout",
    "as_csv",
    "as_markdown",
    "cell_text",
    "markdown_page",
    "paper_tables",
    "protocol_rows",
    "runs_as_csv",
    "runs_as_markdown",
    "sparkline",
    "table_rows",
]

SETTINGS = ("network", "operator", "loss", "parameters", "iterations")
COLUMNS = ("run", *SETTINGS, "accuracy", "best", "seconds", "curve")
NUMBERS = ("parameters", "iterations", "accuracy", "best", "seconds")


def sparkline(curve: Curve) -> str:
    """Return a curve as a string of block characters."""
    if not curve.values:
        return ""
    low, high = min(curve.values), max(curve.values)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (value - low) / ((high - low) or 1))] for value in curve.values)


def table_rows(runs: Sequence[ReportedRun]) -> list[tuple[str, ...]]:
    """Return one row per run in the order of `COLUMNS`; accuracies in percent, "curve" is the test accuracy."""
    return [_run_row(name, run) for name, run in zip(distinct_names(runs), runs, strict=True)]


def _run_row(name: str, run: ReportedRun) -> tuple[str, ...]:
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


def protocol_rows(runs: Sequence[ReportedRun]) -> list[list[str]]:
    """Return the final test accuracy per BatchNorm protocol of runs with several, after a row of column names.

    The list is empty if there is no such run.
    """
    several = [(name, run) for name, run in zip(distinct_names(runs), runs, strict=True) if len(run.protocols()) > 1]
    protocols = list(dict.fromkeys(protocol for _, run in several for protocol in run.protocols()))
    rows = [["run", *protocols]] if several else []
    for name, run in several:
        own = [run.curve("test", "accuracy", protocol).values if protocol in run.protocols() else []
               for protocol in protocols]  # fmt: skip
        rows.append([name, *(f"{values[-1]:.2%}" if values else "–" for values in own)])
    return rows


PROTOCOLS = "Final test accuracy by BatchNorm statistics"
"""Title of the table of `protocol_rows`."""


def runs_as_markdown(runs: Sequence[ReportedRun]) -> str:
    """Return the tables of runs as Markdown."""
    tables: list[list[Sequence[str]]] = [[COLUMNS, *table_rows(runs)]]
    if rows := protocol_rows(runs):
        tables.append([*rows])
    texts = []
    for header, *rest in tables:
        lines = [f"| {' | '.join(map(markdown, header))} |", "|---" * len(header) + "|"]
        texts.append("\n".join([*lines, *(f"| {' | '.join(map(markdown, row))} |" for row in rest)]))
    return f"\n\n{PROTOCOLS}:\n\n".join(texts) + "\n"


def runs_as_csv(runs: Sequence[ReportedRun]) -> str:
    """Return one line per run: its name and settings, iterations, final and best test accuracy, seconds."""
    rows: list[list[Any]] = []
    for name, run in zip(distinct_names(runs), runs, strict=True):
        curve = run.curve("test", "accuracy")
        operator = run.setting("operator")
        settings = [run.setting("model"), "none" if operator is None else operator, run.setting("loss")]
        numbers = [round(100 * value, 4) for value in (curve.values[-1], max(curve.values))]
        parameters = as_number((run.summary or {}).get("parameters"))
        counts = [None if parameters is None else int(parameters), curve.steps[-1]]
        rows.append([name, *map(str, settings), *counts, *numbers, as_number(run.rows[-1].get("seconds"))])
    return _csv(COLUMNS[:-1], rows)


def _csv(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([csv_cell(value) for value in row] for row in rows)
    return text.getvalue()


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


def as_markdown(grid: Grid) -> str:
    """Return the table and the claims of an experiment as Markdown."""
    layout = GridLayout(grid)
    lines = [f"| | {' | '.join(map(markdown, layout.columns))} |", "|---" * (len(layout.columns) + 1) + "|"]
    for row in layout.rows:
        texts = []
        for column in layout.columns:
            cell = layout.cell(row, column)
            ours, paper = cell_text(cell)
            ours = f"**{ours}**" if cell is not None and cell is layout.best[column] else ours
            texts.append(ours if paper == "–" else f"{ours} [{paper}]")
        lines.append(f"| {markdown(row)} | {' | '.join(texts)} |")
    lines += ["", *_protocol_lines(grid), *_time_lines(grid)]
    lines += [_claim_line(judge(grid, claim)) for claim in grid.claims]
    return "\n".join(lines) + "\n"


def _protocol_lines(grid: Grid) -> list[str]:
    """Return a table of accuracies by BatchNorm statistics, or nothing if no cell was evaluated with several."""
    cells = [cell for cell in grid.cells if any(len(run.protocols()) > 1 for run in cell.runs.values())]
    protocols = list(dict.fromkeys(name for cell in cells for run in cell.runs.values() for name in run.protocols()))
    if not cells:
        return []
    lines = [
        "Test accuracy in % by BatchNorm statistics, mean over seeds: at the end (mean over all evaluations):",
        "",
        f"| | | {' | '.join(map(markdown, protocols))} |",
        "|---" * (len(protocols) + 2) + "|",
    ]
    for cell in cells:
        texts = []
        for name in protocols:
            with_it = all(name in run.protocols() for run in cell.runs.values())
            numbers = [fmean(cell.values(quantity, name)) for quantity in ("accuracy", "mean")] if with_it else []
            texts.append("{:.1f} ({:.1f})".format(*numbers) if with_it else "–")
        lines.append(f"| {markdown(cell.row)} | {markdown(cell.column)} | {' | '.join(texts)} |")
    return [*lines, ""]


def _time_lines(grid: Grid) -> list[str]:
    """Return a table of the time until the final accuracy of the baseline is reached, or nothing without a baseline."""
    times = grid.times_to_baseline()
    if not times:
        return []
    lines = [
        f"Time to the final accuracy of {markdown(grid.baseline or '')}, as a fraction of its run:",
        "",
        "| | | reached by | iterations | seconds |",
        "|---|---|---|---|---|",
    ]
    for cell, by_seed in times:
        reached = [time for time in by_seed if time is not None]
        seconds = [time.seconds for time in reached if time.seconds is not None]
        numbers = [_range([time.iterations for time in reached]), _range(seconds)]
        count = f"{len(reached)} of {len(by_seed)}"
        lines.append(f"| {markdown(cell.row)} | {markdown(cell.column)} | {count} | {' | '.join(numbers)} |")
    return [*lines, ""]


def _range(values: Sequence[float]) -> str:
    """Return mean, smallest and largest value, or "–" for none."""
    return f"{fmean(values):.2f} ({min(values):.2f} to {max(values):.2f})" if values else "–"


def _claim_line(verdict: Verdict) -> str:
    return f"- **{verdict.verdict}**: {markdown(verdict.claim.statement)}. {verdict.statistics}."


GROUPS = {
    "Claims confirmed": (CONFIRMED,),
    "Claims refuted": (REFUTED,),
    "Claims not decided or out of reach": (NOT_DECIDED, OUT_OF_REACH),
}

PRESETS = {
    "paper": "The paper's settings.",
    "long": "Images of 32 × 32, batches of 128 (except in fig-spherenorm), half or a quarter of the paper's widths, "
    "and 3,000 to 6,000 of its 64,000 iterations, in bfloat16; fig-ultradeep with images of 16 × 16.",
    "cpu": "Reduced for two CPU cores: images of 16 × 16, half the batch size, a quarter of the paper's widths (except "
    "in fig-width) and 300 to 2,000 of its 64,000 iterations. Accuracies are therefore far below the paper's; only "
    "differences between cells can be compared.",
    "smoke": "A few steps of tiny networks: the numbers only show that everything runs.",
}


def markdown_page(grids: Sequence[Grid], title: str, runs: Sequence[ReportedRun] = ()) -> str:
    """Return a page with the tables and claims of experiments of one preset, and with a table of single runs."""
    sections = [f"# {markdown(title)}"]
    if grids:
        sections.append(
            "Test accuracy in %: mean ± standard deviation (number of seeds), [the paper's value]; the best of a "
            "column is bold. Differences are means over seeds with their 95 % confidence interval in brackets. A claim "
            "is confirmed or refuted if the interval does not contain 0, and not decided otherwise. It is out of reach "
            "if the runs do not meet a condition that was stated before them."
        )
    presets = dict.fromkeys(grid.preset for grid in grids)
    sections += [PRESETS.get(preset, f"Preset {markdown(preset)}.") for preset in presets]
    if len(grids) > 1:
        sections.append(_overview(grids))
    for grid in grids:
        sections += [f"## {markdown(grid.id)}: {markdown(grid.title)}", as_markdown(grid).rstrip()]
        finished = [run for cell in grid.cells for run in cell.runs.values()]
        if finished:
            seconds = [as_number((run.summary or {}).get("seconds")) or 0.0 for run in finished]
            example = markdown(provenance(finished[0]))
            sections.append(f"{len(finished)} runs, {min(seconds):.0f} to {max(seconds):.0f} s each; {example}.")
        if grid.problems:
            sections.append(f"Left out: {len(grid.problems)} unfinished or unreadable runs.")
    if runs:
        sections += ["## Runs", runs_as_markdown(runs).rstrip()]
    return "\n\n".join(sections) + "\n"


def _overview(grids: Sequence[Grid]) -> str:
    """Return a table of all claims in three groups: confirmed, refuted, and not decided or out of reach."""
    verdicts = [(grid, judge(grid, claim)) for grid in grids for claim in grid.claims]
    parts = []
    for heading, group in GROUPS.items():
        chosen = [(grid, verdict) for grid, verdict in verdicts if verdict.verdict in group]
        lines = [f"## {heading} ({len(chosen)})", "", "| claim | difference | experiment |", "|---|---|---|"]
        for grid, verdict in chosen:
            state = "out of reach, " if verdict.verdict == OUT_OF_REACH else ""
            difference = f"{state}{verdict.effect}, n = {verdict.seeds}"
            lines.append(f"| {markdown(verdict.claim.statement)} | {difference} | {markdown(grid.id)} |")
        parts += ["\n".join(lines)] if chosen else []
    return "\n\n".join(parts)


def as_csv(grids: Sequence[Grid]) -> str:
    """Return one line per cell: names, the paper's value, our mean and standard deviation, runs, difference."""
    rows: list[list[Any]] = []
    for grid in grids:
        for cell in grid.cells:
            mean, deviation = cell.mean_and_std() or (None, None)
            difference = None if mean is None or cell.paper is None else mean - cell.paper
            paper, mean, deviation, difference = (
                None if value is None else round(value, 4) for value in (cell.paper, mean, deviation, difference)
            )
            names = [grid.id, grid.preset, cell.name, cell.row, cell.column]
            rows.append([*names, paper, mean, deviation, len(cell.runs), difference])
    columns = ["experiment", "preset", "cell", "row", "column", "paper", "mean", "std", "runs", "difference"]
    return _csv(columns, rows)
