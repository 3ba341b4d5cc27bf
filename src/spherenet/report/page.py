"""A self-contained HTML page about runs: tables, statements and interactive curves, readable offline."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from math import degrees
from pathlib import Path
from typing import Any

from spherenet._util.atomic import atomic_file
from spherenet._util.text import plain
from spherenet.errors import require_extra
from spherenet.report.runs import Curve, ReportedRun, distinct_names, provenance
from spherenet.report.tables import COLUMNS, PROTOCOLS, protocol_rows, table_rows

__all__ = [
    "COLORS",
    "DASHES",
    "Line",
    "Plot",
    "Section",
    "Statement",
    "Table",
    "line_plot",
    "line_style",
    "section_of_runs",
    "write_page",
]

CURVES = (
    ("Test accuracy", "test", "accuracy"),
    ("Training loss", "train", "loss"),
    ("Training accuracy", "train", "accuracy"),
)
ANGLES = (
    ("Angle within classes, in degrees", "within_class_angle"),
    ("Angle between classes, in degrees", "between_class_angle"),
    ("Distance of class means from a simplex", "simplex_distance"),
)
"""Headings and keys of neural collapse on a sample of the test images; see `spherenet.neural_collapse`."""

COLORS = ("#0090ff", "#e5484d", "#30a46c", "#f76b15", "#8e4ec6", "#12a594", "#d6409f", "#978365", "#60646c", "#ffc53d")
DASHES = ("", "8 4", "2 3", "8 4 2 4", "14 5", "14 5 2 5")
"""Styles of lines: in a grid, the color depends on the row and the dash on the column. Both repeat."""


@dataclass(frozen=True)
class Table:
    """Column names and rows of (text, bold) cells. `heading` is shown if the table is folded."""

    heading: str
    columns: list[str]
    rows: list[list[tuple[str, bool]]]


@dataclass(frozen=True)
class Line:
    """A named line. `band` has the lower and the upper edge of a band at each x, or is empty."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    color: str
    dash: str = ""
    band: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class Plot:
    """Lines over shared axes, as curves.js draws them.

    Attributes:
        heading: Heading above the plot.
        lines: The lines.
        x_label: Name of the horizontal axis.
        y_label: Name of the vertical axis.
        percent: Whether the values are fractions to show in percent.
        names: Names of the positions 0, 1, 2 … on the horizontal axis, if it has no numbers.
    """

    heading: str
    lines: list[Line]
    x_label: str
    y_label: str
    percent: bool = False
    names: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the fields that curves.js reads."""
        lines = [{**asdict(line), "name": plain(line.name)} for line in self.lines]
        return {
            "heading": plain(self.heading),
            "lines": lines,
            "xLabel": self.x_label,
            "yLabel": self.y_label,
            "percent": self.percent,
            "names": list(self.names),
        }


@dataclass(frozen=True)
class Statement:
    """A statement about the runs, the verdict on it, e.g. "confirmed", its source and what the verdict rests on."""

    verdict: str
    text: str
    source: str
    basis: str


@dataclass
class Section:
    """A section of the page about some runs. `anchor` is the target of links."""

    title: str
    anchor: str
    text: str = ""
    table: Table | None = None
    details: Table | None = None
    statements: list[Statement] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)


def section_of_runs(runs: Sequence[ReportedRun]) -> Section:
    """Return a section that compares runs: a table, curves, and their commands."""
    names = distinct_names(runs)
    rows = [[(text, False) for text in row[:-1]] for row in table_rows(runs)]
    styles = [line_style(position) for position in range(len(runs))]
    plots = [
        line_plot(heading, names, [run.curve(split, quantity) for run in runs], styles, quantity)
        for heading, split, quantity in CURVES
    ]
    plots += _angle_plots(names, runs, styles)
    notes = [(name, provenance(run)) for name, run in zip(names, runs, strict=True)]
    section = Section("Runs", "runs", table=Table("", list(COLUMNS[:-1]), rows), plots=plots, notes=notes)
    if protocols := protocol_rows(runs):
        columns, *accuracies = protocols
        section.details = Table(PROTOCOLS, columns, [[(text, False) for text in row] for row in accuracies])
    return section


def line_style(color: int, dash: int = 0) -> tuple[str, str]:
    """Return color and dash of a line; numbers beyond those of `COLORS` and `DASHES` start again."""
    return COLORS[color % len(COLORS)], DASHES[dash % len(DASHES)]


def line_plot(
    heading: str, names: Sequence[str], curves: Sequence[Curve], styles: Sequence[tuple[str, str]], quantity: str
) -> Plot:
    """Return a plot of named curves; the values of the quantity "accuracy" are fractions, shown in percent."""
    lines = []
    for name, curve, style in zip(names, curves, styles, strict=True):
        points = [point for point in zip(curve.steps, curve.values, strict=True) if math.isfinite(point[1])]
        lines.append(Line(name, [step for step, _ in points], [value for _, value in points], *style))
    return Plot(heading, lines, "iterations", heading.split(",")[0].lower(), percent=quantity == "accuracy")


def _angle_plots(names: Sequence[str], runs: Sequence[ReportedRun], styles: Sequence[tuple[str, str]]) -> list[Plot]:
    """Return plots of the angles of classes over the iterations, or none if no run has measured them."""
    plots = []
    for heading, quantity in ANGLES:
        curves = [run.curve("probes", quantity) for run in runs]
        if quantity.endswith("angle"):
            curves = [Curve(curve.steps, [degrees(value) for value in curve.values]) for curve in curves]
        if any(curve.values for curve in curves):
            plots.append(line_plot(heading, names, curves, styles, quantity))
    return plots


def write_page(sections: Sequence[Section], path: str | Path, title: str) -> None:
    """Write sections as an HTML page. All text from run directories is escaped.

    Raises:
        MissingExtraError: jinja2 is not installed.
    """
    require_extra("report", "jinja2")
    from jinja2 import Environment

    source = files("spherenet.report")
    template = Environment(autoescape=True).from_string(source.joinpath("page.html.j2").read_text(encoding="utf-8"))
    plots = [plot.as_json() for section in sections for plot in section.plots]
    curves = source.joinpath("curves.js").read_text(encoding="utf-8")
    page = template.render(title=title, sections=sections, plots=_as_script(plots), curves=curves)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(target) as temporary:
        temporary.write_text(page, encoding="utf-8")


def _as_script(value: Any) -> str:
    """Return JSON for a script element, with the characters escaped that could end the element."""
    return json.dumps(value).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
