"""Tables, plots and HTML pages about runs."""

from spherenet.report.page import (
    COLORS,
    DASHES,
    Line,
    Plot,
    Section,
    Statement,
    Table,
    line_plot,
    line_style,
    section_of_runs,
    write_page,
)
from spherenet.report.runs import Curve, ReportedRun, command_and_details, distinct_names, provenance, read_run
from spherenet.report.tables import runs_as_csv, runs_as_markdown, table_rows

__all__ = [
    "COLORS",
    "DASHES",
    "Curve",
    "Line",
    "Plot",
    "ReportedRun",
    "Section",
    "Statement",
    "Table",
    "command_and_details",
    "distinct_names",
    "line_plot",
    "line_style",
    "provenance",
    "read_run",
    "runs_as_csv",
    "runs_as_markdown",
    "section_of_runs",
    "table_rows",
    "write_page",
]
