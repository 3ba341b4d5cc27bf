"""The table of runs, as rows of text: for a terminal, a page, Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from spherenet.report.runs import Curve, ReportedRun, distinct_names
from spherenet.text import as_number

__all__ = ["COLUMNS", "NUMBERS", "SETTINGS", "sparkline", "table_rows"]

SETTINGS = ("network", "operator", "loss", "parameters", "iterations")
COLUMNS = ("run", *SETTINGS, "accuracy", "best", "seconds", "curve")
NUMBERS = ("parameters", "iterations", "accuracy", "best", "seconds")


def sparkline(curve: Curve) -> str:
    """A curve as a word of bars, the lowest value the shortest."""
    if not curve.values:
        return ""
    low, high = min(curve.values), max(curve.values)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (value - low) / ((high - low) or 1))] for value in curve.values)


def table_rows(runs: Sequence[ReportedRun]) -> list[tuple[str, ...]]:
    """A row a run in the order of `COLUMNS`; accuracies in per cent, the curve is the test accuracy's."""
    return [_row(name, run) for name, run in zip(distinct_names(runs), runs, strict=True)]


def _row(name: str, run: ReportedRun) -> tuple[str, ...]:
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
