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
    from spherenet.report.table import COLUMNS, table_rows

    runs = [read_run(path) for path in arguments.runs]
    table = Table(title=arguments.title)
    for column in COLUMNS:
        table.add_column(column, justify="right" if column in COLUMNS[4:-1] else "left")
    for row in table_rows(runs):
        table.add_row(*row)
    console = Console()
    console.print(table)
    if arguments.output is not None:
        from spherenet.report.page import write_page

        write_page(runs, arguments.output, arguments.title)
        console.print(f"The page with the curves: {arguments.output}", soft_wrap=True, highlight=False)
