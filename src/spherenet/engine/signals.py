"""Signals that ask a run to leave: it finishes its step, saves, and goes; a second Ctrl-C does not wait."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["StopSignals"]

# SIGUSR1: what cluster schedulers send a while before they kill. Not every system has it.
_NAMES = ("SIGTERM", "SIGINT", "SIGUSR1")


class StopSignals:
    """A context in which SIGTERM, SIGINT and SIGUSR1 only set `received`.

    A second Ctrl-C leaves at once with code 130. Other signals may come twice: torchrun passes on to its processes
    what the terminal has sent them already. Outside the main thread, which alone hears signals, it does nothing.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for name in _NAMES if threading.current_thread() is threading.main_thread() else ():
            number = getattr(signal, name, None)
            if number is not None:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received == signal.SIGINT == number:
            os._exit(128 + number)
        self.received = number
