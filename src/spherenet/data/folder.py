"""Find the pictures of a folder of `class/name.jpg`, and share them out between training and testing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from spherenet.data.draws import shuffled
from spherenet.data.pictures import SUFFIXES
from spherenet.errors import DataError

__all__ = ["Listing", "list_folder"]

DEEPEST = 16  # folders below a class: deeper is a mistake, not a collection
TEST_FOLDERS = ("val", "test")


class Listing(NamedTuple):
    """The classes, and for each split the pictures' paths below the root with their labels."""

    classes: tuple[str, ...]
    train: list[tuple[str, int]]
    test: list[tuple[str, int]]


def list_folder(root: Path, *, val_fraction: float, seed: int) -> Listing:
    """Return the pictures of `root`, in the order of their names.

    `root` holds `train/` and `val/` (or `test/`) with one folder a class, or one folder a class itself. In the second
    case `val_fraction` of each class, drawn by `seed`, is kept for testing: at least one picture, and at least one
    stays for training. Hidden files and files that are no pictures by their name are left alone. DataError: no such
    folder, fewer than two classes, a class without pictures, or with one where two are needed, or unknown in `train/`.
    """
    root = root.absolute()
    if not os.path.isdir(root):
        raise DataError(f"there is no folder {str(root)!r}.")
    try:
        training = _training_folder(root)
        if training is None:
            return _shared_out(_classes(root, root), root, val_fraction, seed)
        testing = next((root / name for name in TEST_FOLDERS if os.path.isdir(root / name)), None)
        if testing is None:
            raise DataError(
                f"the folder {str(root)!r} has train/ but neither val/ nor test/; "
                f"given {str(training)!r} instead, a part of it is kept for testing."
            )
        return _as_given(_classes(training, root), _classes(testing, root), training, testing)
    except OSError as error:
        raise DataError(f"the folder {str(error.filename)!r} cannot be read: {error.strerror}.") from None


def _training_folder(root: Path) -> Path | None:
    """Return `train/` if it holds folders of classes; a class may itself be called "train"."""
    training = root / "train"
    if not os.path.isdir(training):
        return None
    with os.scandir(training) as entries:
        visible = [entry for entry in entries if not entry.name.startswith(".")]
    is_class = any(_is_picture(entry) for entry in visible) or not any(entry.is_dir() for entry in visible)
    return None if is_class else training


def _classes(folder: Path, root: Path) -> dict[str, list[str]]:
    """Return the pictures of each class, as paths below `root`, both sorted."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
    for name in names:
        if not name.isprintable():  # control characters, or bytes that are no UTF-8
            raise DataError(f"the class folder {name!r} of {str(folder)!r} has a name that cannot be printed.")
    start = len(os.path.join(root, ""))
    return {name: sorted(path[start:] for path in _pictures(folder / name, DEEPEST)) for name in names}


def _pictures(folder: Path, depth: int) -> Iterator[str]:
    if depth < 0:
        raise DataError(f"the folder {str(folder)!r} lies more than {DEEPEST} folders below its class.")
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            # Links to files are pictures like any other; links to folders could lead round in circles.
            if entry.is_dir(follow_symlinks=False):
                yield from _pictures(Path(entry.path), depth - 1)
            elif _is_picture(entry):
                yield entry.path


def _is_picture(entry: os.DirEntry[str]) -> bool:
    return entry.name.lower().endswith(SUFFIXES) and not entry.is_dir()


def _shared_out(pictures: dict[str, list[str]], root: Path, val_fraction: float, seed: int) -> Listing:
    _require_classes(pictures, root)
    single = [name for name, paths in pictures.items() if len(paths) == 1]
    if single:
        raise DataError(f"{_named(single)} of {str(root)!r} must have two pictures or more: one is for testing.")
    train: list[tuple[str, int]] = []
    test: list[tuple[str, int]] = []
    for label, paths in enumerate(pictures.values()):
        held_out = min(max(round(len(paths) * val_fraction), 1), len(paths) - 1)
        for_testing = torch.zeros(len(paths), dtype=torch.bool)
        for_testing[shuffled(seed + label, len(paths))[:held_out]] = True
        for path, testing in zip(paths, for_testing.tolist(), strict=True):
            (test if testing else train).append((path, label))
    return Listing(tuple(pictures), train, test)


def _as_given(train: dict[str, list[str]], test: dict[str, list[str]], training: Path, testing: Path) -> Listing:
    _require_classes(train, training)
    unknown = [name for name in test if name not in train]
    if unknown:
        raise DataError(f"{_named(unknown)} of {str(testing)!r} must also be in {str(training)!r}.")
    if not any(test.values()):
        raise DataError(f"the folder {str(testing)!r} has no pictures ({', '.join(SUFFIXES)}).")
    labels = {name: label for label, name in enumerate(train)}

    def listed(pictures: dict[str, list[str]]) -> list[tuple[str, int]]:
        return [(path, labels[name]) for name, paths in pictures.items() for path in paths]

    return Listing(tuple(train), listed(train), listed(test))


def _require_classes(pictures: dict[str, list[str]], folder: Path) -> None:
    if len(pictures) < 2:
        found = f"only {next(iter(pictures))!r}" if pictures else "none"
        raise DataError(
            f"the folder {str(folder)!r} must have a folder for each of two classes or more, found {found}."
        )
    empty = [name for name, paths in pictures.items() if not paths]
    if empty:
        raise DataError(f"{_named(empty)} of {str(folder)!r} must have pictures ({', '.join(SUFFIXES)}), found none.")


def _named(classes: list[str]) -> str:
    """Return "the class 'a'", or the first few of many."""
    shown = ", ".join(map(repr, classes[:5])) + (f" and {len(classes) - 5} more" if len(classes) > 5 else "")
    return f"the class {shown}" if len(classes) == 1 else f"the classes {shown}"
