"""`Reporter`: the interface for progress of a run, which progress bars, log lines and TensorBoard implement."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["Reporter"]


class Reporter:
    """Base class of progress bars, log lines and TensorBoard writers. Its methods do nothing."""

    def described(self, description: Mapping[str, Any], parameters: int, folder: Path) -> None:
        """Report what is trained: the content of config.json, the number of trained parameters, and the folder."""

    def started(self, step: int, iterations: int) -> None:
        """Report that training starts, or is resumed, after `step` of `iterations`."""

    def stepped(self, step: int, loss: float, accuracy: float) -> None:
        """Report a step with the loss and accuracy of its batch.

        On devices other than the CPU they are means up to the last log point (NaN before the first), because current
        values would make every step wait for the device.
        """

    def evaluating(self, done: int, total: int) -> None:
        """Report the number of images that this process has evaluated, and how many it evaluates."""

    def logged(self, row: Mapping[str, Any]) -> None:
        """Report a row that was added to metrics.jsonl."""

    def warned(self, message: str) -> None:
        """Report a warning."""

    def finished(self) -> None:
        """Report the end of training, with or without an error."""
