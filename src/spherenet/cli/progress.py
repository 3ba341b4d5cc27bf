"""Progress of a run as lines of a log: rows of metrics, a sign of life at least every 30 seconds, an estimate."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spherenet._util.text import plain
from spherenet.training import Reporter

__all__ = ["EVALUATED", "Clock", "Estimate", "LogLines", "Speed", "duration", "evaluation_text"]

SILENCE = 30.0
"""Longest time without a line in seconds, unless a single step or batch takes longer."""

SHORT_RUN = 60.0
"""Duration of runs in seconds that are not estimated."""

EVALUATED = ("test", "validation")
"""Splits whose rows of metrics are printed."""


def evaluation_text(row: Mapping[str, Any]) -> str:
    """Return the line of an evaluation."""
    protocol = row.get("protocol", "running")
    statistics = "" if protocol == "running" else f" with {plain(protocol)} statistics"
    numbers = f"{row['split']} accuracy {row['accuracy']:.2%}{_balanced(row)}, loss {row['loss']:.4f}"
    return f"step {row['step']}{statistics}: {numbers} ({row['seconds']:.0f} s)"


def _balanced(row: Mapping[str, Any]) -> str:
    """Return the balanced accuracy of a row if it differs from the accuracy, as it does if classes differ in size."""
    balanced = row.get("balanced_accuracy", row["accuracy"])
    return "" if f"{balanced:.2%}" == f"{row['accuracy']:.2%}" else f" (balanced {balanced:.2%})"


def duration(seconds: float) -> str:
    """Return a duration for people: 45 s, 12 min, 3 h 20 min, 2 d 4 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"


class Clock:
    """Tells when nothing has been printed for `SILENCE` seconds."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def reset(self) -> None:
        """Record that something was printed."""
        self._last = time.monotonic()

    def is_due(self) -> bool:
        """Return whether it is time for a line; the next one is due after as many seconds."""
        due = time.monotonic() - self._last >= SILENCE
        if due:
            self.reset()
        return due


class Estimate:
    """Estimates the duration of a run from its first steps.

    The first step is slower than others: caches are empty, and code is compiled. Two further ones are measured.
    """

    STEPS = 3

    def start(self, step: int, iterations: int) -> None:
        """Record that the run starts after `step` of `iterations`."""
        self._first, self._iterations, self._start = step, iterations, time.monotonic()

    def after(self, step: int) -> str | None:
        """Return a sentence after the third step, or None: at other steps, and for a short run."""
        if step == self._first + 1:
            self._start = time.monotonic()
        if step != self._first + self.STEPS:
            return None
        per_step = (time.monotonic() - self._start) / (self.STEPS - 1)
        remaining = per_step * (self._iterations - step)
        if remaining < SHORT_RUN:
            return None
        return f"about {duration(remaining)} left at {per_step:.2g} s per step, without evaluations"


class LogLines(Reporter):
    """One line per row of metrics, with steps per second and remaining time, and lines in between if rows are rare."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._speed, self._clock, self._estimate = Speed(), Clock(), Estimate()

    def described(self, description: Mapping[str, Any], parameters: int, folder: Path) -> None:
        """Print what is trained."""
        from spherenet.cli.run_text import header_rows

        for label, text in header_rows(description, parameters, folder):
            self._print(f"{label}: {text}")

    def started(self, step: int, iterations: int) -> None:
        """Print the first and last step."""
        self._iterations = iterations
        self._speed.update(step)
        self._estimate.start(step, iterations)
        self._print(f"training from step {step} to {iterations}")

    def stepped(self, step: int, loss: float, accuracy: float) -> None:
        """Print an estimate after the first steps, and a line if there was none for some time."""
        if estimate := self._estimate.after(step):
            self._print(estimate)
        elif self._clock.is_due():
            self._print(f"step {step}/{self._iterations}{self._pace(step)}")

    def evaluating(self, done: int, total: int) -> None:
        """Print a line if there was none for some time."""
        if self._clock.is_due():
            self._print(f"evaluating: {done:,} of {total:,} images")

    def logged(self, row: Mapping[str, Any]) -> None:
        """Print training and test metrics."""
        if row["split"] == "train":
            numbers = f"loss {row['loss']:.4f}, accuracy {row['accuracy']:.2%}"
            self._print(f"step {row['step']}/{self._iterations}: {numbers}{self._pace(row['step'])}")
        elif row["split"] in EVALUATED:
            self._print(evaluation_text(row))

    def warned(self, message: str) -> None:
        """Print a warning."""
        self._print(f"warning: {plain(message)}")

    def _pace(self, step: int) -> str:
        speed = self._speed.update(step)
        remaining = (self._iterations - step) / speed if speed else 0.0
        return f", {speed:.2f} it/s, {duration(remaining)} left"

    def _print(self, line: str) -> None:
        self._clock.reset()
        print(f"{self._title}  {line}", file=sys.stderr, flush=True)


class Speed:
    """Steps per second over about the last 30 seconds."""

    def __init__(self) -> None:
        self._history: list[tuple[float, int]] = []

    def update(self, step: int) -> float:
        """Record that a step is done and return the speed, 0 if it is unknown."""
        history = self._history
        if not history or history[-1][1] != step:  # a step may be reported twice
            history.append((time.monotonic(), step))
        while len(history) > 2 and history[-1][0] - history[0][0] > 30:
            history.pop(0)
        (start, first), (end, last) = history[0], history[-1]
        return (last - first) / (end - start) if end > start else 0.0
