"""The listing of a folder of images: its classes, and which images are for training and which for testing.

A folder without `val/` or `test/` is split by a hash of each file's name, so that files that are added, removed or
renamed do not move others between the splits.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from spherenet.data.augmentation import shuffled
from spherenet.data.images import EARLIER_SUFFIXES, SUFFIXES, signature
from spherenet.errors import DataError

__all__ = ["Listing", "SplitRule", "held_out", "image_files", "list_folder"]

MAX_DEPTH = 16  # of folders below a class
TEST_FOLDERS = ("val", "test")

SplitRule = Literal["name", "index"]
"""How the test images of a folder are chosen: by a hash of the name, or by index, as earlier versions did."""


class Listing(NamedTuple):
    """The classes, per split the paths below the root with their labels, and the files that are not used.

    Attributes:
        classes: Names of the classes.
        train: Images for training.
        test: Images for testing.
        unused: Files in the folders of classes that are not images.
        outside: Files beside the folders of classes.
    """

    classes: tuple[str, ...]
    train: list[tuple[str, int]]
    test: list[tuple[str, int]]
    unused: list[str]
    outside: list[str]


def list_folder(
    root: Path, *, test_fraction: float, seed: int, rule: SplitRule = "name", skipped: Collection[str] = ()
) -> Listing:
    """Return the images below `root`, sorted by name.

    `root` holds either `train/` and `val/` (or `test/`) with one folder per class, or the folders of the classes
    themselves. In the second case about a fraction of each class is kept for testing: at least one image, and at least
    one remains for training. Hidden files are ignored. Files without an extension are images if their first bytes are
    those of an image.

    Args:
        root: The folder.
        test_fraction: Fraction of each class to keep for testing.
        seed: Seed of this choice.
        rule: "name" as in `held_out`. "index" is that of earlier versions, in which every file that is added or removed
            changes the choice; files of the formats that were not supported then are not listed.
        skipped: Paths below `root` to leave out.

    Raises:
        DataError: The folder is missing or unreadable, has fewer than two classes, or a class has too few images or
            is missing in `train/`.
    """
    root = root.absolute()
    if not os.path.isdir(root):
        raise DataError(f"there is no folder {str(root)!r}; --data-dir selects another.")
    try:
        training = _training_folder(root, rule)
        unused: list[str] = []
        outside: list[str] = []
        if training is None:
            images = _list_classes(root, root, rule, skipped, unused, outside)
            _require_classes(images, root)
            _require_two_images(images, root)
            return Listing(tuple(images), *_split(images, test_fraction, seed, rule), unused, outside)
        testing = next((root / name for name in TEST_FOLDERS if os.path.isdir(root / name)), None)
        if testing is None:
            raise DataError(
                f"the folder {str(root)!r} must have val/ or test/ beside train/, found neither; "
                f"use {str(training)!r} as the folder to keep a fraction of it for testing."
            )
        train, test = (_list_classes(folder, root, rule, skipped, unused, outside) for folder in (training, testing))
        return Listing(*_use_given_split(train, test, training, testing), unused, outside)
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
    images: dict[str, list[str]], test_fraction: float, seed: int, rule: SplitRule
) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Return the paths and labels for training and for testing."""
    train: list[tuple[str, int]] = []
    test: list[tuple[str, int]] = []
    for label, paths in enumerate(images.values()):
        if rule == "name":
            # With slashes on every system, so that a folder is split in the same way on all of them.
            names = [os.fsencode(path.replace(os.sep, "/")) for path in paths]
            is_test = held_out(names, test_fraction, f"test {seed}"[:64])
        else:
            test_count = min(max(round(len(paths) * test_fraction), 1), len(paths) - 1)
            chosen = set(shuffled(seed + label, len(paths))[:test_count].tolist())
            is_test = [index in chosen for index in range(len(paths))]
        for path, tests in zip(paths, is_test, strict=True):
            (test if tests else train).append((path, label))
    return train, test


def _training_folder(root: Path, rule: SplitRule) -> Path | None:
    """Return `train/` if it holds folders of classes; "train" may also be the name of a class."""
    training = root / "train"
    if not os.path.isdir(training):
        return None
    with os.scandir(training) as entries:
        visible = [entry for entry in entries if not entry.name.startswith(".")]
    is_class = any(_is_image(entry, rule) for entry in visible) or not any(entry.is_dir() for entry in visible)
    return None if is_class else training


def _list_classes(
    folder: Path, root: Path, rule: SplitRule, skipped: Collection[str], unused: list[str], outside: list[str]
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
        files = sorted((path[start:], is_image) for path, is_image in image_files(folder / name, rule))
        classes[name] = [path for path, is_image in files if is_image and path not in skipped]
        unused += [path for path, is_image in files if not is_image]
    return classes


def image_files(folder: Path, rule: SplitRule = "name", depth: int = MAX_DEPTH) -> Iterator[tuple[str, bool]]:
    """Yield the path of every file below a folder that is not hidden, and whether it is an image."""
    if depth < 0:
        raise DataError(f"folders must be at most {MAX_DEPTH} levels below their class, got {str(folder)!r}.")
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            # Links to files are followed; links to folders are not, since they could form a cycle.
            if entry.is_dir(follow_symlinks=False):
                yield from image_files(Path(entry.path), rule, depth - 1)
            elif not entry.is_dir():
                yield entry.path, _is_image(entry, rule)


def _is_image(entry: os.DirEntry[str], rule: SplitRule) -> bool:
    if entry.is_dir():
        return False
    if rule == "index":
        return entry.name.lower().endswith(EARLIER_SUFFIXES)
    has_extension = bool(os.path.splitext(entry.name)[1])
    return entry.name.lower().endswith(SUFFIXES) if has_extension else signature(entry.path) is not None


def _use_given_split(
    train: dict[str, list[str]], test: dict[str, list[str]], training: Path, testing: Path
) -> tuple[tuple[str, ...], list[tuple[str, int]], list[tuple[str, int]]]:
    _require_classes(train, training)
    unknown = [name for name in test if name not in train]
    if unknown:
        raise DataError(f"{_format_classes(unknown)} of {str(testing)!r} must also be in {str(training)!r}.")
    if not any(test.values()):
        raise DataError(f"the folder {str(testing)!r} has no images ({', '.join(SUFFIXES)}).")
    labels = {name: label for label, name in enumerate(train)}

    def with_labels(images: dict[str, list[str]]) -> list[tuple[str, int]]:
        return [(path, labels[name]) for name, paths in images.items() for path in paths]

    return tuple(train), with_labels(train), with_labels(test)


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
