"""`spherenet report`: runs side by side, in the terminal and as a page."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from spherenet.cli.options import Parser
from spherenet.cli.output import say
from spherenet.errors import RunError
from spherenet.text import plain

if TYPE_CHECKING:
    from rich.table import Table

    from spherenet.report.grids import Grid
    from spherenet.report.runs import ReportedRun

EXAMPLES = """\
  spherenet report runs/mnist5k-cnn-3-sigmoid runs/mnist5k-cnn-3-none
  spherenet report runs/* -o report.html --title Digits
  spherenet report results/cpu/* -o report.html --markdown results.md --csv results.csv"""


def parser() -> Parser:
    """Return the verb's parser."""
    made = Parser(
        "report",
        "Show runs side by side, or experiments beside the paper's numbers: tables here and, with -o,\n"
        "a page with interactive curves that opens offline. What cannot be read is said and left out.",
        examples=EXAMPLES,
    )
    made.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs, or of experiments that reproduce made")
    made.add_argument("-o", "--output", metavar="FILE", help="write a page (.html)")
    made.add_argument("--markdown", metavar="FILE", help="write the tables and claims of experiments as Markdown")
    made.add_argument("--csv", metavar="FILE", help="write the cells of experiments as CSV")
    made.add_argument("--title", default="spherenet runs", metavar="TEXT", help="of the page and the table")
    return made


def run(arguments: Namespace) -> int:
    """Print tables and write what was asked for; code 1 where something had to be left out."""
    if arguments.output is not None and not arguments.output.endswith(".html"):
        raise ValueError(f"--output must end in .html, got {arguments.output!r}.")
    from rich.console import Console

    from spherenet.files import write_text
    from spherenet.report.tables import as_csv, markdown_page, paper_table

    runs, grids, complaints = _read(arguments.runs)
    if not runs and not grids:
        raise RunError(complaints[0])
    console = Console()
    if runs:
        console.print(_table_of_runs(runs, arguments.title))
    for grid in grids:
        console.print(paper_table(grid))
    if arguments.output is not None:
        from spherenet.report.page import section_of_grid, section_of_runs, write_page

        sections = [section_of_grid(grid) for grid in grids] + ([section_of_runs(runs)] if runs else [])
        write_page(sections, arguments.output, arguments.title)
        where = plain(arguments.output)
        console.print(f"The page with the curves: {where}", soft_wrap=True, highlight=False, markup=False)
    if arguments.markdown is not None:
        write_text(Path(arguments.markdown), markdown_page(grids, arguments.title))
    if arguments.csv is not None:
        if not grids:
            raise RunError("--csv must be given with a folder of an experiment, got runs only.")
        tables = [as_csv(grid).split("\n", 1) for grid in grids]
        write_text(Path(arguments.csv), "".join([f"{tables[0][0]}\n", *(rows for _, rows in tables)]))
    for complaint in complaints:
        say(f"spherenet report: {complaint}")
    return 1 if complaints else 0


def _read(paths: list[str]) -> tuple[list[ReportedRun], list[Grid], list[str]]:
    """The runs and experiments among some folders, and a sentence about each that is neither or does not fit."""
    from spherenet.report.grids import is_grid, read_grid
    from spherenet.report.runs import read_run

    runs: list[ReportedRun] = []
    grids: list[Grid] = []
    complaints: list[str] = []
    for path in paths:
        try:
            if not is_grid(path):
                runs.append(read_run(path))
                continue
            grid = read_grid(path)
            if grids and grid.preset != grids[0].preset:
                raise RunError(f"{path} is of the preset {grid.preset}, not {grids[0].preset} as the others.")
            grids.append(grid)
        except RunError as error:
            complaints.append(str(error))
    return runs, grids, complaints


def _table_of_runs(runs: list[ReportedRun], title: str) -> Table:
    from rich.table import Table
    from rich.text import Text

    from spherenet.report.tables import COLUMNS, NUMBERS, SETTINGS, table_rows

    rows = table_rows(runs)
    # What all runs share stands above the table, which then fits into a terminal.
    shared = {name: row[0] for name, *row in zip(COLUMNS, *rows, strict=True) if name in SETTINGS and len({*row}) == 1}
    heading = ", ".join(f"{name} {plain(value)}" for name, value in shared.items())
    table = Table(title=Text(f"{plain(title)}\n{heading}"))
    shown = [index for index, name in enumerate(COLUMNS) if name not in shared]
    for index in shown:
        table.add_column(COLUMNS[index], justify="right" if COLUMNS[index] in NUMBERS else "left")
    for row in rows:
        table.add_row(*(Text(plain(row[index])) for index in shown))
    return table
