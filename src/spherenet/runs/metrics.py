"""`metrics.jsonl`: one JSON object per line, truncated to the step of the checkpoint when a run is resumed."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spherenet._util.atomic import atomic_file
from spherenet._util.files import APPEND, open_handle, open_regular, sync
from spherenet._util.text import finite
from spherenet.errors import RunError

__all__ = ["MetricsFile"]

LARGEST = 1 << 30
"""Largest size of a metrics file in bytes: a thousand times that of a long run. It is read row by row."""

LARGEST_ROW = 1 << 22
"""Largest size of a row in bytes: enough for the k of a hundred thousand filters."""

LARGEST_READ = 1 << 27
"""Largest size of the rows that `read` returns, in bytes. As Python values they take up to twenty times as much."""

MOST_READ = 1 << 20
"""Largest number of rows that `read` returns."""


TAIL = 1 << 12
"""Bytes at the end of a file that `tail` reads first: a few rows."""


class MetricsFile:
    """Rows of metrics with `step`, `split` and further values, such as `loss`, `accuracy` and `seconds`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._count: int | None = None

    def __len__(self) -> int:
        """Return the number of rows. They are counted only once."""
        if self._count is None:
            self._count = sum(1 for _ in self._lines())
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

    def last(self) -> tuple[int, dict[str, Any] | None]:
        """Return the number of rows and the last one, None without rows. Raises RunError as `rows`."""
        count, row = 0, None
        for count, row in enumerate(self.rows(), 1):  # noqa: B007 (used after the loop)
            pass
        return count, row

    def tail(self) -> dict[str, Any] | None:
        """Return the last row without reading those before it, None without rows. Raises RunError as `rows`."""
        try:
            with open_regular(self.path) as file:
                size = file.seek(0, os.SEEK_END)
                length, line = 0, None
                while line is None and length < min(size, 2 * LARGEST_ROW):
                    length = min(size, max(TAIL, 2 * length))
                    file.seek(size - length)
                    # The part before the first newline is complete if it is the start of the file.
                    *lines, _ = file.read(length).split(b"\n")
                    if len(lines) > (length < size):
                        line = lines[-1]
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RunError(f"{self.path} cannot be read ({error.strerror}).") from None
        return None if line is None else self._parse("at the end", line)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows, of which only one is in memory. An unfinished last line of a killed process is ignored.

        Raises:
            RunError: If the file cannot be read or is too large, or if a line is not a JSON object with a non-negative
                integer `step` and a string `split`.
        """
        for number, line in enumerate(self._lines(), 1):
            yield self._parse(number, line)

    def read(self) -> list[dict[str, Any]]:
        """Return the rows as a list. Raises RunError as `rows`, and if they would need too much memory."""
        rows, size = [], 0
        for number, line in enumerate(self._lines(), 1):
            size += len(line)
            if number > MOST_READ or size > LARGEST_READ:
                allowed = f"{MOST_READ:,} rows and {LARGEST_READ:,} bytes"
                raise RunError(f"{self.path} must have at most {allowed} to be read at once.")
            rows.append(self._parse(number, line))
        return rows

    def cut_back(self, step: int) -> None:
        """Remove all rows after a step, and an unfinished last line.

        If there are corrupt lines, they are removed too, and a copy of the original file is kept beside it.
        """
        count, corrupt = 0, False
        with atomic_file(self.path) as temporary:
            with temporary.open("wb") as file:
                for number, line in enumerate(self._lines(), 1):
                    try:
                        kept = self._parse(number, line)["step"] <= step
                    except RunError:
                        kept, corrupt = False, True
                    if kept:
                        file.write(line + b"\n")
                        count += 1
            if corrupt:
                with (
                    atomic_file(self.path.with_name(f"{self.path.stem}-corrupt{self.path.suffix}")) as copy,
                    open_regular(self.path) as original,
                    copy.open("wb") as file,
                ):
                    shutil.copyfileobj(original, file)
        self._count = count

    def _lines(self) -> Iterator[bytes]:
        """Yield the complete lines. Of one that is too long only the start, which `_parse` rejects."""
        try:
            with open_regular(self.path) as file:
                size = os.fstat(file.fileno()).st_size
                if size > LARGEST:
                    raise RunError(f"{self.path} must have at most {LARGEST:,} bytes, got {size:,}.")
                while line := file.readline(LARGEST_ROW + 1):
                    end = line
                    while len(line) > LARGEST_ROW and end and not end.endswith(b"\n"):
                        end = file.readline(LARGEST_ROW)
                    if not end.endswith(b"\n"):
                        return
                    yield line.removesuffix(b"\n")
        except FileNotFoundError:
            return
        except OSError as error:
            raise RunError(f"{self.path} cannot be read ({error.strerror}).") from None

    def _parse(self, number: int | str, line: bytes) -> dict[str, Any]:
        if len(line) > LARGEST_ROW:
            raise RunError(f"{self.path} is corrupt: line {number} has more than {LARGEST_ROW:,} bytes.")
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
