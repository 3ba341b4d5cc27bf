"""The parts of a page: what is said, tabled and drawn about some runs or about an experiment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from spherenet.report.claims import Verdict, judge
from spherenet.report.grids import Grid, GridCell
from spherenet.report.paper_table import best_of, cell_text, shape_of
from spherenet.report.runs import Curve, ReportedRun, distinct_names, how_made
from spherenet.report.table import COLUMNS, table_rows

__all__ = ["Plot", "Section", "Table", "section_of_grid", "section_of_runs"]

CURVES = (
    ("Test accuracy", "test", "accuracy"),
    ("Training loss", "train", "loss"),
    ("Training accuracy", "train", "accuracy"),
)


@dataclass(frozen=True)
class Table:
    """The names of the columns, and cells; a bold one is the best of its column. heading: where it is folded away."""

    heading: str
    columns: list[str]
    rows: list[list[tuple[str, bool]]]


@dataclass(frozen=True)
class Plot:
    """A heading, and traces and layout as plotly takes them."""

    heading: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]


@dataclass
class Section:
    """One experiment, or some runs."""

    title: str
    words: str = ""
    table: Table | None = None
    details: Table | None = None
    verdicts: list[Verdict] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)


def section_of_runs(runs: Sequence[ReportedRun]) -> Section:
    """Runs side by side: a table, their curves, and how they were made."""
    names = distinct_names(runs)
    rows = [[(cell, False) for cell in row[:-1]] for row in table_rows(runs)]
    plots = [
        _lines(heading, {name: run.curve(split, quantity) for name, run in zip(names, runs, strict=True)}, quantity)
        for heading, split, quantity in CURVES
    ]
    notes = [(name, how_made(run)) for name, run in zip(names, runs, strict=True)]
    return Section("Runs", table=Table("", list(COLUMNS[:-1]), rows), plots=plots, notes=notes)


def section_of_grid(grid: Grid) -> Section:
    """An experiment: the paper's numbers beside ours, the claims, mean curves, learned k, time and memory."""
    measured = [cell for cell in grid.cells if cell.runs]
    section = Section(
        f"{grid.id}: {grid.title}",
        f"Preset {grid.preset}; {grid.shows}. Test accuracy in %, mean ± standard deviation (runs).",
        _paper(grid),
        _costs(measured),
        [judge(grid, claim) for claim in grid.claims],
        [_lines("Test accuracy, mean over seeds", {cell.name: cell.mean_curve() for cell in measured}, "accuracy")],
    )
    section.plots += [_histogram(cell) for cell in measured if _last_k(cell)]
    section.notes = [("left out", complaint) for complaint in grid.complaints]
    if measured:
        first = next(iter(measured[0].runs.values()))
        section.notes.append((f"for example {measured[0].name}", how_made(first)))
    return section


def _paper(grid: Grid) -> Table:
    rows, columns, cells = shape_of(grid)
    best = {column: best_of([cells[row, column] for row in rows if (row, column) in cells]) for column in columns}
    has_paper = {column: any(cell.paper for cell in grid.cells if cell.column == column) for column in columns}
    headings = [""]
    for column in columns:
        headings += [column, "paper", "difference"] if has_paper[column] else [column]
    made = []
    for row in rows:
        line = [(row, False)]
        for column in columns:
            cell = cells.get((row, column))
            ours, paper = cell_text(cell) if cell is not None else ("", "")
            line.append((ours, cell is not None and cell is best[column]))
            if has_paper[column]:
                line += [(paper, False), (_difference(cell), False)]
        made.append(line)
    return Table("Accuracy", headings, made)


def _difference(cell: GridCell | None) -> str:
    found = None if cell is None else cell.mean_and_std()
    return "" if cell is None or cell.paper is None or found is None else f"{found[0] - cell.paper:+.2f}"


def _costs(cells: Sequence[GridCell]) -> Table:
    rows = []
    for cell in cells:
        for seed, run in cell.runs.items():
            summary = run.summary or {}
            numbers = [summary.get(name) for name in ("parameters", "iterations", "seconds", "peak_megabytes")]
            shown = [f"{number:,.0f}" if isinstance(number, (int, float)) else "–" for number in numbers]
            rows.append([(cell.name, False), (str(seed), False), *((text, False) for text in shown)])
    return Table("Time and memory", ["cell", "seed", "parameters", "iterations", "seconds", "peak MB"], rows)


def _lines(heading: str, curves: dict[str, Curve], quantity: str) -> Plot:
    share = quantity == "accuracy"
    traces: list[dict[str, Any]] = [
        {
            "x": curve.steps,
            "y": curve.values,
            "name": name,
            "mode": "lines+markers",
            "hovertemplate": "%{y:.2%}" if share else "%{y:.4f}",
        }
        for name, curve in curves.items()
    ]
    layout = {
        "xaxis": {"title": {"text": "iterations"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": heading.split(",")[0].lower()}, "tickformat": ".0%" if share else ""},
    }
    return Plot(heading, traces, layout)


def _last_k(cell: GridCell) -> dict[str, list[float]]:
    """The k that the first run of a cell came to, by layer; empty where k was not learned."""
    run = next(iter(cell.runs.values()))
    found = [row["k"] for row in run.rows if row["split"] == "observed" and isinstance(row.get("k"), dict)]
    if run.setting("operator") != "learnable" or not found:
        return {}
    return {name: values for name, values in found[-1].items() if isinstance(values, list)}


def _histogram(cell: GridCell) -> Plot:
    """The learned k in the first layer of each stage."""
    layers = {name: values for name, values in _last_k(cell).items() if name.endswith(".0.0") or "." not in name}
    traces: list[dict[str, Any]] = [
        {"type": "histogram", "x": values, "name": name, "opacity": 0.6, "xbins": {"size": 0.02}}
        for name, values in layers.items()
    ]
    layout = {
        "barmode": "overlay",
        "hovermode": "closest",
        "xaxis": {"title": {"text": "k"}},
        "yaxis": {"title": {"text": "filters"}},
    }
    return Plot(f"Learned k, first layer of each stage: {cell.name}", traces, layout)
