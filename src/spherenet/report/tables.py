"""Tables of runs: rows for terminals, Markdown, and CSV for pandas and spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from spherenet._util.text import as_number, csv_cell, markdown
from spherenet.report.runs import Curve, ReportedRun, distinct_names

__all__ = [
    "COLUMNS",
    "NUMBERS",
    "PROTOCOLS",
    "SETTINGS",
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
        counts = [_integer((run.summary or {}).get("parameters")), curve.steps[-1]]
        rows.append([name, *map(str, settings), *counts, *numbers, as_number(run.rows[-1].get("seconds"))])
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS[:-1])
    writer.writerows([csv_cell(value) for value in row] for row in rows)
    return text.getvalue()


def _integer(value: Any) -> int | None:
    number = as_number(value)
    return None if number is None else int(number)
