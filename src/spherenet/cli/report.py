"""The verbs that read runs: `report` compares them, `doctor` checks their files."""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from spherenet._util.text import plain
from spherenet.cli.option_types import add_option
from spherenet.cli.options import Parser, require_ending
from spherenet.cli.output import print_json, print_message, stdout_console
from spherenet.errors import RunError

if TYPE_CHECKING:
    from rich.table import Table

    from spherenet.report.runs import ReportedRun

__all__ = ["doctor_parser", "report_parser", "run_doctor", "run_report"]


def report_parser() -> Parser:
    """Return the parser of `spherenet report`."""
    parser = Parser(
        "report",
        "Compare runs: a table in the terminal and, with --output, an HTML page with interactive curves\n"
        "that opens offline. Folders that are no runs are named and left out; so are runs that cannot be\n"
        "read (exit code 1).",
        examples="""\
  spherenet report runs/mnist5k-cnn-3-cosine runs/mnist5k-cnn-3-none
  spherenet report runs/* -o report.html --title Digits
  spherenet report runs/* --markdown runs.md --csv runs.csv""",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs")
    add_option(parser, "-o", "--output", metavar="FILE", help="HTML page to write (.html)")
    add_option(parser, "--markdown", metavar="FILE", help="Markdown file to write the tables to")
    add_option(parser, "--csv", metavar="FILE", help="CSV file to write, one row per run")
    add_option(parser, "--title", default="spherenet runs", metavar="TEXT", help="title of the page and the table")
    return parser


def run_report(arguments: Namespace) -> int:
    """Print tables, write the requested files and return the exit code."""
    for option, ending in (("output", ".html"), ("markdown", ".md"), ("csv", ".csv")):
        require_ending(f"--{option}", getattr(arguments, option), ending)
    from spherenet._util.atomic import write_text
    from spherenet._util.text import markdown
    from spherenet.report import runs_as_csv
    from spherenet.report.page import section_of_runs, write_page
    from spherenet.report.tables import protocol_rows, runs_as_markdown

    runs, problems, others = _read_runs(arguments.runs)
    if not runs:
        raise RunError((problems or others)[0])
    console = stdout_console()
    console.print(_table_of_runs(runs, arguments.title))
    if rows := protocol_rows(runs):
        console.print(_table_of_protocols(rows))
    if arguments.output is not None:
        write_page([section_of_runs(runs)], arguments.output, arguments.title)
        console.print(f"Page with curves: {plain(arguments.output)}", soft_wrap=True, highlight=False, markup=False)
    if arguments.markdown is not None:
        write_text(Path(arguments.markdown), f"# {markdown(arguments.title)}\n\n{runs_as_markdown(runs)}")
    if arguments.csv is not None:
        write_text(Path(arguments.csv), runs_as_csv(runs))
    for problem in (*others, *problems):
        print_message(f"spherenet report: {problem}")
    return 1 if problems else 0


def _read_runs(paths: list[str]) -> tuple[list[ReportedRun], list[str], list[str]]:
    """Return the runs among paths, an error message for each that cannot be read, and one for each other path.

    A pattern such as runs/* also matches files and folders that are no runs, which is not an error.
    """
    from spherenet.report.runs import read_run

    runs: list[ReportedRun] = []
    problems: list[str] = []
    others: list[str] = []
    for path in paths:
        try:
            if os.path.exists(path) and not os.path.lexists(os.path.join(path, "config.json")):
                others.append(f"{path} is not a run: it has no config.json.")
                continue
            runs.append(read_run(path))
        except RunError as error:
            problems.append(str(error))
    return runs, problems, others


def _table_of_runs(runs: list[ReportedRun], title: str) -> Table:
    """Return a table of runs; settings that all runs share are in its title, so that it fits into a terminal."""
    from rich.table import Table
    from rich.text import Text

    from spherenet.report.tables import COLUMNS, NUMBERS, SETTINGS, table_rows

    rows = table_rows(runs)
    shared = {name: row[0] for name, *row in zip(COLUMNS, *rows, strict=True) if name in SETTINGS and len({*row}) == 1}
    heading = ", ".join(f"{name} {plain(value)}" for name, value in shared.items())
    table = Table(title=Text(f"{plain(title)}\n{heading}"))
    shown = [index for index, name in enumerate(COLUMNS) if name not in shared]
    for index in shown:
        table.add_column(COLUMNS[index], justify="right" if COLUMNS[index] in NUMBERS else "left")
    for row in rows:
        table.add_row(*(Text(plain(row[index])) for index in shown))
    return table


def _table_of_protocols(rows: list[list[str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    from spherenet.report.tables import PROTOCOLS

    table = Table(title=PROTOCOLS)
    for index, name in enumerate(rows[0]):
        table.add_column(Text(plain(name)), justify="right" if index else "left")
    for row in rows[1:]:
        table.add_row(*(Text(plain(cell)) for cell in row))
    return table


def doctor_parser() -> Parser:
    """Return the parser of `spherenet doctor`."""
    parser = Parser(
        "doctor",
        "Read every file of a run, compare checkpoints with their checksums and list what is valid and\n"
        "what is corrupt. Nothing is changed. Exit code 1 if a file is corrupt.",
        examples="""\
  spherenet doctor runs/cifar10-cnn-9-cosine
  spherenet doctor runs/cifar10-cnn-9-cosine --json""",
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    return parser


def run_doctor(arguments: Namespace) -> int:
    """Check the files of a run, print the findings and return the exit code."""
    from spherenet.runs.directory import examine

    findings = examine(arguments.run)
    if arguments.json:
        print_json([asdict(finding) for finding in findings])
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            print(plain(f"{'ok ' if finding.valid else 'BAD'}  {finding.name:<{width}}  {finding.message}"))
    return 0 if all(finding.valid for finding in findings) else 1
