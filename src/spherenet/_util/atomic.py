"""Atomic writing: a file or folder is complete or absent at any time.

It is written to a temporary folder beside its target, synced to the disk and renamed.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import platform
import re
import secrets
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from spherenet._util.files import make_folder, remove, require_replaceable, sync, to_json
from spherenet._util.text import first_line

__all__ = [
    "atomic_file",
    "atomic_folder",
    "discard",
    "is_temporary",
    "require_writable",
    "write_json",
    "write_text",
]

TEMPORARY = ".writing-"
"""Prefix of the names of unfinished files and folders."""

_HOST = hashlib.sha256(platform.node().encode(errors="replace")).hexdigest()[:4]
"""Part of these names, because a lock may not be visible to other machines that share a disk."""

_ABANDONED = re.compile(rf"{re.escape(TEMPORARY)}{_HOST}-[0-9a-f]{{8}}-new")


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically. Raises ValueError as `to_json`."""
    write_text(path, to_json(value))


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield the path of a new file that replaces `path` when the block ends without an error.

    After an error `path` is unchanged and nothing is left behind. Other files that the block writes to the same folder,
    e.g. external data of an ONNX file, are moved beside `path` before it. An earlier file at `path` is removed first
    then, so that a process that is killed between the moves leaves no files that do not belong together.

    Raises:
        OSError: If the file cannot be written, or if `path` is a folder, a device, a pipe or a socket.
    """
    require_replaceable(path)
    with _temporary_folder(path) as folder:
        new = folder / path.name
        mode = _mode_of_new_file(new)
        yield new
        files = sorted(folder.iterdir(), key=lambda file: file == new)
        for file in files:
            file.chmod(mode)
            sync(file)
            if file != new:
                require_replaceable(path.with_name(file.name))
        if len(files) > 1:
            path.unlink(missing_ok=True)
            sync(path.parent)
        for file in files:
            os.replace(file, path.with_name(file.name))
        sync(path.parent)


def _mode_of_new_file(path: Path) -> int:
    """Create an empty file and return its mode, which follows the user's umask. Some writers create private files."""
    path.touch()
    return path.stat().st_mode


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


def discard(path: Path) -> None:
    """Remove a folder atomically: it is renamed to a temporary name first."""
    if os.path.lexists(path):
        renamed = _temporary_name(path, "gone")
        os.replace(path, renamed)
        remove(renamed)


def require_writable(folder: Path) -> None:
    """Create a folder if it is missing. Raises OSError if no file can be created in it, e.g. on a read-only disk."""
    try:
        make_folder(folder)
        with _temporary_folder(folder / "file"):
            pass
    except OSError as error:
        error.filename = str(folder)  # not that of the temporary one
        raise
