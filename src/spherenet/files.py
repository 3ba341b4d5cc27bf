"""Files as they are on the disk: read within bounds, never through links, and brought to the disk before a promise.

Every file of a run or of a saved model is read here. A pipe would make a reader wait forever, a device would fill its
memory, and a link would lead it out of the run.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import IO

__all__ = ["file_kind", "make_folder", "open_regular", "read_regular", "sync_file", "sync_folder"]


def open_regular(path: str | os.PathLike[str], *, follow_links: bool = False) -> IO[bytes]:
    """Open a regular file for reading.

    Raises:
        OSError: The file is missing, not readable, a link (unless they are followed), a pipe, a device or a folder.
            Its `strerror` completes the sentence "cannot be read (…)".
    """
    # Without O_NONBLOCK, opening a pipe waits for a writer. On regular files it has no effect.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    if not follow_links:
        flags |= getattr(os, "O_NOFOLLOW", 0)
    try:
        handle = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow_links:
            raise _not_regular(path, "a link") from None
        if error.errno == errno.ENXIO:  # a socket, or a device without a driver
            raise _not_regular(path, "a device") from None
        raise
    except ValueError as error:  # a NUL in the name
        raise OSError(errno.EINVAL, str(error), repr(path)) from None
    kind = _kind(os.fstat(handle).st_mode)
    if kind != "a regular file":
        os.close(handle)
        raise _not_regular(path, kind)
    return os.fdopen(handle, "rb")


def read_regular(path: str | os.PathLike[str], largest: int, *, follow_links: bool = False) -> bytes:
    """Return the content of a regular file of at most `largest` bytes; OSError otherwise, as `open_regular`."""
    with open_regular(path, follow_links=follow_links) as file:
        size = os.fstat(file.fileno()).st_size
        if size > largest:
            raise OSError(errno.EFBIG, f"must have at most {largest:,} bytes, got {size:,}", os.fspath(path))
        return file.read(size)


def file_kind(path: str | os.PathLike[str]) -> str:
    """Return "a regular file", "a folder", "a link" and so on, without following links; "nothing" if it is missing."""
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


def make_folder(path: Path) -> None:
    """Make a folder and those above it that are missing, and bring their names to the disk."""
    missing = []
    place = path
    while not place.exists():
        missing.append(place)
        place = place.parent
    path.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync_folder(made.parent)


def sync_file(path: str | os.PathLike[str]) -> None:
    """Bring a file's content to the disk."""
    with open_regular(path) as file:
        os.fsync(file.fileno())


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Bring a folder's list of names to the disk; not every system can open a folder for that."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        with suppress(PermissionError):  # some network disks refuse
            os.fsync(handle)
    finally:
        os.close(handle)
