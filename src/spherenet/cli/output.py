"""Output of the verbs: valid JSON, messages, closed pipes, and the progress of a training run in terminals and logs."""

from __future__ import annotations

import codecs
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partialmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spherenet._util.text import finite, plain
from spherenet.cli.progress import EVALUATED, Clock, Estimate, LogLines, Speed, evaluation_text
from spherenet.errors import require_extra
from spherenet.training import Reporter

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

__all__ = [
    "Reporters",
    "TensorBoard",
    "discard_closed_streams",
    "open_closed_streams",
    "print_json",
    "print_message",
    "progress_bar",
    "stdout_console",
    "terminal_reporter",
    "text_width",
    "use_available_characters",
    "warn",
]


PIPE_WIDTH = 400
"""Width of tables that are not for a terminal. Tables are only as wide as their content."""

LONGEST_WORD = 30
"""Longer words in tables, such as names of files, are divided between lines if they do not fit the terminal."""

REPLACEMENTS = {
    "–": "-", "−": "-", "…": "...", "·": ".", "×": "x", "±": "+-", "≤": "<=", "≥": ">=", "→": "->", "‖": "||", "ᵀ": "'",
    "²": "^2", "³": "^3", "√": "sqrt", "λ": "lambda", "θ": "theta", "π": "pi", "ψ": "psi", "ρ": "rho", "α": "alpha",
    "β": "beta", "γ": "gamma", "σ": "sigma", "μ": "mu", "µ": "u", "°": " degrees",
    **dict(zip("▁▂▃▄▅▆▇█", "_.-=+*#@", strict=True)),
}  # fmt: skip
"""Text for characters that the encoding of a terminal lacks."""


def _replace_unavailable(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(REPLACEMENTS.get(character, "?") for character in text), error.end


def use_available_characters() -> None:
    """Let stdout and stderr replace characters that their encoding lacks, such as ASCII in a minimal terminal."""
    codecs.register_error("spherenet", _replace_unavailable)
    for stream in (sys.stdout, sys.stderr):
        encoding = getattr(stream, "encoding", None) or "utf-8"
        if not encoding.lower().replace("_", "-").startswith("utf") and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="spherenet")


def print_message(message: str) -> None:
    """Print a message on stderr; do nothing if stderr is closed."""
    with suppress(OSError, ValueError):
        print(plain(message), file=sys.stderr, flush=True)


def warn(message: str) -> None:
    """Print a warning on stderr."""
    print_message(f"warning: {message}")


def print_json(value: Any) -> None:
    """Print a value as JSON, with null for NaN and infinities, which JSON does not support."""
    text = json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:  # a terminal of another encoding, or half of a surrogate pair from a file
        text = json.dumps(finite(value), indent=2, allow_nan=False)
    print(text)


