"""Files and folders that are complete or absent at any moment: written beside their place, flushed, then renamed."""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from spherenet.errors import ModelError

__all__ = ["new_file", "new_folder", "write_file"]


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
