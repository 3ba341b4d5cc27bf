"""A progress bar for whatever says how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress_bar"]


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
