"""Sections of an HTML page about experiments: the paper's values, claims, mean curves, learned k, time and memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean, stdev
from typing import Any

from spherenet._util.text import as_number
from spherenet.report import COLORS, Plot, Section, Statement, Table, line_plot, line_style, provenance
from spherenet_paper.report.claims import Verdict, judge
from spherenet_paper.report.closeness import closeness
from spherenet_paper.report.grids import Grid, GridCell
from spherenet_paper.report.tables import GridLayout, cell_text

__all__ = ["section_of_grid", "sections_of_grids"]


def sections_of_grids(grids: Sequence[Grid]) -> list[Section]:
    """Return a section per experiment. The link to one of several presets contains the preset."""
    sections = [section_of_grid(grid) for grid in grids]
    names = [grid.id for grid in grids]
    for grid, section in zip(grids, sections, strict=True):
        if names.count(grid.id) > 1:
            section.anchor = f"{grid.id}, {grid.preset}"
    return sections


def section_of_grid(grid: Grid) -> Section:
    """Return a section about an experiment: the paper's values, claims, mean curves, learned k, time and memory."""
    measured = [cell for cell in grid.cells if cell.runs]
    section = Section(
        f"{grid.id}: {grid.title}",
        grid.id,
        f"Preset {grid.preset}; {grid.shows}. Test accuracy in %, mean ± standard deviation (runs)."
        + (f" {closeness(grid)}" if measured else ""),
        _accuracy_table(grid),
        _cost_table(measured),
        [_statement(judge(grid, claim)) for claim in grid.claims] if measured else [],
        [_mean_curves(grid, measured)] if measured else [],
    )
    for cell in measured:
        section.plots += _learned_k_plots(cell)
    section.notes = [("left out", problem) for problem in grid.problems]
    if measured:
        first = next(iter(measured[0].runs.values()))
        section.notes.append((f"for example {measured[0].name}", provenance(first)))
    return section


def _statement(verdict: Verdict) -> Statement:
    return Statement(verdict.verdict, verdict.claim.full_text, verdict.claim.source, verdict.statistics)


def _accuracy_table(grid: Grid) -> Table:
    layout = GridLayout(grid)
    has_paper = {column: any(cell.paper for cell in grid.cells if cell.column == column) for column in layout.columns}
    headings = [""]
    for column in layout.columns:
        headings += [column, "paper", "difference"] if has_paper[column] else [column]
    rows = []
    for row in layout.rows:
        texts = [(row, False)]
        for column in layout.columns:
            cell = layout.cell(row, column)
            ours, paper = cell_text(cell)
            texts.append((ours, cell is not None and cell is layout.best[column]))
            if has_paper[column]:
                texts += [("" if cell is None else paper, False), (_difference(cell), False)]
        rows.append(texts)
    return Table("Accuracy", headings, rows)


def _difference(cell: GridCell | None) -> str:
    statistics = None if cell is None else cell.mean_and_std()
    return "" if cell is None or cell.paper is None or statistics is None else f"{statistics[0] - cell.paper:+.2f}"


def _cost_table(cells: Sequence[GridCell]) -> Table:
    rows = []
    for cell in cells:
        for seed, run in cell.runs.items():
            summary = run.summary or {}
            names = ("parameters", "iterations", "seconds", "peak_megabytes")
            numbers = [as_number(summary.get(name)) for name in names]
            texts = [f"{number:,.0f}" if number is not None else "–" for number in numbers]
            rows.append([(text, False) for text in (cell.name, str(seed), *texts)])
    return Table("Time and memory", ["cell", "seed", "parameters", "iterations", "seconds", "peak MB"], rows)


def _mean_curves(grid: Grid, cells: Sequence[GridCell]) -> Plot:
    """Return a plot with one curve per cell, the mean over its seeds, in a band of one standard deviation."""
    layout = GridLayout(grid)
    styles = [line_style(layout.rows.index(cell.row), layout.columns.index(cell.column)) for cell in cells]
    curves = [cell.mean_curve() for cell in cells]
    names = [f"{cell.name} (n = {len(cell.runs)})" for cell in cells]
    plot = line_plot("Test accuracy, mean ± standard deviation over seeds", names, curves, styles, "accuracy")
    for position, (cell, style) in enumerate(zip(cells, styles, strict=True)):
        plot.traces[position]["legendgroup"] = str(position)
        plot.traces.extend(_band(cell, style["color"], str(position)))
    return plot


def _band(cell: GridCell, color: str, group: str) -> list[dict[str, Any]]:
    """Return the lower and upper edge of the band around a mean curve; nothing for a single seed."""
    points = cell.points()
    if len(cell.runs) < 2 or not points:
        return []
    means = [fmean(values) for values in points.values()]
    deviations = [stdev(values) for values in points.values()]
    shared = {"x": list(points), "name": cell.name, "mode": "lines", "line": {"width": 0, "color": color},
              "hoverinfo": "skip", "showlegend": False, "legendgroup": group}  # fmt: skip
    lower = [mean - deviation for mean, deviation in zip(means, deviations, strict=True)]
    upper = [mean + deviation for mean, deviation in zip(means, deviations, strict=True)]
    return [{**shared, "y": lower}, {**shared, "y": upper, "fill": "tonexty", "fillcolor": f"{color}26"}]


def _learned_k_plots(cell: GridCell) -> list[Plot]:
    """Return plots of the learned k over all runs of a cell, or none if k was not learned."""
    layers = _joined(run.learned_k() for run in cell.runs.values())
    if not any(layers.values()):
        return []
    of_stages = _joined(run.learned_k_of_stages() for run in cell.runs.values())
    return [_histograms(cell.name, of_stages), _boxes(cell.name, layers)]


def _joined(runs: Iterable[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Concatenate the k of each layer over runs."""
    layers: dict[str, list[float]] = {}
    for run in runs:
        for name, values in run.items():
            layers.setdefault(name, []).extend(values)
    return layers


def _histograms(name: str, layers: dict[str, list[float]]) -> Plot:
    """Return histograms of k in the first layer of each stage, as in the paper."""
    values = [k for layer_values in layers.values() for k in layer_values]
    bin_size = max((max(values, default=0) - min(values, default=0)) / 30, 1e-3)
    traces: list[dict[str, Any]] = [
        {
            "type": "histogram",
            "x": layer_values,
            "name": layer,
            "opacity": 0.6,
            "xbins": {"size": bin_size},
            "marker": {"color": line_style(position)["color"]},
        }
        for position, (layer, layer_values) in enumerate(layers.items())
    ]
    axes = {"xaxis": {"title": {"text": "k"}}, "yaxis": {"title": {"text": "filters"}}}
    heading = f"Learned k, first layer of each stage: {name}"
    return Plot(heading, traces, {"barmode": "overlay", "hovermode": "closest", **axes})


def _boxes(name: str, layers: dict[str, list[float]]) -> Plot:
    """Return a box plot of k in every layer, from the first to the last."""
    style = {"showlegend": False, "marker": {"color": COLORS[0]}}
    traces: list[dict[str, Any]] = [
        {"type": "box", "y": values, "name": layer.removeprefix("features."), **style}
        for layer, values in layers.items()
    ]
    axes = {"xaxis": {"title": {"text": "layer"}, "automargin": True}, "yaxis": {"title": {"text": "k"}}}
    return Plot(f"Learned k by layer: {name}", traces, {"hovermode": "closest", **axes})
