"""Files within bounds and never through links: opening, reading, JSON, names and syncing.

All files of runs and saved models are read by these functions. A pipe would block a reader forever, a device would fill
its memory, and a link would lead out of the run.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from spherenet._util.text import is_utf8

__all__ = [
    "APPEND",
    "LARGEST_JSON",
    "file_kind",
    "make_folder",
    "open_handle",
    "open_regular",
    "parse_json",
    "read_json",
    "read_regular",
    "remove",
    "require_replaceable",
    "sync",
    "to_json",
    "user_path",
]

LARGEST_JSON = 64 * 2**20
"""Largest size of a JSON file in bytes: enough for a million class names, not for a file made to fill the memory."""

APPEND = os.O_RDWR | os.O_CREAT | os.O_APPEND
"""Flags of `open_handle` to read and append, and to create a missing file."""


def open_handle(path: str | os.PathLike[str], flags: int = os.O_RDONLY, *, follow_links: bool = False) -> int:
    """Open a regular file and return its handle, e.g. for `os.write`. Nothing is written through a link or into a pipe.

    Raises:
        OSError: If the file is missing, not accessible, a pipe, a device, a folder, or a link that is not followed. Its
            `strerror` completes the sentence "cannot be read (…)".
    """
    # Without O_NONBLOCK, opening a pipe waits for a writer. It has no effect on regular files.
    flags |= getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    if not follow_links:
        flags |= getattr(os, "O_NOFOLLOW", 0)
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow_links:
            raise _not_regular(path, "a link") from None
        if error.errno == errno.ENXIO:  # a socket, or a device without a driver
            raise _not_regular(path, "a device") from None
        raise
    except ValueError as error:  # a NUL in the name
        raise OSError(errno.EINVAL, str(error), repr(path)) from None
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise _not_regular(path, _kind(mode))
    return handle


def open_regular(path: str | os.PathLike[str], *, follow_links: bool = False) -> IO[bytes]:
    """Open a regular file for reading. Raises OSError as `open_handle` does."""
    return os.fdopen(open_handle(path, follow_links=follow_links), "rb")


def read_regular(path: str | os.PathLike[str], largest: int, *, follow_links: bool = False) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: If the file has more than `largest` bytes, and as in `open_regular`.
    """
    with open_regular(path, follow_links=follow_links) as file:
        size = os.fstat(file.fileno()).st_size
        if size > largest:
            raise OSError(errno.EFBIG, f"must have at most {largest:,} bytes, got {size:,}", os.fspath(path))
        return file.read(size)


def file_kind(path: str | os.PathLike[str]) -> str:
    """Return "a regular file", "a folder", "a link" and so on without following links, "nothing" if it is missing."""
    try:
        return _kind(os.lstat(path).st_mode)
    except FileNotFoundError:
        return "nothing"


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFREG: "a regular file",
        stat.S_IFDIR: "a folder",
        stat.S_IFLNK: "a link",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "a device")


def _not_regular(path: str | os.PathLike[str], kind: str) -> OSError:
    return OSError(errno.EINVAL, f"must be a regular file, got {kind}", os.fspath(path))


def read_json(path: Path) -> Any:
    """Return the value of a JSON file. Raises ValueError if it is not JSON, OSError if it cannot be read."""
    return parse_json(read_regular(path, LARGEST_JSON))


def parse_json(content: bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError if it is not JSON, also for NaN and infinities."""
    try:
        return json.loads(content.decode(), parse_constant=_finite, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _finite(number: str) -> float:
    """Return the value of a number of a JSON text, which `to_json` can write again."""
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number[:40]} is not a finite number")
    return value


def to_json(value: Any, indent: int | None = 2) -> str:
    """Return a value as JSON that UTF-8 can encode. Raises ValueError for NaN and infinities."""
    text = json.dumps(value, indent=indent, allow_nan=False, ensure_ascii=False)
    if not is_utf8(text):  # it contains a file name in another encoding
        text = json.dumps(value, indent=indent, allow_nan=False)
    return text + "\n"


def require_replaceable(path: Path) -> None:
    """Raise OSError if a path is a folder, a device, a pipe or a socket."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "a folder has that name", str(path))
    if path.exists() and not path.is_file():  # a file in place of /dev/null would break other programs
        raise _not_regular(path, _kind(path.stat().st_mode))


def remove(path: Path) -> None:
    """Remove a file or folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, and sync their names to the disk."""
    missing = []
    place = path
    while not place.exists():
        missing.append(place)
        place = place.parent
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


def sync(path: str | os.PathLike[str]) -> None:
    """Sync the content of a regular file, or the names in a folder, to the disk.

    Folders that cannot be synced are ignored: some systems cannot open them, and some network disks refuse.
    """
    if not os.path.isdir(path):
        # Windows syncs only files that are open for writing.
        with open_regular(path) if os.name == "posix" else open(path, "r+b") as file:
            os.fsync(file.fileno())
        return
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        with suppress(PermissionError):
            os.fsync(handle)
    finally:
        os.close(handle)


def user_path(path: str | os.PathLike[str]) -> Path:
    """Return a path in which ~ is replaced by the home folder; ~NAME of an unknown user is kept."""
    return Path(os.path.expanduser(path))
