"""Parts of the page of results as Markdown: tables of an experiment, and what its runs are."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from spherenet.cli.plugin import as_number, markdown
from spherenet.report import command_and_details
from spherenet_paper.report.grids import Grid, GridCell
from spherenet_paper.report.quantities import STEADY, has_steady_pace, mean_between
from spherenet_paper.report.tables import GridLayout, cell_text, row_name

__all__ = ["accuracy_table", "footer", "logs_table", "missing_table", "protocol_table", "time_table"]


def footer(grid: Grid) -> str:
    """Return how long the runs took, command, versions and hardware of the first, and how many were left out."""
    sections = []
    finished = [run for cell in grid.cells for run in cell.runs.values()]
    if finished:
        seconds = [as_number((run.summary or {}).get("seconds")) or 0.0 for run in finished]
        uneven = any(has_steady_pace(run) is False for run in finished)
        shared = " (shared machine; ignore times)" if uneven else ""
        one = len(finished) == 1
        times = f"{seconds[0]:.0f} s" if one else f"{min(seconds):.0f} to {max(seconds):.0f} s each"
        count = f"{len(finished)} run{'' if one else 's'}"
        command, details = command_and_details(finished[0])
        code = markdown(command) if "`" in command else f"`{command}`"
        different = sum(command_and_details(run)[1] != details for run in finished)
        others = f"; other or unknown for {different} of the runs" if different else ""
        sections.append(f"{count}, {times}{shared}; {code} ({markdown(details)}{others}).")
    if grid.problems:
        sections.append(f"Left out: {len(grid.problems)} unfinished or unreadable runs.")
    return "\n\n".join(sections)


def accuracy_table(grid: Grid) -> str:
    """Return a table of accuracies. Rows and columns of a planned grid that have no runs yet are left out."""
    layout = GridLayout(grid)
    shown = [cell for cell in grid.cells if cell.runs or not grid.seeds]
    columns = [column for column in layout.columns if any(cell.column == column for cell in shown)]
    lines = [f"| | {' | '.join(map(markdown, columns))} |", "|---" * (len(columns) + 1) + "|"]
    for row in layout.rows:
        if all(cell.row != row for cell in shown):
            continue
        texts = []
        for column in columns:
            cell = layout.cell(row, column)
            ours, paper = cell_text(cell)
            ours = f"**{ours}**" if cell is not None and cell is layout.best[column] else ours
            texts.append(ours if paper == "–" else f"{ours} [{paper}]")
        lines.append(f"| {markdown(row_name(grid, row))} | {' | '.join(texts)} |")
    return "\n".join(lines)


def protocol_table(grid: Grid) -> str:
    """Return a table of accuracies by BatchNorm statistics, or nothing if no cell was evaluated with several."""
    cells, protocols = _protocols_of(grid)
    if not cells:
        return ""
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
    return "\n".join(lines)


def _protocols_of(grid: Grid) -> tuple[list[GridCell], list[str]]:
    """Return the cells that were evaluated with several kinds of BatchNorm statistics, and the names of these."""
    cells = [cell for cell in grid.cells if any(len(run.protocols()) > 1 for run in cell.runs.values())]
    return cells, list(dict.fromkeys(name for cell in cells for run in cell.runs.values() for name in run.protocols()))


def logs_table(grid: Grid) -> str:
    """Return a table of the averages of published logs beside those of our runs, or nothing without logs."""
    logs = grid.logs
    if logs is None:
        return ""
    _, protocols = _protocols_of(grid)
    protocols = protocols or ["running"]
    headings = ["theirs: training", "theirs: test", "ours: training", *(f"ours: test, {name}" for name in protocols)]
    lines = [
        f"Mean accuracy in % over the iterations {logs.first:,} to {logs.last:,}, ours (number of seeds) beside the "
        f"{markdown(logs.source)}. Their test accuracy is with lagging statistics:",
        "",
        f"| | | {' | '.join(map(markdown, headings))} |",
        "|---" * (len(headings) + 2) + "|",
    ]
    for cell in grid.cells:
        if cell.name not in logs.accuracies:
            continue
        theirs = [f"{percent:.1f}" for percent in logs.accuracies[cell.name]]
        ours = [_window_mean(cell, "train", logs.first, logs.last)]
        ours += [_window_mean(cell, "test", logs.first, logs.last, name) for name in protocols]
        lines.append(f"| {markdown(cell.row)} | {markdown(cell.column)} | {' | '.join([*theirs, *ours])} |")
    return "\n".join(lines)


def _window_mean(cell: GridCell, split: str, first: int, last: int, protocol: str | None = None) -> str:
    """Return the mean over seeds and the rows of some iterations with the number of seeds, or "–" without rows."""
    means = [mean_between(run, split, first, last, protocol) for run in cell.runs.values()]
    values = [mean for mean in means if mean is not None]
    return f"{fmean(values):.1f} ({len(values)})" if values else "–"


def time_table(grid: Grid) -> str:
    """Return a table of the time until the final accuracy of the baseline is reached, or nothing without a baseline."""
    times = grid.times_to_baseline()
    if not times:
        return ""
    baseline = row_name(grid, grid.baseline or "")
    others = [time for cell, by_seed in times if cell.row != grid.baseline for time in by_seed if time is not None]
    known = [time for time in others if time.seconds is not None]
    lines = [
        f"First evaluation at which a network, {markdown(baseline)} included, reaches the final accuracy of "
        f"{markdown(baseline)} with the same loss and seed: mean (smallest to largest) over the seeds that reach it.",
        "",
        f"| | | reached by | iteration | fraction of the run |{' seconds | fraction of its time |' if known else ''}",
        "|---" * (7 if known else 5) + "|",
    ]
    for cell, by_seed in times:
        reached = [time for time in by_seed if time is not None]
        texts = [_range([time.step for time in reached], 0), _range([time.fraction for time in reached], 2)]
        if known:
            texts.append(_range([time.seconds for time in reached if time.seconds is not None], 0))
            texts.append(_range([t.seconds_fraction for t in reached if t.seconds_fraction is not None], 2))
        count = f"{len(reached)} of {len(by_seed)} seeds"
        names = f"{markdown(row_name(grid, cell.row))} | {markdown(cell.column)}"
        lines.append(f"| {names} | {count} | {' | '.join(texts)} |")
    if len(known) < len(others):
        lines += [
            "",
            f"{'Some seconds' if known else 'Seconds'} are left out: other work shared the machine (the ninth decile "
            f"of the time per step is more than {STEADY} times the first).",
        ]
    return "\n".join(lines)


def _range(values: Sequence[float], digits: int) -> str:
    """Return mean, smallest and largest value, or "–" for none."""
    if not values:
        return "–"
    return "{:,.{d}f} ({:,.{d}f} to {:,.{d}f})".format(fmean(values), min(values), max(values), d=digits)


def missing_table(grids: Sequence[Grid]) -> str:
    """Return finished and planned runs of each grid, and the seeds that each cell lacks."""
    lines = ["| experiment | in complete cells | planned | missing |", "|---|---|---|---|"]
    for grid in grids:
        texts = [f"{name}: seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
                 for name, seeds in grid.missing().items()]  # fmt: skip
        missing = "; ".join(texts) or "none" if grid.has_runs else "all"
        counts = f"{sum(len(cell.runs) for cell in grid.cells)} | {sum(grid.seeds.values())}"
        lines.append(f"| {markdown(grid.id)} | {counts} | {markdown(missing)} |")
    return "\n".join(lines)
