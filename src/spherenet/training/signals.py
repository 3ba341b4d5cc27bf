"""Signals that ask a run to leave: it finishes its step, saves, and goes; a second Ctrl-C does not wait.

What a training loop tells whoever watches it; every method does nothing unless overridden.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Reporter", "StopRequested", "StopSignals"]

# SIGUSR1: what cluster schedulers send a while before they kill. SIGHUP: what a closed terminal sends. Not every system
# has them.
_NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")


class StopRequested(BaseException):
    """A signal asked the run to leave while there was nothing to finish first.

    No Exception, as KeyboardInterrupt is none: no handler of errors may swallow it.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class StopSignals:
    """A context in which SIGTERM, SIGINT, SIGHUP and SIGUSR1 ask to leave.

    They raise StopRequested at once, so that a download or a wait for other processes ends; inside `deferred` they only
    set `received`, so that a step is finished and saved first. A second Ctrl-C then leaves at once with code 130. Other
    signals may come twice: torchrun passes on to its processes what the terminal has sent them already. A signal that
    is ignored stays so, as nohup wants it for SIGHUP. Outside the main thread, which alone hears signals, it does
    nothing.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._deferred = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for name in _NAMES if threading.current_thread() is threading.main_thread() else ():
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Only set `received` while the block runs: whoever runs it looks at it when it can leave."""
        before, self._deferred = self._deferred, True
        try:
            yield
        finally:
            self._deferred = before

    def check(self) -> None:
        """Raise StopRequested if a signal came: for a place in a deferred block from which one can leave."""
        if self.received is not None:
            raise StopRequested(self.received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received == signal.SIGINT == number:
            os._exit(128 + number)
        self.received = number
        if not self._deferred:
            raise StopRequested(number)


class Reporter:
    """The listener of a run: a progress bar, lines in a log, TensorBoard."""

    def started(self, step: int, iterations: int) -> None:
        """Training begins, or goes on, after `step` of `iterations`."""

    def stepped(self, step: int, loss: float, accuracy: float) -> None:
        """A step was made; loss and accuracy are those of its batch on a CPU.

        On other devices they are the means of the steps before the last log point, NaN before the first, because
        asking for more would make every step wait for the device.
        """

    def logged(self, row: Mapping[str, Any]) -> None:
        """A row was added to metrics.jsonl."""

    def warned(self, message: str) -> None:
        """Something should be known, but the run goes on."""

    def finished(self) -> None:
        """Training has ended, well or not."""
