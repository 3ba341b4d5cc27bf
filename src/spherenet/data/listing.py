"""The listing of a folder of images: its classes, and which images are for training and which for testing.

A folder without `val/` or `test/` is split by a hash of each file's name, so that files that are added, removed or
renamed do not move others between the splits.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from spherenet.data.images import SUFFIXES, signature
from spherenet.errors import DataError

__all__ = ["Listing", "held_out", "image_files", "list_folder", "split_folders"]

MAX_DEPTH = 16  # of folders below a class
SPLIT_FOLDERS = {"validation": ("val", "valid", "validation"), "test": ("test",)}
"""Names of the folders of splits beside `train/`."""

SPLIT_NAMES = ("train", "training", "val", "valid", "validation", "test", "testing")


class Listing(NamedTuple):
    """The classes, per split the paths below the root with their labels, and the files that are not used.

    Attributes:
        classes: Names of the classes.
        train: Images for training.
        validation: Images for the selection of a checkpoint, None if no folder is for them.
        test: Images for testing.
        unused: Files in the folders of classes that are not images.
        outside: Files beside the folders of classes.
    """

    classes: tuple[str, ...]
    train: list[tuple[str, int]]
    validation: list[tuple[str, int]] | None
    test: list[tuple[str, int]]
    unused: list[str]
    outside: list[str]


def list_folder(root: Path, *, test_fraction: float, seed: int, skipped: Collection[str] = ()) -> Listing:
    """Return the images below `root`, sorted by name.

    `root` holds either `train/` and `val/` or `test/` with one folder per class, or the folders of the classes
    themselves. If there are both `val/` and `test/`, the images of `val/` are for validation; if there is one of them,
    its images are for testing. In the second case about a fraction of each class is kept for testing: at least one
    image, and at least one remains for training. Hidden files are ignored. Files without an extension are images if
    their first bytes are those of an image.

    Args:
        root: The folder.
        test_fraction: Fraction of each class to keep for testing.
        seed: Seed of this choice.
        skipped: Paths below `root` to leave out.

    Raises:
        DataError: The folder is missing or unreadable, has fewer than two classes, or a class has too few images or
            is missing in `train/`.
    """
    root = root.absolute()
    if not os.path.isdir(root):
        raise DataError(f"there is no folder {str(root)!r}; --data-dir selects another.")
    try:
        folders = split_folders(root)
        unused: list[str] = []
        outside: list[str] = []
        if not folders:
            images = _list_classes(root, root, skipped, unused, outside)
            _refuse_split_names(images, root)
            _require_classes(images, root)
            _require_two_images(images, root)
            train, test = _split(images, test_fraction, seed)
            return Listing(tuple(images), train, None, test, unused, outside)
        if len(folders) == 1:
            raise DataError(
                f"the folder {str(root)!r} must have val/ or test/ beside train/, found neither; "
                f"use {str(folders['train'])!r} as the folder to keep a fraction of it for testing."
            )
        given = {name: _list_classes(folder, root, skipped, unused, outside) for name, folder in folders.items()}
        splits = _with_labels(given, folders)
        validation = splits.get("validation") if "test" in splits else None
        test = splits["test"] if "test" in splits else splits["validation"]
        return Listing(tuple(given["train"]), splits["train"], validation, test, unused, outside)
    except OSError as error:
        raise DataError(f"the folder {str(error.filename)!r} cannot be read: {error.strerror}.") from None


def held_out(names: Sequence[bytes], fraction: float, key: str) -> list[bool]:
    """Return which images of one class are held out: those for which a hash of the name is below the fraction.

    The hash is a number from 0 to 1. It depends on the name and the key only, so that the choice for an image does not
    depend on the other images, with one exception: if no image or every image would be held out, the one with the
    smallest number is held out, or the one with the largest is not. A class of one image holds out none.

    Args:
        names: Names of the images.
        fraction: Expected fraction of images to hold out.
        key: Purpose of the choice. Choices with different keys are independent.
    """
    digests = [hashlib.blake2b(name, digest_size=8, key=key.encode()).digest() for name in names]
    numbers = [int.from_bytes(digest, "big") for digest in digests]
    chosen = [number < fraction * 2**64 for number in numbers]
    if len(chosen) > 1 and not any(chosen):
        chosen[numbers.index(min(numbers))] = True
    elif chosen and all(chosen):
        chosen[numbers.index(max(numbers))] = False
    return chosen


def _split(
    images: dict[str, list[str]], test_fraction: float, seed: int
) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Return the paths and labels for training and for testing."""
    train: list[tuple[str, int]] = []
    test: list[tuple[str, int]] = []
    for label, paths in enumerate(images.values()):
        # With slashes on every system, so that a folder is split in the same way on all of them.
        names = [os.fsencode(path.replace(os.sep, "/")) for path in paths]
        for path, tests in zip(paths, held_out(names, test_fraction, f"test {seed}"[:64]), strict=True):
            (test if tests else train).append((path, label))
    return train, test


