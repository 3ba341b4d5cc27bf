"""The section of an HTML page about an experiment: paper's values, claims, mean curves, learned k, time and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean, quantiles, stdev

from spherenet.cli.plugin import as_number
from spherenet.report import COLORS, DASHES, Line, Plot, Section, Statement, Table, line_plot, line_style, provenance
from spherenet_paper.report.claims import Verdict, judge
from spherenet_paper.report.closeness import closeness
from spherenet_paper.report.grids import Grid, GridCell
from spherenet_paper.report.tables import GridLayout, cell_text

__all__ = ["section_of_grid"]


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
    lines = [replace(line, band=_band(cell)) for line, cell in zip(plot.lines, cells, strict=True)]
    return replace(plot, lines=lines)


def _band(cell: GridCell) -> list[tuple[float, float]]:
    """Return mean ± standard deviation at each point of the mean curve; nothing for a single seed."""
    if len(cell.runs) < 2:
        return []
    statistics = [(fmean(values), stdev(values)) for values in cell.points().values()]
    return [(mean - deviation, mean + deviation) for mean, deviation in statistics]


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
    """Return histograms of k in the first layer of each stage, as in the paper, as lines through the counts."""
    values = [k for layer_values in layers.values() for k in layer_values]
    start, width = min(values), max((max(values) - min(values)) / 30, 1e-3)
    centers = [start + (number + 0.5) * width for number in range(31)]
    lines = []
    for position, (layer, layer_values) in enumerate(layers.items()):
        counts = Counter(int((k - start) / width) for k in layer_values)
        lines.append(Line(layer, centers, [counts[number] for number in range(31)], line_style(position)[0]))
    return Plot(f"Learned k, first layer of each stage: {name}", lines, "k", "filters")


def _boxes(name: str, layers: dict[str, list[float]]) -> Plot:
    """Return the median of k in every layer, from the first to the last, with quartiles and extreme values."""
    names = [layer.removeprefix("features.") for layer in layers]
    groups = [values if len(values) > 1 else values * 2 for values in layers.values()]
    quartiles = [quantiles(values, n=4, method="inclusive") for values in groups]
    positions, color = list(range(len(groups))), COLORS[0]
    medians, band = [middle for _, middle, _ in quartiles], [(low, high) for low, _, high in quartiles]
    lines = [
        Line("median, band of quartiles", positions, medians, color, "", band),
        Line("smallest", positions, [min(values) for values in groups], color, DASHES[2]),
        Line("largest", positions, [max(values) for values in groups], color, DASHES[1]),
    ]
    return Plot(f"Learned k by layer: {name}", lines, "layer", "k", names=names)
