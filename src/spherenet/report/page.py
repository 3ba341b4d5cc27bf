"""One self-contained page about runs: table and interactive curves; it opens offline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from spherenet.report.runs import ReportedRun, distinct_names
from spherenet.report.table import COLUMNS, table_rows

__all__ = ["write_page"]

CURVES = (
    ("Test accuracy", "test", "accuracy"),
    ("Training loss", "train", "loss"),
    ("Training accuracy", "train", "accuracy"),
)


def write_page(runs: Sequence[ReportedRun], path: str | Path, title: str) -> None:
    """Write the page of some runs; whatever their folders say is shown as text, never run."""
    from jinja2 import Environment
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

    template = Environment(autoescape=True).from_string(
        files("spherenet.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    )
    names = distinct_names(runs)
    page = template.render(
        title=title,
        columns=COLUMNS[:-1],
        rows=[row[:-1] for row in table_rows(runs)],
        plots=_embedded([_plot(heading, split, quantity, runs, names) for heading, split, quantity in CURVES]),
        headings=[heading for heading, _, _ in CURVES],
        runs=[(name, " ".join(_command(run)), _versions(run)) for name, run in zip(names, runs, strict=True)],
        plotly=get_plotlyjs(),
    )
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page, encoding="utf-8")


def _plot(heading: str, split: str, quantity: str, runs: Sequence[ReportedRun], names: list[str]) -> dict[str, Any]:
    curves = [run.curve(split, quantity) for run in runs]
    share = quantity == "accuracy"
    return {
        "data": [
            {
                "x": curve.steps,
                "y": curve.values,
                "name": name,
                "mode": "lines+markers",
                "hovertemplate": "%{y:.2%}" if share else "%{y:.4f}",
            }
            for name, curve in zip(names, curves, strict=True)
        ],
        "layout": {
            "xaxis": {"title": {"text": "iterations"}, "rangemode": "tozero"},
            "yaxis": {"title": {"text": heading.lower()}, "tickformat": ".0%" if share else ""},
        },
    }


def _embedded(value: Any) -> str:
    """JSON inside a script element: no character of it can end the element."""
    return json.dumps(value).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _command(run: ReportedRun) -> list[str]:
    command = run.config.get("command")
    return [str(part) for part in command] if isinstance(command, list) else []


def _versions(run: ReportedRun) -> str:
    parts = {**_dict(run.config.get("versions")), **_dict(run.config.get("hardware"))}
    return ", ".join(f"{name} {value}" for name, value in parts.items())


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