def open_closed_streams() -> None:
    """Open the null device in place of stdout and stderr that were closed before the program started."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - open to the end


def text_width(console: Console) -> int:
    """Return the width for text and for tables that can be divided: that of the terminal, or 80 in pipes and files."""
    return min(console.width, 80) if console.width == PIPE_WIDTH else console.width


def stdout_console() -> Console:
    """Return the console for tables on stdout. In a pipe or a file lines may have any length.

    A table is at least as wide as its longest words and numbers require, because rich would cut them in a narrow
    terminal. A closed pipe raises BrokenPipeError, as it does for `print`.
    """
    from rich.console import Console
    from rich.table import Table

    class StdoutConsole(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            for table in objects:
                if isinstance(table, Table):
                    self.width = max(self.width, _fit_columns(table, self))
            super().print(*objects, **options)

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    is_sized = sys.stdout.isatty() or "COLUMNS" in os.environ
    return StdoutConsole(width=None if is_sized else PIPE_WIDTH)


def _fit_columns(table: Table, console: Console) -> int:
    """Set the widths of the columns to fit the console without cutting words or numbers; return the width needed."""
    from rich.measure import measure_renderables

    unlimited = console.options.update_width(PIPE_WIDTH)
    ranges = []
    for column in table.columns:
        cells = measure_renderables(console, unlimited, [*column.cells] or [""])
        header = measure_renderables(console, unlimited, [column.header])
        is_text = not (column.no_wrap or column.justify == "right")
        words = min(cells.minimum, LONGEST_WORD) if is_text else cells.maximum
        if is_text:
            column.overflow = "fold"
        ranges.append((max(words, header.minimum), max(cells.maximum, header.maximum)))
    needed = 1 + sum(shortest + len("  |") for shortest, _ in ranges)
    spare = max(console.width - needed, 0)
    if sum(longest - shortest for shortest, longest in ranges) > spare:
        # The longest text is wrapped first.
        for column, (shortest, longest) in sorted(
            zip(table.columns, ranges, strict=True), key=lambda pair: pair[1][1] - pair[1][0]
        ):
            more = min(longest - shortest, spare)
            column.width, spare = shortest + more, spare - more
    return needed


def discard_closed_streams() -> bool:
    """Flush stdout and stderr and return whether one of them is closed.

    A closed stream is redirected to the null device; otherwise Python would print an error when it exits.
    """
    closed = False
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            closed = True
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return closed


@contextmanager
def progress_bar(description: str, *, in_bytes: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Yield a function `progress(done, total)` that draws a bar on stderr, or lines if that is not a terminal.

    Args:
        description: Text before the bar.
        in_bytes: Whether the amounts are bytes of a download.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    amount = DownloadColumn() if in_bytes else MofNCompleteColumn()
    columns = TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn()
    console = Console(stderr=True)  # stdout may be piped
    bars = Bars(*columns, console=console, transient=True)
    task: TaskID | None = None
    clock = Clock()

    def progress(done: int, total: int) -> None:
        nonlocal task
        if not console.is_terminal and clock.is_due():
            amounts = f"{done / 1e6:.0f} of {total / 1e6:.0f} MB" if in_bytes else f"{done:,} of {total:,}"
            print_message(f"{description}: {amounts}")
        if task is None:
            task = bars.add_task(description)
            if console.is_terminal:
                bars.start()
        bars.update(task, completed=done, total=total)
        if done >= total and bars.live.is_started:
            bars.stop()  # only one bar can be live at a time

    try:
        yield progress
    finally:
        if bars.live.is_started:
            bars.stop()


def terminal_reporter(title: str) -> Reporter:
    """Return a progress bar if stderr is a terminal, else a reporter that prints lines to stderr."""
    return ProgressBar(title) if sys.stderr.isatty() else LogLines(title)


class ProgressBar(Reporter):
    """Progress bar with loss, accuracy, steps per second and remaining time. Evaluations are printed above it."""

    def __init__(self, title: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._title = title
        self._bar: Progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._speed, self._estimate = Speed(), Estimate()
        self._loss = self._accuracy = 0.0

    def described(self, description: Mapping[str, Any], parameters: int, folder: Path) -> None:
        """Print what is trained above the bar."""
        from spherenet.cli.run_text import aligned, header_rows

        for line in aligned(header_rows(description, parameters, folder)):
            self._bar.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def started(self, step: int, iterations: int) -> None:
        """Show the bar."""
        self._task = self._bar.add_task(self._title, total=iterations, completed=step, numbers="")
        self._bar.start()
        self._estimate.start(step, iterations)

    def stepped(self, step: int, loss: float, accuracy: float) -> None:
        """Update the bar. Loss and accuracy are running means over about twenty steps."""
        first = self._loss == 0 or math.isnan(self._loss)
        self._loss = loss if first else 0.95 * self._loss + 0.05 * loss
        self._accuracy = accuracy if first else 0.95 * self._accuracy + 0.05 * accuracy
        speed = self._speed.update(step)
        numbers = f"loss {self._loss:.3f}  accuracy {self._accuracy:.1%}  {speed:.1f} it/s"
        self._bar.update(self._task, completed=step, numbers=numbers)
        if estimate := self._estimate.after(step):
            self._bar.console.print(f"{self._title}  {estimate}", highlight=False)

    def logged(self, row: Mapping[str, Any]) -> None:
        """Print evaluations above the bar."""
        if row["split"] in EVALUATED:
            self._bar.console.print(f"{self._title}  {evaluation_text(row)}", highlight=False)

    def warned(self, message: str) -> None:
        """Print a warning above the bar."""
        from rich.markup import escape

        self._bar.console.print(f"[yellow]warning:[/yellow] {escape(plain(message))}", highlight=False)

    def finished(self) -> None:
        """Remove the bar."""
        self._bar.stop()


class TensorBoard(Reporter):
    """Write the numbers of each row as TensorBoard scalars.

    Args:
        folder: Folder of the TensorBoard files. It is created with the first row.

    Raises:
        ValueError: If the package tensorboard is not installed.
    """

    def __init__(self, folder: str) -> None:
        require_extra("tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._open: Callable[[], Any] = lambda: SummaryWriter(folder)
        self._writer: Any = None

    def logged(self, row: Mapping[str, Any]) -> None:
        """Write a row."""
        if self._writer is None:
            self._writer = self._open()
        protocol = row.get("protocol", "running")
        group = row["split"] if protocol == "running" else f"{row['split']}-{protocol}"
        for name, value in row.items():
            if isinstance(value, float):
                self._writer.add_scalar(f"{group}/{name}", value, row["step"])

    def finished(self) -> None:
        """Close the files."""
        if self._writer is not None:
            self._writer.close()


class Reporters(Reporter):
    """Several reporters as one. A reporter that fails, e.g. on a closed terminal, is dropped and the run continues."""

    def __init__(self, reporters: Sequence[Reporter]) -> None:
        self._reporters = list(reporters)

    def _report(self, event: str, *arguments: Any) -> None:
        """Call a method of all reporters."""
        for reporter in list(self._reporters):
            try:
                getattr(reporter, event)(*arguments)
            except (OSError, ValueError) as error:
                self._reporters.remove(reporter)
                self._report("warned", f"{type(reporter).__name__} is dropped ({error}).")

    described = partialmethod(_report, "described")
    started = partialmethod(_report, "started")
    stepped = partialmethod(_report, "stepped")
    evaluating = partialmethod(_report, "evaluating")
    logged = partialmethod(_report, "logged")
    warned = partialmethod(_report, "warned")
    finished = partialmethod(_report, "finished")
