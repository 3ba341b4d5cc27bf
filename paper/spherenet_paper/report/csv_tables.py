"""The runs of experiments as a CSV file, one row per run, for pandas and spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from spherenet.cli.plugin import as_number, csv_cell
from spherenet.report import ReportedRun
from spherenet_paper.report.grids import Grid, GridCell
from spherenet_paper.report.quantities import training_accuracy

__all__ = ["CELL_COLUMNS", "grids_as_csv"]

CELL_COLUMNS = (
    "experiment",
    "preset",
    "cell",
    "row",
    "column",
    "paper",
    "seed",
    "protocol",
    "iterations",
    "accuracy",
    "loss",
    "best_accuracy",
    "best_step",
    "training_accuracy",
    "parameters",
    "seconds",
    "peak_megabytes",
    "spherenet",
    "torch",
    "python",
    "processor",
    "run",
)
"""Columns of `grids_as_csv`. Accuracies are in percent; those without a prefix are of the last evaluation."""


def grids_as_csv(grids: Sequence[Grid]) -> str:
    """Return one row per finished run, or one per BatchNorm protocol if a run was evaluated with several."""
    rows = [
        row
        for grid in grids
        for cell in grid.cells
        for seed, run in cell.runs.items()
        for row in _rows_of_run(grid, cell, seed, run)
    ]
    return _csv(CELL_COLUMNS, rows)


def _rows_of_run(grid: Grid, cell: GridCell, seed: int, run: ReportedRun) -> Iterable[list[Any]]:
    summary = run.summary or {}
    names = [grid.id, grid.preset, cell.name, cell.row, cell.column, cell.paper]
    costs = [_integer(summary.get("parameters")), as_number(summary.get("seconds"))]
    versions, hardware = (value if isinstance(value := run.config.get(name), dict) else {}
                          for name in ("versions", "hardware"))  # fmt: skip
    machine = [*(versions.get(name) for name in ("spherenet", "torch", "python")), hardware.get("processor")]
    for protocol in run.protocols():
        accuracy, loss = run.curve("test", "accuracy", protocol), run.curve("test", "loss", protocol)
        if not accuracy.values:
            continue
        best = max(range(len(accuracy.values)), key=lambda index: accuracy.values[index])
        numbers = [
            accuracy.steps[-1],
            _percent(accuracy.values[-1]),
            loss.values[-1] if loss.values else None,
            _percent(accuracy.values[best]),
            accuracy.steps[best],
            round(training_accuracy(run), 4) if run.rows_of("train") else None,
        ]
        memory = _integer(summary.get("peak_megabytes"))
        yield [*names, seed, protocol, *numbers, *costs, memory, *map(_text, machine), run.path]


def _percent(fraction: float) -> float:
    return round(100 * fraction, 4)


def _integer(value: Any) -> int | None:
    number = as_number(value)
    return None if number is None else int(number)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _csv(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([csv_cell(value) for value in row] for row in rows)
    return text.getvalue()
