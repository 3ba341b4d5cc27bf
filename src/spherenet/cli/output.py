"""Output of the verbs: valid JSON, messages on stderr, progress bars, and quiet handling of closed pipes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from spherenet.text import finite, plain

__all__ = ["discard_closed_streams", "print_json", "print_message", "progress_bar", "warn"]


def print_message(message: str) -> None:
    """Print a message on stderr; do nothing if stderr is closed."""
    with suppress(OSError, ValueError):
        print(plain(message), file=sys.stderr, flush=True)


def warn(message: str) -> None:
    """Print a warning on stderr."""
    print_message(f"warning: {message}")


def print_json(value: Any) -> None:
    """Print a value as JSON, with null for NaN and infinities, which JSON does not support."""
    print(json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False))


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
    """Yield a function `progress(done, total)` that draws a bar on stderr if that is a terminal.

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

    def progress(done: int, total: int) -> None:
        nonlocal task
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
