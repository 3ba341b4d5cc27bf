"""`spherenet report`: runs side by side, in the terminal and as a page."""

from __future__ import annotations

from argparse import Namespace

from spherenet.cli.parser import Parser

EXAMPLES = """\
  spherenet report runs/mnist5k-cnn-3-sigmoid runs/mnist5k-cnn-3-none
  spherenet report runs/* -o report.html --title "Digits" """


def parser() -> Parser:
    """Return the verb's parser."""
    made = Parser(
        "report",
        "Show runs side by side: a table here and, with -o, a page with interactive curves that\n"
        "opens offline. Runs that are still training are shown as far as they are.",
        examples=EXAMPLES,
    )
    made.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs")
    made.add_argument("-o", "--output", metavar="FILE", help="write a page (.html)")
    made.add_argument("--title", default="spherenet runs", metavar="TEXT", help="of the page and the table")
    return made


def run(arguments: Namespace) -> None:
    """Print the table and write the page."""
    if arguments.output is not None and not arguments.output.endswith(".html"):
        raise ValueError(f"--output must end in .html, got {arguments.output!r}.")
    from rich.console import Console
    from rich.table import Table

    from spherenet.report.runs import read_run
    from spherenet.report.table import COLUMNS, NUMBERS, SETTINGS, table_rows

    runs = [read_run(path) for path in arguments.runs]
    rows = table_rows(runs)
    # What all runs share stands above the table, which then fits into a terminal.
    shared = {name: row[0] for name, *row in zip(COLUMNS, *rows, strict=True) if name in SETTINGS and len({*row}) == 1}
    table = Table(title=f"{arguments.title}\n" + ", ".join(f"{name} {value}" for name, value in shared.items()))
    shown = [index for index, name in enumerate(COLUMNS) if name not in shared]
    for index in shown:
        table.add_column(COLUMNS[index], justify="right" if COLUMNS[index] in NUMBERS else "left")
    for row in rows:
        table.add_row(*(row[index] for index in shown))
    console = Console()
    console.print(table)
    if arguments.output is not None:
        from spherenet.report.page import write_page

        write_page(runs, arguments.output, arguments.title)
        console.print(f"The page with the curves: {arguments.output}", soft_wrap=True, highlight=False)
