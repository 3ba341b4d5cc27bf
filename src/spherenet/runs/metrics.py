"""`metrics.jsonl`: one JSON object a line, whole lines only, cut back to the checkpoint on resume."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spherenet.errors import RunError
from spherenet.files import read_regular, replacing, sync_file, sync_folder
from spherenet.text import finite

__all__ = ["MetricsFile"]

LARGEST = 1 << 30
"""Bytes of a metrics file that are read: a thousand times what a long run writes."""


# A link would lead out of the run, and a pipe would wait for a reader.
_APPENDING = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class MetricsFile:
    """The numbers of a run as they came: `step`, `split`, `loss`, `accuracy`, `seconds` and more a line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._count: int | None = None

    def __len__(self) -> int:
        """The number of rows; counted once, then kept."""
        if self._count is None:
            self._count = len(self._lines())
        return self._count

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a line in one write, so that another reader sees it whole or not at all.

        Raises RunError, and leaves the file as it was, where the disk does not take it.
        """
        line = json.dumps(finite(dict(row)), allow_nan=False, ensure_ascii=False) + "\n"
        try:
            handle = os.open(self.path, _APPENDING, 0o666)
            try:
                if not stat.S_ISREG(os.fstat(handle).st_mode):
                    raise OSError(errno.EINVAL, "must be a regular file", str(self.path))
                data = line.encode()
                written = os.write(handle, data)
                if written != len(data):  # the disk filled up in the middle of the line
                    os.ftruncate(handle, os.fstat(handle).st_size - written)
                    raise RunError(f"{self.path} could not be written (the disk is full); the rows before are intact.")
            finally:
                os.close(handle)
        except OSError as error:
            raise RunError(
                f"{self.path} could not be written ({error.strerror}); the rows before are intact."
            ) from None
        if self._count is not None:
            self._count += 1

    def sync(self) -> None:
        """Bring all rows, and the file's name, to the disk: what is saved next says that they are there."""
        try:
            sync_file(self.path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise RunError(f"{self.path} could not be brought to the disk ({error.strerror}).") from None
        sync_folder(self.path.parent)

    def intact(self) -> tuple[int, str | None]:
        """Return the number of readable rows before the first unreadable one, and a sentence about that one."""
        count = 0
        for number, line in enumerate(self._lines(), 1):
            try:
                self._row(number, line)
            except RunError as error:
                return count, str(error)
            count = number
        return count, None

    def read(self) -> list[dict[str, Any]]:
        """Return the rows; an unfinished last line, left by a kill, does not count.

        Raises RunError for a line that is not a JSON object with a whole number `step` of at least 0 and a
        string `split`.
        """
        return [self._row(number, line) for number, line in enumerate(self._lines(), 1)]

    def cut_back(self, step: int) -> None:
        """Forget every row after a step, and an unfinished line; the lines before stay as they are.

        If there are lines that cannot be read, the file as it was is kept beside it.
        """
        kept: list[bytes] = []
        damaged = False
        for number, line in enumerate(self._lines(), 1):
            try:
                if self._row(number, line)["step"] <= step:
                    kept.append(line)
            except RunError:
                damaged = True
        if damaged:
            with replacing(self.path.with_name(f"{self.path.stem}-damaged{self.path.suffix}")) as temporary:
                temporary.write_bytes(read_regular(self.path, LARGEST))
        with replacing(self.path) as temporary:
            temporary.write_bytes(b"".join(line + b"\n" for line in kept))
        self._count = len(kept)

    def _lines(self) -> list[bytes]:
        try:
            content = read_regular(self.path, LARGEST)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RunError(f"{self.path} cannot be read ({error.strerror}).") from None
        *lines, _ = content.split(b"\n")
        return lines

    def _row(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise RunError(f"{self.path} is damaged: line {number} is not JSON.") from None
        if not isinstance(row, dict) or not isinstance(row.get("split"), str):
            raise RunError(f"{self.path} is damaged: line {number} is not an object with a split.")
        step = row.get("step")
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise RunError(f"{self.path} is damaged: line {number} has the step {step!r}.")
        return row
