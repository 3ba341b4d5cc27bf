"""What a person sees of a long run: a live line in a terminal, plain lines in a log."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from spherenet.text import plain
from spherenet.training import Reporter

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["Reporters", "TensorBoard", "reporter_for_people"]


def reporter_for_people(what: str) -> Reporter:
    """A live line on stderr where that is a terminal, else plain lines there."""
    return LiveLine(what) if sys.stderr.isatty() else PlainLines(what)


def _evaluation(row: Mapping[str, Any]) -> str:
    return f"step {row['step']}: test accuracy {row['accuracy']:.2%}, loss {row['loss']:.4f} ({row['seconds']:.0f} s)"


class LiveLine(Reporter):
    """A bar with loss, accuracy, steps a second and the time that is left; evaluations stay above it."""

    def __init__(self, what: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._what = what
        self._bar: Progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._speed = _Speed()
        self._loss = self._accuracy = 0.0

    def started(self, step: int, iterations: int) -> None:
        """Show the bar."""
        self._task = self._bar.add_task(self._what, total=iterations, completed=step, numbers="")
        self._bar.start()

    def stepped(self, step: int, loss: float, accuracy: float) -> None:
        """Move the bar; the numbers are running means over some twenty steps."""
        first = self._loss == 0 or math.isnan(self._loss)
        self._loss = loss if first else 0.95 * self._loss + 0.05 * loss
        self._accuracy = accuracy if first else 0.95 * self._accuracy + 0.05 * accuracy
        speed = self._speed.at(step)
        numbers = f"loss {self._loss:.3f}  accuracy {self._accuracy:.1%}  {speed:.1f} it/s"
        self._bar.update(self._task, completed=step, numbers=numbers)

    def logged(self, row: Mapping[str, Any]) -> None:
        """Keep evaluations in sight."""
        if row["split"] == "test":
            self._bar.console.print(f"{self._what}  {_evaluation(row)}", highlight=False)

    def warned(self, message: str) -> None:
        """Print above the bar."""
        from rich.markup import escape

        self._bar.console.print(f"[yellow]warning:[/yellow] {escape(plain(message))}", highlight=False)

    def finished(self) -> None:
        """Take the bar away."""
        self._bar.stop()


class PlainLines(Reporter):
    """One line for each row of numbers, with the steps a second and the time that is left."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._speed = _Speed()

    def started(self, step: int, iterations: int) -> None:
        """Say where it begins."""
        self._iterations = iterations
        self._print(f"training from step {step} to {iterations}")

    def stepped(self, step: int, loss: float, accuracy: float) -> None:
        """Measure the speed."""
        self._speed.at(step)

    def logged(self, row: Mapping[str, Any]) -> None:
        """Print training and test numbers."""
        if row["split"] == "train":
            left = (self._iterations - row["step"]) / self._speed.now if self._speed.now else 0
            self._print(
                f"step {row['step']}/{self._iterations}: loss {row['loss']:.4f}, accuracy {row['accuracy']:.2%}, "
                f"{self._speed.now:.2f} it/s, {left:.0f} s left"
            )
        elif row["split"] == "test":
            self._print(_evaluation(row))

    def warned(self, message: str) -> None:
        """Print it as a line."""
        self._print(f"warning: {plain(message)}")

    def _print(self, line: str) -> None:
        print(f"{self._what}  {line}", file=sys.stderr, flush=True)


class _Speed:
    """Steps a second over the last half minute or so."""

    def __init__(self) -> None:
        self.now = 0.0
        self._seen: list[tuple[float, int]] = []

    def at(self, step: int) -> float:
        self._seen.append((time.monotonic(), step))
        while len(self._seen) > 2 and self._seen[-1][0] - self._seen[0][0] > 30:
            self._seen.pop(0)
        (began, first), (ended, last) = self._seen[0], self._seen[-1]
        self.now = (last - first) / (ended - began) if ended > began else 0.0
        return self.now


class TensorBoard(Reporter):
    """Writes every row's numbers as TensorBoard scalars."""

    def __init__(self, folder: str) -> None:
        """ValueError where tensorboard is not installed."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError(
                "--tensorboard needs the package tensorboard: pip install 'spherenet[tensorboard]'."
            ) from None
        self._open: Callable[[], Any] = lambda: SummaryWriter(folder)
        self._writer: Any = None

    def logged(self, row: Mapping[str, Any]) -> None:
        """Write the row; the folder is made with the first."""
        if self._writer is None:
            self._writer = self._open()
        for name, value in row.items():
            if isinstance(value, float):
                self._writer.add_scalar(f"{row['split']}/{name}", value, row["step"])

    def finished(self) -> None:
        """Bring everything to the disk."""
        if self._writer is not None:
            self._writer.close()


class Reporters(Reporter):
    """Several listeners as one. One that fails, as on a closed pipe or terminal, is dropped; the run is worth more."""

    def __init__(self, reporters: Sequence[Reporter]) -> None:
        self._reporters = list(reporters)

    def started(self, step: int, iterations: int) -> None:
        """Pass it on."""
        self._tell(lambda reporter: reporter.started(step, iterations))

    def stepped(self, step: int, loss: float, accuracy: float) -> None:
        """Pass it on."""
        self._tell(lambda reporter: reporter.stepped(step, loss, accuracy))

    def logged(self, row: Mapping[str, Any]) -> None:
        """Pass it on."""
        self._tell(lambda reporter: reporter.logged(row))

    def warned(self, message: str) -> None:
        """Pass it on."""
        self._tell(lambda reporter: reporter.warned(message))

    def finished(self) -> None:
        """Pass it on."""
        self._tell(lambda reporter: reporter.finished())

    def _tell(self, tell: Callable[[Reporter], None]) -> None:
        for reporter in list(self._reporters):
            try:
                tell(reporter)
            except (OSError, ValueError) as error:
                self._reporters.remove(reporter)
                self.warned(f"{type(reporter).__name__} is dropped ({error}).")
