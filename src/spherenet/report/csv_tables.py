"""Runs as a CSV file, one row per run, for pandas and spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from spherenet._util.text import as_number, csv_cell
from spherenet.report.runs import ReportedRun, distinct_names
from spherenet.report.tables import COLUMNS

__all__ = ["runs_as_csv"]


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