def split_folders(root: Path) -> dict[str, Path]:
    """Return the folders of "train", "validation" and "test" that exist; none if `root` has the folders of classes.

    "train" may also be the name of a class: then `train/` has no folders, or it has images and no other split is there.
    """
    training = root / "train"
    if not os.path.isdir(training):
        return {}
    with os.scandir(training) as entries:
        visible = [entry for entry in entries if not entry.name.startswith(".")]
    found = {"train": training}
    for split, names in SPLIT_FOLDERS.items():
        folder = next((root / name for name in names if os.path.isdir(root / name)), None)
        if folder is not None:
            found[split] = folder
    has_images = any(_is_image(entry) for entry in visible)
    is_class = not any(entry.is_dir() for entry in visible) or (has_images and len(found) == 1)
    return {} if is_class else found


def _list_classes(
    folder: Path, root: Path, skipped: Collection[str], unused: list[str], outside: list[str]
) -> dict[str, list[str]]:
    """Return the images per class as paths below `root`, sorted, and append other files to `unused` and `outside`."""
    with os.scandir(folder) as entries:
        visible = [(entry.name, entry.is_dir()) for entry in entries if not entry.name.startswith(".")]
    names = sorted(name for name, is_folder in visible if is_folder)
    for name in names:
        if not name.isprintable():  # control characters or invalid UTF-8
            raise DataError(f"the names of class folders in {str(folder)!r} must be printable, got {name!r}.")
    start = len(os.path.join(root, ""))
    outside += sorted(os.path.join(folder, name)[start:] for name, is_folder in visible if not is_folder)
    classes: dict[str, list[str]] = {}
    for name in names:
        files = sorted((path[start:], is_image) for path, is_image in image_files(folder / name))
        classes[name] = [path for path, is_image in files if is_image and path not in skipped]
        unused += [path for path, is_image in files if not is_image]
    return classes


def image_files(folder: Path, depth: int = MAX_DEPTH, links: int = 0) -> Iterator[tuple[str, bool]]:
    """Yield the path of every file below a folder that is not hidden, and whether it is an image.

    Links to files are followed. Links to folders, which could form a cycle, are followed in the first `links` levels
    only; others are yielded like files that are not images.
    """
    if depth < 0:
        raise DataError(f"folders must be at most {MAX_DEPTH} levels below their class, got {str(folder)!r}.")
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=links > 0):
                yield from image_files(Path(entry.path), depth - 1, max(links - 1, 0))
            else:
                yield entry.path, _is_image(entry)


def _is_image(entry: os.DirEntry[str]) -> bool:
    if entry.is_dir():
        return False
    has_extension = bool(os.path.splitext(entry.name)[1])
    return entry.name.lower().endswith(SUFFIXES) if has_extension else signature(entry.path) is not None


def _with_labels(given: dict[str, dict[str, list[str]]], folders: dict[str, Path]) -> dict[str, list[tuple[str, int]]]:
    """Return the images of given splits with their labels, which are those of the training images."""
    train = given["train"]
    _require_classes(train, folders["train"])
    labels = {name: label for label, name in enumerate(train)}
    splits: dict[str, list[tuple[str, int]]] = {}
    for split, images in given.items():
        unknown = [name for name in images if name not in labels]
        if unknown:
            where = str(folders[split])
            raise DataError(f"{_format_classes(unknown)} of {where!r} must also be in {str(folders['train'])!r}.")
        if not any(images.values()):
            raise DataError(f"the folder {str(folders[split])!r} has no images ({', '.join(SUFFIXES)}).")
        splits[split] = [(path, labels[name]) for name, paths in images.items() for path in paths]
    return splits


def _refuse_split_names(images: dict[str, list[str]], root: Path) -> None:
    """Raise DataError if all classes have names of splits, which are not names of classes in any likelihood."""
    if len(images) > 1 and all(name.lower() in SPLIT_NAMES for name in images):
        raise DataError(
            f"the folders of {str(root)!r} must be classes, or train/ and val/ or test/ with a folder per class in "
            f"each, got {', '.join(images)}."
        )


def _require_classes(images: dict[str, list[str]], folder: Path) -> None:
    if len(images) < 2:
        got = f"only {next(iter(images))!r}" if images else "none"
        raise DataError(f"the folder {str(folder)!r} must have folders of at least two classes, got {got}.")
    empty = [name for name, paths in images.items() if not paths]
    if empty:
        suffixes = ", ".join(SUFFIXES)
        raise DataError(f"{_format_classes(empty)} of {str(folder)!r} must have images ({suffixes}), got none.")


def _require_two_images(images: dict[str, list[str]], folder: Path) -> None:
    single = [name for name, paths in images.items() if len(paths) == 1]
    if single:
        raise DataError(f"{_format_classes(single)} of {str(folder)!r} must have at least two images, got one.")


def _format_classes(names: list[str]) -> str:
    """Return "the class 'a'" or the first five of several classes."""
    shown = ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"the class {shown}" if len(names) == 1 else f"the classes {shown}"
