"""What a training loop tells whoever watches it; every method does nothing unless overridden."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["Reporter"]


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
