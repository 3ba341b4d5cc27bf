"""Reading files within bounds and never through links, and writing files and folders atomically.

All files of runs and saved models are read and written by these functions. A pipe would block a reader forever, a
device would fill its memory, and a link would lead out of the run. What is written is complete or absent at any time:
it is written to a temporary folder beside its target, synced to the disk and renamed.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import math
import os
import platform
import re
import secrets
import shutil
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from spherenet._util.text import first_line, is_utf8

__all__ = [
    "APPEND",
    "LARGEST_JSON",
    "atomic_file",
    "atomic_folder",
    "discard",
    "file_kind",
    "is_temporary",
    "make_folder",
    "open_handle",
    "open_regular",
    "parse_json",
    "read_json",
    "read_regular",
    "remove",
    "require_writable",
    "sync",
    "to_json",
    "user_path",
    "write_json",
    "write_text",
]

LARGEST_JSON = 64 * 2**20
"""Largest size of a JSON file in bytes: enough for a million class names, not for a file made to fill the memory."""

TEMPORARY = ".writing-"
"""Prefix of the names of unfinished files and folders."""

_HOST = hashlib.sha256(platform.node().encode(errors="replace")).hexdigest()[:4]
"""Part of these names, because a lock may not be visible to other machines that share a disk."""

_ABANDONED = re.compile(rf"{re.escape(TEMPORARY)}{_HOST}-[0-9a-f]{{8}}-new")


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


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically. Raises ValueError as `to_json`."""
    write_text(path, to_json(value))


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _require_replaceable(path: Path) -> None:
    """Raise OSError if a path is a folder, a device, a pipe or a socket."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "a folder has that name", str(path))
    if path.exists() and not path.is_file():  # a file in place of /dev/null would break other programs
        raise _not_regular(path, _kind(path.stat().st_mode))


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield the path of a new file that replaces `path` when the block ends without an error.

    After an error `path` is unchanged and nothing is left behind. Other files that the block writes to the same folder,
    e.g. external data of an ONNX file, are moved beside `path` before it. An earlier file at `path` is removed first
    then, so that a process that is killed between the moves leaves no files that do not belong together.

    Raises:
        OSError: If the file cannot be written, or if `path` is a folder, a device, a pipe or a socket.
    """
    _require_replaceable(path)
    with _temporary_folder(path) as folder:
        new = folder / path.name
        mode = _mode_of_new_file(new)
        yield new
        files = sorted(folder.iterdir(), key=lambda file: file == new)
        for file in files:
            file.chmod(mode)
            sync(file)
            if file != new:
                _require_replaceable(path.with_name(file.name))
        if len(files) > 1:
            path.unlink(missing_ok=True)
            sync(path.parent)
        for file in files:
            os.replace(file, path.with_name(file.name))
        sync(path.parent)


@contextmanager
def atomic_folder(path: Path, replaceable: Collection[str] | None = None) -> Iterator[Path]:
    """Yield the path of a new folder that replaces `path` when the block ends without an error.

    After an error `path` is unchanged and nothing is left behind. On Linux the two folders exchange their names in one
    step, elsewhere by two renames. Only files named in `replaceable` are removed with the earlier folder. All others,
    which another program may create at any time, are moved to the new one; None removes everything.

    Raises:
        OSError: If the folder cannot be written.
    """
    with _temporary_folder(path) as new:
        mode = new.stat().st_mode & 0o666  # as the umask allows; some writers create private files
        yield new
        for entry in sorted(new.rglob("*"), reverse=True):
            if not entry.is_dir():
                entry.chmod(mode)
            sync(entry)
        sync(new)
        if not os.path.lexists(path):
            os.replace(new, path)
        else:
            old = new if _exchange(new, path) else _replace_folder(new, path)
            if replaceable is None:
                shutil.rmtree(old, ignore_errors=True)
            else:
                try:
                    _remove_replaced(old, path, replaceable)
                except BaseException:  # keep what could not be moved under a name that no process removes
                    os.rename(old, _temporary_name(path, "kept"))
                    raise
        sync(path.parent)


