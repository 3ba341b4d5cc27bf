"""Find the pictures of a folder of `class/name.jpg`, and share them out between training and testing.

A split of picture files, decoded as they are needed: for folders larger than memory.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spherenet.data.augmentation import Augmentation, Purpose, augment, draw, shuffled, without_waiting
from spherenet.data.images import SUFFIXES, Preprocessing, centre, decode, normalise
from spherenet.data.splits import Batch, Order, Progress, Split
from spherenet.data.workers import read_ahead
from spherenet.errors import DataError

__all__ = ["FolderSplit", "Listing", "check_images", "list_folder"]

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


_Key = tuple[int, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]  # epoch, indices


class FolderSplit(Split):
    """Picture files below `root` with their labels; decoded, resized and cropped by workers, the rest on the device."""

    def __init__(self, root: Path, paths: Sequence[str], labels: Tensor, preprocessing: Preprocessing) -> None:
        if labels.dtype != torch.int64 or labels.shape != (len(paths),):
            raise TypeError(f"labels must be int64 [{len(paths)}], got {labels.dtype} {list(labels.shape)}.")
        self.labels = labels
        self.preprocessing = preprocessing
        self._root = root
        # One array of bytes: a list of a million strings would be copied, page by page, into every worker as the
        # workers' reference counts touch it.
        self._paths = np.array([os.fsencode(path) for path in paths], dtype=np.bytes_)

    def path(self, index: int) -> Path:
        """Return the file of the picture at `index`."""
        return self._root / os.fsdecode(bytes(self._paths[index]))

    def subset(self, indices: Tensor) -> FolderSplit:
        """Return the split of these pictures alone."""
        self.require_indices(indices)
        made = FolderSplit(self._root, [], torch.empty(0, dtype=torch.int64), self.preprocessing)
        made.labels, made._paths = self.labels[indices], self._paths[indices.numpy()]
        return made

    def _hash(self) -> hashlib.blake2b:
        """Labels, and the paths below the root: a folder may be moved as a whole."""
        found = super()._hash()
        for path in self._paths:
            found.update(bytes(path) + b"\0")
        return found

    def batches(
        self,
        order: Order,
        *,
        device: torch.device,
        augmentation: Augmentation | None,
        seed: int = 0,
        workers: int = 0,
        while_waiting: Callable[[], None] | None = None,
    ) -> Generator[Batch, None, None]:
        """Yield one batch on `device` for each (epoch, indices) of `order`."""
        device = torch.device(device)
        reader = _BatchReader(self, random_crop=augmentation is not None and augmentation.random_crop, seed=seed)
        asked_for: deque[tuple[int, Tensor]] = deque()

        def keys() -> Iterator[_Key]:
            for epoch, indices in order:
                asked_for.append((epoch, self.require_indices(indices)))
                # As numpy: torch would move the caller's tensor into shared memory, with an open file for each.
                yield epoch, indices.numpy()

        on_gpu = device.type == "cuda"
        read = read_ahead(reader, keys(), workers=workers, pin_memory=on_gpu, while_waiting=while_waiting)
        try:
            for decoded in read:
                epoch, indices = asked_for.popleft()
                pictures = decoded.to(device, non_blocking=True)  # from pinned memory where that helps
                if augmentation is not None:
                    pictures = augment(pictures, indices, augmentation, seed=seed, epoch=epoch)
                labels = without_waiting(self.labels[indices], device)
                yield Batch(normalise(pictures, self.preprocessing), labels, indices)
        finally:
            read.close()


class _BatchReader:
    """Decodes the pictures of one batch into uint8 [N, H, W, C], cut to the network's size."""

    def __init__(self, split: FolderSplit, *, random_crop: bool, seed: int) -> None:
        self.split, self.random_crop, self.seed = split, random_crop, seed

    def __call__(self, key: _Key) -> Tensor:
        epoch, indices = key[0], torch.from_numpy(key[1])
        preprocessing = self.split.preprocessing
        (height, width), channels = preprocessing.size, preprocessing.channels
        whole = preprocessing.resize or preprocessing.size
        tops, lefts = self._corners(epoch, indices, whole, preprocessing.size)
        pictures = np.empty((len(indices), height, width, channels), dtype=np.uint8)
        for picture, index, top, left in zip(pictures, indices.tolist(), tops, lefts, strict=True):
            picture[:] = decode(self.split.path(index), whole, channels)[top : top + height, left : left + width]
        return torch.from_numpy(pictures)

    def _corners(
        self, epoch: int, indices: Tensor, whole: tuple[int, int], size: tuple[int, int]
    ) -> tuple[list[int], list[int]]:
        if not self.random_crop:
            top, left = centre(whole, size)
            return [top] * len(indices), [left] * len(indices)
        tops = draw(self.seed, epoch, indices, Purpose.CROP_TOP, whole[0] - size[0] + 1)
        lefts = draw(self.seed, epoch, indices, Purpose.CROP_LEFT, whole[1] - size[1] + 1)
        return tops.tolist(), lefts.tolist()


class _Check:
    """Says what is wrong with the picture at an index, or nothing."""

    def __init__(self, split: FolderSplit) -> None:
        self.split = split

    def __call__(self, index: int) -> str | None:
        preprocessing = self.split.preprocessing
        try:
            decode(self.split.path(index), preprocessing.resize or preprocessing.size, preprocessing.channels)
        except DataError as error:
            return str(error)
        return None


def check_images(split: Split, progress: Progress | None = None, *, workers: int = 0) -> list[str]:
    """Decode every picture of the split and return one sentence for each that cannot be read.

    Splits in memory were read whole when they were loaded: nothing is left to find.
    """
    broken: list[str] = []
    if isinstance(split, FolderSplit):
        for done, message in enumerate(read_ahead(_Check(split), range(len(split)), workers=workers), start=1):
            if message is not None:
                broken.append(message)
            if progress is not None:
                progress(done, len(split))
    return broken
