"""Files as they are on the disk: read within bounds, never through links, and brought to the disk before a promise.

Every file of a run or of a saved model is read here. A pipe would make a reader wait forever, a device would fill its
memory, and a link would lead it out of the run.

Files that are complete or absent at any moment: written beside their place, synced, then renamed.

Files and folders that are complete or absent at any moment: written beside their place, flushed, then renamed.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from spherenet.errors import ModelError

__all__ = [
    "LARGEST_JSON",
    "discard",
    "file_kind",
    "is_temporary",
    "make_folder",
    "new_file",
    "new_folder",
    "open_regular",
    "parse_json",
    "read_json",
    "read_regular",
    "remove",
    "replacing",
    "sync_file",
    "sync_folder",
    "write_file",
    "write_json",
    "write_text",
]


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


LARGEST_JSON = 64 * 2**20
"""Bytes of a JSON file that are read: room for a million class names, not for a file made to fill memory."""

TEMPORARY = ".writing-"
"""What the names of unfinished files and folders begin with."""


def is_temporary(path: Path) -> bool:
    """Whether a name is that of something unfinished, left by a process that was killed."""
    return path.name.startswith(TEMPORARY)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write a file or make a folder at; it takes the place of `path` when the block ends well.

    The temporary lies in the same folder, hence on the same disk, so that the rename is atomic. A folder can take
    only a free place. When the block fails, the temporary is removed and `path` is as it was.
    """
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    remove(temporary)
    try:
        yield temporary
        _sync(temporary)
        os.replace(temporary, path)
    except BaseException as error:
        remove(temporary)
        if isinstance(error, OSError) and error.filename is None:  # a full disk does not say which file did not fit
            error.filename = str(path)
        raise
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole; NaN and infinities are refused, for no reader of JSON takes them."""
    text = json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    write_text(path, text)


def write_text(path: Path, text: str) -> None:
    """Write a text file whole."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_json(path: Path) -> Any:
    """Read a JSON file of bounded size; ValueError if it is not JSON, OSError if it cannot be read."""
    return parse_json(read_regular(path, LARGEST_JSON))


def parse_json(content: bytes) -> Any:
    """Return the value of a JSON text; ValueError if it is none."""
    try:
        return json.loads(content.decode())
    except RecursionError:
        raise ValueError("nested too deeply") from None


def remove(path: Path) -> None:
    """Remove a file or a folder if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def discard(path: Path) -> None:
    """Remove a folder so that it is whole or gone at any moment: it loses its name first."""
    if os.path.lexists(path):
        aside = path.with_name(f"{TEMPORARY}{os.getpid()}-gone-{path.name}")
        remove(aside)
        os.replace(path, aside)
        remove(aside)


def _sync(path: Path) -> None:
    """Bring a file, or a folder and the files in it, to the disk."""
    if file_kind(path) == "a folder":
        for entry in path.iterdir():
            _sync(entry)
        sync_folder(path)
    else:
        sync_file(path)


def write_file(target: str | os.PathLike[str], write: Callable[[Path], object]) -> Path:
    """Let `write` fill a file and put it at `target`, in place of a file that may be there; return where it is.

    Raises ModelError where the target is a folder or cannot be written; then nothing is left behind.
    """
    with new_file(target) as path:
        write(path)
    return _resolve(target)


@contextmanager
def new_file(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Give the path of a new file that takes the place of `target` when the block ends without an error.

    Other files that the block makes in the same folder, such as a large file's data, go to their places before it.
    Raises ModelError where the target is a folder or cannot be written; then nothing is left behind.
    """
    place = _resolve(target)
    if place.is_dir():
        raise ModelError(f"cannot write the file {place}: a folder has that name.")
    with _beside(place) as scratch:
        scratch.mkdir()
        path = scratch / place.name
        # A file that is made here has the permissions that the user's settings give to new files; some writers make
        # theirs private.
        path.touch()
        mode = path.stat().st_mode
        yield path
        for made in sorted(scratch.iterdir(), key=lambda made: made == path):
            made.chmod(mode)
            _flush(made)
            made.replace(place.with_name(made.name))
        _flush(place.parent)


@contextmanager
def new_folder(
    target: str | os.PathLike[str], *, overwrite: bool = False, replaceable: Collection[str] = ()
) -> Iterator[Path]:
    """Give the path of a new folder that becomes `target` when the block ends without an error.

    overwrite: whether a folder that is not empty may be replaced, and then only one that holds nothing but files of
    the names `replaceable`. The old folder stays until the new one is complete; then the two change their names in one
    step where the system can (Linux), elsewhere by two renames. Raises ModelError for a target that is not free or
    cannot be written; then nothing is left behind.
    """
    place = _resolve(target)
    _require_free(place, overwrite, replaceable)
    with _beside(place) as scratch:
        scratch.mkdir()
        yield scratch
        for path in (*scratch.iterdir(), scratch):
            _flush(path)
        if not (place.exists() and _exchange(scratch, place)):
            _replace(scratch, place)
        _flush(place.parent)


def _exchange(first: Path, second: Path) -> bool:
    """Let two folders change their names in one step, so that neither name is ever free; False if that cannot be."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):  # not Linux, or an old C library
        return False
    done: int = rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    return done == 0  # some file systems cannot


_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux's fcntl.h and fs.h


def _replace(scratch: Path, place: Path) -> None:
    """Put a folder in the place of another by two renames; between them the old one has a hidden name."""
    old = _hidden(place, "old")
    if place.exists():
        place.rename(old)
    try:
        scratch.rename(place)
    except BaseException:
        if old.exists():
            old.rename(place)
        raise
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _beside(place: Path) -> Iterator[Path]:
    """A hidden name beside `place`; at the end nothing is there. What the system refuses becomes a ModelError."""
    scratch = _hidden(place, "new")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        yield scratch
    except (FileExistsError, NotADirectoryError) as error:
        raise ModelError(f"cannot write {place}: {error.filename or place.parent} is not a folder.") from error
    except OSError as error:
        raise ModelError(f"cannot write {place}: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _resolve(target: str | os.PathLike[str]) -> Path:
    # Through links: the place they point to is replaced, not the link.
    return Path(target).expanduser().resolve()


def _hidden(place: Path, purpose: str) -> Path:
    """A name that nothing has, on the same file system as `place`, so that a rename is one step."""
    return place.with_name(f".{place.name}.{secrets.token_hex(4)}.{purpose}")


def _flush(path: Path) -> None:
    """Ask the system to bring a file or folder to the disk; only POSIX systems can do that for folders."""
    if path.is_dir() and os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _require_free(place: Path, overwrite: bool, replaceable: Collection[str]) -> None:
    if not place.exists():
        return
    if not place.is_dir():
        raise ModelError(f"cannot write the folder {place}: a file has that name.")
    found = sorted(path.name for path in place.iterdir())
    if found and not overwrite:
        raise ModelError(f"the folder {place} is not empty; pass overwrite=True to replace it.")
    foreign = [name for name in found if name not in replaceable]
    if foreign:
        raise ModelError(
            f"the folder {place} holds {foreign[0]!r}, which no saved model has, and is not replaced; "
            "remove it or choose another folder."
        )