def _mode_of_new_file(path: Path) -> int:
    """Create an empty file and return its mode, which follows the user's umask. Some writers create private files."""
    path.touch()
    return path.stat().st_mode


@contextmanager
def _temporary_folder(path: Path) -> Iterator[Path]:
    """Create a folder beside `path`, hence on the same file system, and remove it at the end.

    Those of killed processes are removed, too. A lock of the folder, which ends with its process, tells them apart.
    """
    _remove_abandoned(path.parent)
    lock = None
    folder = _temporary_name(path, "new")
    try:
        folder.mkdir()
        lock = _locked(folder)
        while not folder.is_dir():  # another process took it for abandoned before it was locked
            if lock is not None:
                os.close(lock)
            folder.mkdir()
            lock = _locked(folder)
        yield folder
    except OSError as error:
        if error.errno is None:  # of a library; with a file name, Python would print "[Errno None] None"
            raise OSError(errno.EIO, first_line(error), str(path)) from error
        # A full disk does not name the file, and the temporary one means nothing to the user.
        if error.filename is None or str(error.filename).startswith(str(folder)):
            error.filename = str(path)
        raise
    finally:
        with suppress(OSError):
            remove(folder)
        if lock is not None:
            os.close(lock)


def _locked(folder: Path, *, alone: bool = False) -> int | None:
    """Return a handle that holds a lock of a folder until it is closed; None if the system cannot lock folders.

    With `alone`, None also means that another process holds a lock.
    """
    try:
        import fcntl

        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (ImportError, OSError):  # Windows; or no longer there
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)
    except OSError:
        os.close(handle)
        return None
    return handle


def _remove_abandoned(parent: Path) -> None:
    """Remove the temporary folders in a folder whose processes were killed."""
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if _ABANDONED.fullmatch(entry.name) and (lock := _locked(Path(entry.path), alone=True)) is not None:
                shutil.rmtree(entry.path, ignore_errors=True)
                os.close(lock)


def _temporary_name(path: Path, purpose: str) -> Path:
    return path.with_name(f"{TEMPORARY}{_HOST}-{secrets.token_hex(4)}-{purpose}")


_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux's fcntl.h and fs.h


def _exchange(first: Path, second: Path) -> bool:
    """Exchange the names of two folders in one step. Return False if the system cannot do it."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):  # not Linux, or an old C library
        return False
    status: int = rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    return status == 0  # some file systems cannot


def _remove_replaced(old: Path, path: Path, replaceable: Collection[str]) -> None:
    """Remove the folder that `path` replaced, and move what is not replaceable to `path`."""
    while True:
        for entry in list(old.iterdir()):
            if entry.name in replaceable and not (entry.is_dir() and not entry.is_symlink()):
                entry.unlink()
            else:
                target = path / entry.name
                while os.path.lexists(target):  # never overwrite: the file keeps its name with a random ending
                    target = target.with_name(f"{entry.name}.{secrets.token_hex(4)}")
                os.rename(entry, target)
        try:
            old.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return  # nothing was created in the meantime


def _replace_folder(new: Path, path: Path) -> Path:
    """Replace a folder by two renames, between which the old one has a temporary name, and return its last name."""
    old = _temporary_name(path, "old")
    os.replace(path, old)
    try:
        os.replace(new, path)
    except BaseException:
        os.replace(old, path)
        raise
    return old


def is_temporary(path: Path) -> bool:
    """Return whether a file or folder is unfinished, left by a process that was killed."""
    return path.name.startswith(TEMPORARY)


def remove(path: Path) -> None:
    """Remove a file or folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def discard(path: Path) -> None:
    """Remove a folder atomically: it is renamed to a temporary name first."""
    if os.path.lexists(path):
        renamed = _temporary_name(path, "gone")
        os.replace(path, renamed)
        remove(renamed)


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


def require_writable(folder: Path) -> None:
    """Create a folder if it is missing. Raises OSError if no file can be created in it, e.g. on a read-only disk."""
    try:
        make_folder(folder)
        with _temporary_folder(folder / "file"):
            pass
    except OSError as error:
        error.filename = str(folder)  # not that of the temporary one
        raise


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
