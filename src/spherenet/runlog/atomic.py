"""Files that are complete or absent at any moment: written beside their place, synced, then renamed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spherenet.files import file_kind, read_regular, sync_file, sync_folder

__all__ = [
    "LARGEST_JSON",
    "discard",
    "is_temporary",
    "parse_json",
    "read_json",
    "remove",
    "replacing",
    "write_json",
    "write_text",
]

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
