"""Files that are complete or absent at any moment: written beside their place, synced, then renamed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["discard", "is_temporary", "read_json", "remove", "replacing", "sync_folder", "write_json"]

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
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_json(path: Path) -> Any:
    """Read a JSON file; ValueError where it is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
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
    if path.exists():
        aside = path.with_name(f"{TEMPORARY}{os.getpid()}-gone-{path.name}")
        remove(aside)
        os.replace(path, aside)
        remove(aside)


def _sync(path: Path) -> None:
    """Bring a file, or a folder and the files in it, to the disk."""
    if path.is_dir():
        for part in path.iterdir():
            _sync(part)
        sync_folder(path)
        return
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Bring a folder's list of names to the disk; not all systems can open a folder for that."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
