"""What the verbs print: JSON that every reader takes, sentences on stderr, and an end that no closed pipe spoils."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

from spherenet.text import finite, plain

__all__ = ["drop_closed", "print_json", "progress_bar", "say", "warn"]


def say(message: str, *, file: IO[str] | None = None) -> None:
    """Print a sentence on stderr, or drop it if nobody can read it any more: what was done counts, not who watches."""
    with suppress(OSError, ValueError):  # a closed pipe or terminal, a closed stream
        print(plain(message), file=file or sys.stderr, flush=True)


def warn(message: str) -> None:
    """Print a warning on stderr, where it does not mix with what is piped."""
    say(f"warning: {message}")


def print_json(value: Any) -> None:
    """Print a value as JSON; null stands for NaN and infinities, which JSON does not have."""
    print(json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False))


def drop_closed() -> bool:
    """Flush what was printed; True if whoever read it is gone. Python would print an error at its end otherwise."""
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
def progress_bar(what: str, *, in_bytes: bool) -> Iterator[Callable[[int, int], None]]:
    """Give a `progress(done, total)` that draws a bar on stderr from its first call on."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    amount = DownloadColumn() if in_bytes else MofNCompleteColumn()
    columns = TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn()
    console = Console(stderr=True)  # so that what is printed can be piped
    bars = Bars(*columns, console=console, transient=True)
    task: TaskID | None = None

    def progress(done: int, total: int) -> None:
        nonlocal task
        if task is None:
            task = bars.add_task(what)
            if console.is_terminal:
                bars.start()
        bars.update(task, completed=done, total=total)
        if done >= total and bars.live.is_started:
            bars.stop()  # the terminal is free for another bar

    try:
        yield progress
    finally:
        if bars.live.is_started:
            bars.stop()
