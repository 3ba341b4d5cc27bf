"""Pages of results as Markdown: the main figure and table, claims in three groups, all grids, small ones at the end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import fmean

from spherenet._util.text import as_number, markdown
from spherenet.report import command_and_details
from spherenet_paper.report.claims import CONFIRMED, NOT_DECIDED, OUT_OF_REACH, REFUTED, Verdict, judge
from spherenet_paper.report.closeness import closeness
from spherenet_paper.report.figure import figure_cells, main_grid
from spherenet_paper.report.grids import PRESETS, Grid, GridCell, presets_of
from spherenet_paper.report.quantities import STEADY, has_steady_pace, mean_between
from spherenet_paper.report.tables import GridLayout, cell_text, row_name

__all__ = ["as_markdown", "markdown_page"]

GROUPS = {
    "Claims confirmed": (CONFIRMED,),
    "Claims refuted": (REFUTED,),
    "Claims not decided or out of reach": (NOT_DECIDED, OUT_OF_REACH),
}

READING = (
    "Test accuracy in % at the end of a run, never the best one, with running BatchNorm statistics unless others are "
    "named: mean ± standard deviation (number of seeds), [the paper's value]; the best of a column is bold. "
    "Differences are means over seeds with their 95 % confidence interval in brackets. A claim is confirmed or refuted "
    "if the interval does not contain 0, and not decided otherwise. It is out of reach if the runs do not meet its "
    "condition (stated before the runs in the preset long, after them in the preset cpu)."
)


def markdown_page(grids: Sequence[Grid], title: str, figure: str | None = None) -> str:
    """Return a page about experiments.

    The experiments of the largest preset come first: the figure and the table of the one with a baseline, all claims,
    time to accuracy, and the other tables. Each smaller preset is an appendix.

    Args:
        grids: Experiments of one or several presets.
        title: Heading of the page.
        figure: Address of the figure of `main_grid`, relative to the page, or None.
    """
    sections = [f"# {markdown(title)}"]
    for number, preset in enumerate(presets_of(grids)):
        own = [grid for grid in grids if grid.preset == preset]
        text = PRESETS.get(preset, f"Preset {markdown(preset)}.")
        if number == 0:
            sections += [text, *_main_part(own, figure)]
        else:
            heading = f"## Appendix: {'small grids, ' if preset.startswith('cpu') else ''}preset {markdown(preset)}"
            sections += [heading, text, *_claims_and_grids(own, "###")]
    return _front_matter(grids) + "\n\n".join(sections) + "\n"


def _front_matter(grids: Sequence[Grid]) -> str:
    """Return the description of the page that search engines show, or nothing for a page without experiments."""
    if not grids:
        return ""
    runs = sum(len(cell.runs) for grid in grids for cell in grid.cells)
    experiments = len({grid.id for grid in grids if grid.has_runs})
    text = (
        f"SphereNets against CNNs in {runs:,} runs of {experiments} experiments: test accuracies, and the paper's "
        "claims with differences and 95 % intervals."
    )
    return f"---\ndescription: {json.dumps(text, ensure_ascii=False)}\n---\n\n"


def _main_part(grids: Sequence[Grid], figure: str | None) -> list[str]:
    """Return the figure and the table of the main grid, what is missing, claims, time to accuracy and other grids."""
    main, sections = main_grid(grids), []
    grids = sorted(grids, key=lambda grid: grid is not main)
    if main is not None:
        if figure is not None:
            cells = figure_cells(main)
            names = ", ".join(markdown(row_name(main, cell.row)) for cell in cells)
            sections.append(f"![Test accuracy over iterations: {names}]({figure})")
            sections.append(
                f"Test accuracy over iterations with {markdown(cells[0].column)}: mean (line) and range (band) over "
                "seeds. The numbers are those of the last evaluation."
            )
        sections += [f"## {markdown(main.id)}: {markdown(main.title)}", "\n".join(_table(main))]
        sections.append(markdown(closeness(main)))
    sections.append(READING)
    sections += [] if main is None else _footer(main)
    planned = sum(sum(grid.seeds.values()) for grid in grids)
    missing = sum(len(seeds) for grid in grids for seeds in grid.missing().values())
    if planned:
        end = "" if not missing else "; [Planned runs](#planned-runs) lists the missing ones"
        sections.append(f"{planned - missing} of {planned} planned runs are in complete cells{end}.")
    sections += _claims(grids, "##")
    if main is not None and len(grids) == 1:
        sections.append("\n".join(_claim_line(judge(main, claim)) for claim in main.claims))
    if main is not None and (lines := _time_lines(main)):
        sections += ["## Time to accuracy", "\n".join(lines).rstrip()]
    sections += _sections_of([grid for grid in grids if grid is not main], "##", with_claims=len(grids) == 1)
    if missing:
        sections += ["## Planned runs", _missing_table([grid for grid in grids if grid.seeds])]
    return [section for section in sections if section]


def _claims_and_grids(grids: Sequence[Grid], level: str) -> list[str]:
    return [*_claims(grids, level), *_sections_of(grids, level, with_claims=len(grids) == 1)]


def _sections_of(grids: Sequence[Grid], level: str, *, with_claims: bool) -> list[str]:
    """Return a heading, the tables and the provenance of each grid that has runs or published logs."""
    sections = []
    for grid in grids:
        if not (grid.has_runs or grid.logs):
            continue
        sections.append(f"{level} {markdown(grid.id)}: {markdown(grid.title)}")
        sections += [as_markdown(grid, with_claims=with_claims).rstrip(), *_footer(grid)]
    return sections


def _footer(grid: Grid) -> list[str]:
    """Return how long the runs took, command, versions and hardware of the first, and how many were left out."""
    sections = []
    finished = [run for cell in grid.cells for run in cell.runs.values()]
    if finished:
        seconds = [as_number((run.summary or {}).get("seconds")) or 0.0 for run in finished]
        uneven = any(has_steady_pace(run) is False for run in finished)
        shared = ", at an uneven pace, as on shared cores" if uneven else ""
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
    return sections


def as_markdown(grid: Grid, *, with_claims: bool = True) -> str:
    """Return the tables of an experiment as Markdown, and a list of its claims."""
    table = [*_table(grid), "", markdown(closeness(grid))] if grid.has_runs else ["No cell is complete."]
    lines = [*table, "", *_protocol_lines(grid), *_logs_lines(grid)]
    if with_claims:
        lines += [*_time_lines(grid), *(_claim_line(judge(grid, claim)) for claim in grid.claims)]
    return "\n".join(lines) + "\n"


def _table(grid: Grid) -> list[str]:
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
    return lines


def _protocol_lines(grid: Grid) -> list[str]:
    """Return a table of accuracies by BatchNorm statistics, or nothing if no cell was evaluated with several."""
    cells, protocols = _protocols_of(grid)
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


def _protocols_of(grid: Grid) -> tuple[list[GridCell], list[str]]:
    """Return the cells that were evaluated with several kinds of BatchNorm statistics, and the names of these."""
    cells = [cell for cell in grid.cells if any(len(run.protocols()) > 1 for run in cell.runs.values())]
    return cells, list(dict.fromkeys(name for cell in cells for run in cell.runs.values() for name in run.protocols()))


def _logs_lines(grid: Grid) -> list[str]:
    """Return a table of the averages of published logs beside those of our runs, or nothing without logs."""
    logs = grid.logs
    if logs is None:
        return []
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
    return [*lines, ""]


def _window_mean(cell: GridCell, split: str, first: int, last: int, protocol: str | None = None) -> str:
    """Return the mean over seeds and the rows of some iterations with the number of seeds, or "–" without rows."""
    means = [mean_between(run, split, first, last, protocol) for run in cell.runs.values()]
    values = [mean for mean in means if mean is not None]
    return f"{fmean(values):.1f} ({len(values)})" if values else "–"


def _time_lines(grid: Grid) -> list[str]:
    """Return a table of the time until the final accuracy of the baseline is reached, or nothing without a baseline."""
    times = grid.times_to_baseline()
    if not times:
        return []
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
            f"{'Some seconds' if known else 'Seconds'} are left out: the ninth decile of the time per step of these "
            f"runs is more than {STEADY} times the first, as on cores that are shared with other work.",
        ]
    return [*lines, ""]


def _range(values: Sequence[float], digits: int) -> str:
    """Return mean, smallest and largest value, or "–" for none."""
    if not values:
        return "–"
    return "{:,.{d}f} ({:,.{d}f} to {:,.{d}f})".format(fmean(values), min(values), max(values), d=digits)


def _claim_line(verdict: Verdict) -> str:
    return f"- **{verdict.verdict}**: {markdown(verdict.claim.statement)}. {verdict.statistics}."


def _claims(grids: Sequence[Grid], level: str) -> list[str]:
    """Return a table per group of claims on grids with runs, or nothing for a single grid, which lists its claims."""
    if len(grids) < 2:
        return []
    judged = [(grid, judge(grid, claim)) for grid in grids if grid.has_runs for claim in grid.claims]
    verdicts = [(grid, verdict) for grid, verdict in judged if verdict.difference is not None]
    waiting = [verdict for _, verdict in judged if verdict.difference is None]
    tables = []
    for heading, group in GROUPS.items():
        chosen = [(grid, verdict) for grid, verdict in verdicts if verdict.verdict in group]
        lines = [f"{level} {heading} ({len(chosen)})", "", "| claim | difference | experiment |", "|---|---|---|"]
        for grid, verdict in chosen:
            lines.append(f"| {markdown(verdict.claim.statement)} | {_difference(verdict)} | {markdown(grid.id)} |")
        tables += ["\n".join(lines)] if chosen else []
    if waiting:
        lines = [f"{level} Claims whose runs are not complete ({len(waiting)})", ""]
        tables.append("\n".join([*lines, *(f"- {markdown(verdict.claim.statement)}" for verdict in waiting)]))
    return tables


def _difference(verdict: Verdict) -> str:
    """Return the difference with its interval and the number of seeds; for claims out of reach also the reason."""
    shown = f"{verdict.effect}, n = {verdict.seeds}"
    if verdict.unmet is None:
        return shown
    return f"out of reach, {shown}; requires {verdict.claim.requires}, reached {verdict.unmet:.1f} %"


def _missing_table(grids: Sequence[Grid]) -> str:
    """Return finished and planned runs of each grid, and the seeds that each cell lacks."""
    lines = ["| experiment | in complete cells | planned | missing |", "|---|---|---|---|"]
    for grid in grids:
        texts = [f"{name}: seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
                 for name, seeds in grid.missing().items()]  # fmt: skip
        missing = "; ".join(texts) or "none" if grid.has_runs else "all"
        counts = f"{sum(len(cell.runs) for cell in grid.cells)} | {sum(grid.seeds.values())}"
        lines.append(f"| {markdown(grid.id)} | {counts} | {markdown(missing)} |")
    return "\n".join(lines)
