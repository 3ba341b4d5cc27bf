"""`metrics.jsonl`: one JSON object per line, truncated to the step of the checkpoint when a run is resumed."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spherenet._util.files import APPEND, atomic_file, open_handle, read_regular, sync
from spherenet._util.text import finite
from spherenet.errors import RunError

__all__ = ["MetricsFile"]

LARGEST = 1 << 30
"""Largest size of a metrics file in bytes: a thousand times that of a long run."""


class MetricsFile:
    """Rows of metrics with `step`, `split` and further values, such as `loss`, `accuracy` and `seconds`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._count: int | None = None

    def __len__(self) -> int:
        """Return the number of rows. They are counted only once."""
        if self._count is None:
            self._count = len(self._lines())
        return self._count

    def append(self, row: Mapping[str, Any]) -> None:
        """Append a row in a single write, so that readers see a complete line or none.

        Raises:
            RunError: If the row cannot be written. The file is unchanged then.
        """
        try:
            line = json.dumps(row, allow_nan=False, ensure_ascii=False) + "\n"
        except ValueError:  # a number is NaN or infinite
            line = json.dumps(finite(dict(row)), allow_nan=False, ensure_ascii=False) + "\n"
        try:
            handle = open_handle(self.path, APPEND)
            try:
                data = line.encode()
                written = os.write(handle, data)
                if written != len(data):  # the disk became full within the line
                    os.ftruncate(handle, os.fstat(handle).st_size - written)
                    raise OSError(errno.ENOSPC, "the disk is full", str(self.path))
            finally:
                os.close(handle)
        except OSError as error:
            raise RunError(f"{self.path} could not be written ({error.strerror}); earlier rows are valid.") from None
        if self._count is not None:
            self._count += 1

    def sync(self) -> None:
        """Sync all rows and the name of the file to the disk. Raises RunError if that fails."""
        try:
            sync(self.path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise RunError(f"{self.path} could not be synced to the disk ({error.strerror}).") from None
        sync(self.path.parent)

    def count_valid(self) -> tuple[int, str | None]:
        """Return the number of rows before the first corrupt one, and the error message of that one."""
        count = 0
        for number, line in enumerate(self._lines(), 1):
            try:
                self._parse(number, line)
            except RunError as error:
                return count, str(error)
            count = number
        return count, None

    def read(self) -> list[dict[str, Any]]:
        """Return the rows. An unfinished last line, left by a killed process, is ignored.

        Raises:
            RunError: If a line is not a JSON object with a non-negative integer `step` and a string `split`.
        """
        return [self._parse(number, line) for number, line in enumerate(self._lines(), 1)]

    def cut_back(self, step: int) -> None:
        """Remove all rows after a step, and an unfinished last line.

        If there are corrupt lines, they are removed too, and a copy of the original file is kept beside it.
        """
        kept: list[bytes] = []
        corrupt = False
        for number, line in enumerate(self._lines(), 1):
            try:
                if self._parse(number, line)["step"] <= step:
                    kept.append(line)
            except RunError:
                corrupt = True
        if corrupt:
            with atomic_file(self.path.with_name(f"{self.path.stem}-corrupt{self.path.suffix}")) as temporary:
                temporary.write_bytes(read_regular(self.path, LARGEST))
        with atomic_file(self.path) as temporary:
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

    def _parse(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise RunError(f"{self.path} is corrupt: line {number} is not JSON.") from None
        if not isinstance(row, dict) or not isinstance(row.get("split"), str):
            raise RunError(f"{self.path} is corrupt: line {number} is not an object with a split.")
        step = row.get("step")
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise RunError(f"{self.path} is corrupt: line {number} has the step {step!r}.")
        return row
