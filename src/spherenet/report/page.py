"""The parts of a page: what is said, tabled and drawn about some runs or about an experiment.

One self-contained page about runs and experiments: tables, claims, interactive curves; it opens offline.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from spherenet.files import replacing
from spherenet.report.grids import Grid, GridCell, Verdict, judge
from spherenet.report.runs import Curve, ReportedRun, distinct_names, how_made
from spherenet.report.tables import COLUMNS, best_of, cell_text, shape_of, table_rows
from spherenet.text import as_number, plain

__all__ = ["Plot", "Section", "Table", "section_of_grid", "section_of_runs", "write_page"]

CURVES = (
    ("Test accuracy", "test", "accuracy"),
    ("Training loss", "train", "loss"),
    ("Training accuracy", "train", "accuracy"),
)
COLOURS = ("#0090ff", "#e5484d", "#30a46c", "#f76b15", "#8e4ec6", "#12a594", "#d6409f", "#978365", "#60646c", "#ffc53d")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
"""What tells curves apart; a table has the colours by row and the dashes by column. Either begins again at its end."""


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
    """One experiment, or some runs. anchor: what links within the page lead to."""

    title: str
    anchor: str
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
    looks = [_look(position) for position in range(len(runs))]
    plots = [
        _lines(heading, names, [run.curve(split, quantity) for run in runs], looks, quantity)
        for heading, split, quantity in CURVES
    ]
    notes = [(name, how_made(run)) for name, run in zip(names, runs, strict=True)]
    return Section("Runs", "runs", table=Table("", list(COLUMNS[:-1]), rows), plots=plots, notes=notes)


def section_of_grid(grid: Grid) -> Section:
    """An experiment: the paper's numbers beside ours, the claims, mean curves, learned k, time and memory."""
    measured = [cell for cell in grid.cells if cell.runs]
    section = Section(
        f"{grid.id}: {grid.title}",
        grid.id,
        f"Preset {grid.preset}; {grid.shows}. Test accuracy in %, mean ± standard deviation (runs).",
        _paper(grid),
        _costs(measured),
        [judge(grid, claim) for claim in grid.claims],
        [_mean_curves(grid, measured)],
    )
    for cell in measured:
        section.plots += _learned_k(cell)
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
            names = ("parameters", "iterations", "seconds", "peak_megabytes")
            numbers = [as_number(summary.get(name)) for name in names]
            shown = [f"{number:,.0f}" if number is not None else "–" for number in numbers]
            rows.append([(cell.name, False), (str(seed), False), *((text, False) for text in shown)])
    return Table("Time and memory", ["cell", "seed", "parameters", "iterations", "seconds", "peak MB"], rows)


def _mean_curves(grid: Grid, cells: Sequence[GridCell]) -> Plot:
    """A curve a cell, the mean over its seeds."""
    rows, columns, _ = shape_of(grid)
    looks = [_look(rows.index(cell.row), columns.index(cell.column)) for cell in cells]
    curves = [cell.mean_curve() for cell in cells]
    return _lines("Test accuracy, mean over seeds", [cell.name for cell in cells], curves, looks, "accuracy")


def _look(colour: int, dash: int = 0) -> dict[str, str]:
    return {"color": COLOURS[colour % len(COLOURS)], "dash": DASHES[dash % len(DASHES)]}


def _lines(
    heading: str, names: Sequence[str], curves: Sequence[Curve], looks: Sequence[dict[str, str]], quantity: str
) -> Plot:
    share = quantity == "accuracy"
    traces: list[dict[str, Any]] = [
        {
            "x": curve.steps,
            "y": curve.values,
            "name": name,
            "mode": "lines+markers",
            "line": look,
            "hovertemplate": "%{y:.2%}" if share else "%{y:.4f}",
        }
        for name, curve, look in zip(names, curves, looks, strict=True)
    ]
    layout = {
        "xaxis": {"title": {"text": "iterations"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": heading.split(",")[0].lower()}, "tickformat": ".0%" if share else ""},
    }
    return Plot(heading, traces, layout)


def _learned_k(cell: GridCell) -> list[Plot]:
    """Where the k of a cell came to lie, in all its runs; nothing where k was not learned."""
    layers = _joined(run.learned_k() for run in cell.runs.values())
    if not any(layers.values()):
        return []
    of_stages = _joined(run.k_of_stages() for run in cell.runs.values())
    return [_histograms(cell.name, of_stages), _boxes(cell.name, layers)]


def _joined(runs: Iterable[dict[str, list[float]]]) -> dict[str, list[float]]:
    """The k of each layer over all runs."""
    layers: dict[str, list[float]] = {}
    for run in runs:
        for name, values in run.items():
            layers.setdefault(name, []).extend(values)
    return layers


def _histograms(name: str, layers: dict[str, list[float]]) -> Plot:
    """The paper's picture: the first layer of each stage."""
    every = [k for values in layers.values() for k in values]
    bin_size = max((max(every, default=0) - min(every, default=0)) / 30, 1e-3)
    traces: list[dict[str, Any]] = [
        {
            "type": "histogram",
            "x": values,
            "name": layer,
            "opacity": 0.6,
            "xbins": {"size": bin_size},
            "marker": {"color": _look(position)["color"]},
        }
        for position, (layer, values) in enumerate(layers.items())
    ]
    axes = {"xaxis": {"title": {"text": "k"}}, "yaxis": {"title": {"text": "filters"}}}
    heading = f"Learned k, first layer of each stage: {name}"
    return Plot(heading, traces, {"barmode": "overlay", "hovermode": "closest", **axes})


def _boxes(name: str, layers: dict[str, list[float]]) -> Plot:
    """Every layer, from the first to the last."""
    look = {"showlegend": False, "marker": {"color": COLOURS[0]}}
    traces: list[dict[str, Any]] = [
        {"type": "box", "y": values, "name": layer.removeprefix("features."), **look}
        for layer, values in layers.items()
    ]
    axes = {"xaxis": {"title": {"text": "layer"}, "automargin": True}, "yaxis": {"title": {"text": "k"}}}
    return Plot(f"Learned k by layer: {name}", traces, {"hovermode": "closest", **axes})


def write_page(sections: Sequence[Section], path: str | Path, title: str) -> None:
    """Write a page of sections; whatever the folders of the runs say is shown as text, never run."""
    from jinja2 import Environment
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

    template = Environment(autoescape=True).from_string(
        files("spherenet.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    )
    plots = [
        {"data": [_named(trace) for trace in plot.traces], "layout": plot.layout}
        for section in sections
        for plot in section.plots
    ]
    page = template.render(title=title, sections=sections, plots=_embedded(plots), plotly=get_plotlyjs())
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as temporary:
        temporary.write_text(page, encoding="utf-8")


def _named(trace: dict[str, Any]) -> dict[str, Any]:
    """A trace whose name is text: plotly would make links and markup of tags in it."""
    return {**trace, "name": escape(plain(trace["name"]), quote=False)}


def _embedded(value: Any) -> str:
    """JSON inside a script element: no character of it can end the element."""
    return json.dumps(value).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
