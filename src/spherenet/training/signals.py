"""Signals that stop a run after the current step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

__all__ = ["StopRequested", "StopSignals"]

# Cluster schedulers send SIGUSR1 some time before they kill a job, a closed terminal sends SIGHUP. Not every system has
# these signals.
_NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")


class StopRequested(BaseException):
    """A signal requested a stop while there was no step to finish.

    Like KeyboardInterrupt it is not an Exception, so that error handlers do not catch it.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class StopSignals:
    """Context manager in which SIGTERM, SIGINT, SIGHUP and SIGUSR1 request a stop.

    By default a signal raises StopRequested at once, which ends a download or a wait for other processes. Inside
    `deferred` it only sets `received`, so that the current step can be finished and saved. A second Ctrl-C then exits
    at once with code 130. Other signals may arrive twice, because torchrun forwards signals that its processes have
    already received from the terminal. Ignored signals stay ignored (nohup ignores SIGHUP). Outside the main thread,
    which alone receives signals, the context manager does nothing.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._deferred = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for name in _NAMES if threading.current_thread() is threading.main_thread() else ():
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Only set `received` while the block runs. The block checks it when it can stop."""
        before, self._deferred = self._deferred, True
        try:
            yield
        finally:
            self._deferred = before

    def check(self) -> None:
        """Raise StopRequested if a signal was received, for points in a deferred block at which it can stop."""
        if self.received is not None:
            raise StopRequested(self.received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received == signal.SIGINT == number:
            os._exit(128 + number)
        self.received = number
        if not self._deferred:
            raise StopRequested(number)
