"""The data set `folder`: image files in one folder per class, decoded when needed, for data larger than memory."""

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

from spherenet.data.augmentation import Augmentation, Purpose, augment, draw, shuffled
from spherenet.data.images import SUFFIXES, Preprocessing, center_offset, decode, normalize
from spherenet.data.splits import Batch, DataDir, Dataset, DatasetInfo, LoadOptions, Order, Progress, Split
from spherenet.data.workers import read_ahead
from spherenet.errors import DataError
from spherenet.files import user_path

__all__ = ["FOLDER", "FolderSplit", "Listing", "check_images", "list_folder"]

MAX_DEPTH = 16  # of folders below a class
TEST_FOLDERS = ("val", "test")
IMAGENET_SIZE, IMAGENET_RESIZE = 224, 256


class Listing(NamedTuple):
    """The classes, and per split the paths of the images below the root with their labels."""

    classes: tuple[str, ...]
    train: list[tuple[str, int]]
    test: list[tuple[str, int]]


def list_folder(root: Path, *, val_fraction: float, seed: int) -> Listing:
    """Return the images below `root`, sorted by name.

    `root` holds either `train/` and `val/` (or `test/`) with one folder per class, or the folders of the classes
    themselves. In the second case a fraction of each class is kept for testing: at least one image, and at least one
    remains for training. Hidden files and files without an image suffix are ignored.

    Args:
        root: The folder.
        val_fraction: Fraction of each class to keep for testing.
        seed: Seed of this choice.

    Raises:
        DataError: The folder is missing or unreadable, has fewer than two classes, or a class has too few images or
            is missing in `train/`.
    """
    root = root.absolute()
    if not os.path.isdir(root):
        raise DataError(f"there is no folder {str(root)!r}.")
    try:
        training = _training_folder(root)
        if training is None:
            return _split_randomly(_list_classes(root, root), root, val_fraction, seed)
        testing = next((root / name for name in TEST_FOLDERS if os.path.isdir(root / name)), None)
        if testing is None:
            raise DataError(
                f"the folder {str(root)!r} must have val/ or test/ beside train/, found neither; "
                f"use {str(training)!r} as the folder to keep a fraction of it for testing."
            )
        return _use_given_split(_list_classes(training, root), _list_classes(testing, root), training, testing)
    except OSError as error:
        raise DataError(f"the folder {str(error.filename)!r} cannot be read: {error.strerror}.") from None


def _training_folder(root: Path) -> Path | None:
    """Return `train/` if it holds folders of classes; "train" may also be the name of a class."""
    training = root / "train"
    if not os.path.isdir(training):
        return None
    with os.scandir(training) as entries:
        visible = [entry for entry in entries if not entry.name.startswith(".")]
    is_class = any(_is_image(entry) for entry in visible) or not any(entry.is_dir() for entry in visible)
    return None if is_class else training


def _list_classes(folder: Path, root: Path) -> dict[str, list[str]]:
    """Return the images per class as paths below `root`; classes and images are sorted."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
    for name in names:
        if not name.isprintable():  # control characters or invalid UTF-8
            raise DataError(f"the names of class folders in {str(folder)!r} must be printable, got {name!r}.")
    start = len(os.path.join(root, ""))
    return {name: sorted(path[start:] for path in _image_files(folder / name, MAX_DEPTH)) for name in names}


def _image_files(folder: Path, depth: int) -> Iterator[str]:
    if depth < 0:
        raise DataError(f"folders must be at most {MAX_DEPTH} levels below their class, got {str(folder)!r}.")
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            # Links to files are followed; links to folders are not, since they could form a cycle.
            if entry.is_dir(follow_symlinks=False):
                yield from _image_files(Path(entry.path), depth - 1)
            elif _is_image(entry):
                yield entry.path


def _is_image(entry: os.DirEntry[str]) -> bool:
    return entry.name.lower().endswith(SUFFIXES) and not entry.is_dir()


def _split_randomly(images: dict[str, list[str]], root: Path, val_fraction: float, seed: int) -> Listing:
    _require_classes(images, root)
    single = [name for name, paths in images.items() if len(paths) == 1]
    if single:
        raise DataError(f"{_format_classes(single)} of {str(root)!r} must have at least two images, got one.")
    train: list[tuple[str, int]] = []
    test: list[tuple[str, int]] = []
    for label, paths in enumerate(images.values()):
        test_count = min(max(round(len(paths) * val_fraction), 1), len(paths) - 1)
        test_indices = set(shuffled(seed + label, len(paths))[:test_count].tolist())
        for index, path in enumerate(paths):
            (test if index in test_indices else train).append((path, label))
    return Listing(tuple(images), train, test)


def _use_given_split(train: dict[str, list[str]], test: dict[str, list[str]], training: Path, testing: Path) -> Listing:
    _require_classes(train, training)
    unknown = [name for name in test if name not in train]
    if unknown:
        raise DataError(f"{_format_classes(unknown)} of {str(testing)!r} must also be in {str(training)!r}.")
    if not any(test.values()):
        raise DataError(f"the folder {str(testing)!r} has no images ({', '.join(SUFFIXES)}).")
    labels = {name: label for label, name in enumerate(train)}

    def with_labels(images: dict[str, list[str]]) -> list[tuple[str, int]]:
        return [(path, labels[name]) for name, paths in images.items() for path in paths]

    return Listing(tuple(train), with_labels(train), with_labels(test))


def _require_classes(images: dict[str, list[str]], folder: Path) -> None:
    if len(images) < 2:
        got = f"only {next(iter(images))!r}" if images else "none"
        raise DataError(f"the folder {str(folder)!r} must have folders of at least two classes, got {got}.")
    empty = [name for name, paths in images.items() if not paths]
    if empty:
        suffixes = ", ".join(SUFFIXES)
        raise DataError(f"{_format_classes(empty)} of {str(folder)!r} must have images ({suffixes}), got none.")


def _format_classes(names: list[str]) -> str:
    """Return "the class 'a'" or the first five of several classes."""
    shown = ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"the class {shown}" if len(names) == 1 else f"the classes {shown}"


def _find(data_dir: DataDir) -> Path | None:
    folder = user_path(data_dir) if data_dir is not None else None
    return folder if folder is not None and os.path.isdir(folder) else None


def _load(options: LoadOptions) -> Dataset:
    if options.data_dir is None:
        raise DataError("the data set 'folder' requires a folder of images: set data_dir (--data-dir).")
    root = user_path(options.data_dir).absolute()
    resize = round(options.preprocessing.size[0] * IMAGENET_RESIZE / IMAGENET_SIZE)
    preprocessing = Preprocessing.standard(
        options.preprocessing.size, options.preprocessing.channels, resize=(resize, resize)
    )
    listing = list_folder(root, val_fraction=options.val_fraction, seed=options.seed)

    def split(images: list[tuple[str, int]]) -> FolderSplit:
        labels = torch.tensor([label for _, label in images], dtype=torch.int64)
        return FolderSplit(root, [path for path, _ in images], labels, preprocessing)

    return Dataset("folder", listing.classes, preprocessing, split(listing.train), split(listing.test))


FOLDER = DatasetInfo(
    summary="your own images, class/name.jpg",
    classes=None,
    train=None,
    test=None,
    size=(IMAGENET_SIZE, IMAGENET_SIZE),
    channels=3,
    augmentation="imagenet",
    find=_find,
    load=_load,
)

_Key = tuple[int, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]  # epoch, indices


class FolderSplit(Split):
    """A split of image files, decoded, resized and cropped by workers and augmented on the device.

    Args:
        root: Folder of the images.
        paths: Paths below `root`.
        labels: int64 [N] on the CPU.
        preprocessing: Conversion to the network's input.
    """

    def __init__(self, root: Path, paths: Sequence[str], labels: Tensor, preprocessing: Preprocessing) -> None:
        if labels.dtype != torch.int64 or labels.shape != (len(paths),):
            raise TypeError(f"labels must be int64 [{len(paths)}], got {labels.dtype} {list(labels.shape)}.")
        self.labels = labels
        self.preprocessing = preprocessing
        self._root = root
        # One array of bytes: the reference counts of a list of strings would copy its pages into every worker.
        self._paths = np.array([os.fsencode(path) for path in paths], dtype=np.bytes_)

    def path(self, index: int) -> Path:
        """Return the path of the image at `index`."""
        return self._root / os.fsdecode(bytes(self._paths[index]))

    def subset(self, indices: Tensor) -> FolderSplit:
        """Return a split of the images at `indices`."""
        self.require_indices(indices)
        subset = FolderSplit(self._root, [], torch.empty(0, dtype=torch.int64), self.preprocessing)
        subset.labels, subset._paths = self.labels[indices], self._paths[indices.numpy()]
        return subset

    def _hash(self) -> hashlib.blake2b:
        """Return a hash of labels and paths below the root, so that the folder may be moved."""
        digest = super()._hash()
        for path in self._paths:
            digest.update(bytes(path) + b"\0")
        return digest

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
        """Yield one batch on `device` per (epoch, indices) of `order`; see `Split.batches`."""
        device = torch.device(device)
        reader = _BatchReader(self, random_crop=augmentation is not None and augmentation.random_crop, seed=seed)
        requested: deque[tuple[int, Tensor]] = deque()

        def keys() -> Iterator[_Key]:
            for epoch, indices in order:
                requested.append((epoch, self.require_indices(indices)))
                # As numpy: torch would move the caller's tensor into shared memory, with one open file per tensor.
                yield epoch, indices.numpy()

        on_gpu = device.type == "cuda"
        decoded = read_ahead(reader, keys(), workers=workers, pin_memory=on_gpu, while_waiting=while_waiting)
        try:
            for pixels in decoded:
                epoch, indices = requested.popleft()
                images = pixels.to(device, non_blocking=True)
                if augmentation is not None:
                    images = augment(images, indices, augmentation, seed=seed, epoch=epoch)
                labels = self.labels[indices].to(device, non_blocking=device.type != "mps")
                yield Batch(normalize(images, self.preprocessing), labels, indices)
        finally:
            decoded.close()


class _BatchReader:
    """Decodes the images of one batch into uint8 [N, H, W, C], cropped to the network's size."""

    def __init__(self, split: FolderSplit, *, random_crop: bool, seed: int) -> None:
        self.split, self.random_crop, self.seed = split, random_crop, seed

    def __call__(self, key: _Key) -> Tensor:
        epoch, indices = key[0], torch.from_numpy(key[1])
        preprocessing = self.split.preprocessing
        (height, width), channels = preprocessing.size, preprocessing.channels
        outer = preprocessing.resize or preprocessing.size
        if self.random_crop:
            tops = draw(self.seed, epoch, indices, Purpose.CROP_TOP, outer[0] - height + 1).tolist()
            lefts = draw(self.seed, epoch, indices, Purpose.CROP_LEFT, outer[1] - width + 1).tolist()
        else:
            top, left = center_offset(outer, preprocessing.size)
            tops, lefts = [top] * len(indices), [left] * len(indices)
        images = np.empty((len(indices), height, width, channels), dtype=np.uint8)
        for image, index, top, left in zip(images, indices.tolist(), tops, lefts, strict=True):
            image[:] = decode(self.split.path(index), outer, channels)[top : top + height, left : left + width]
        return torch.from_numpy(images)


class _ImageCheck:
    """Returns the error message of the image at an index, or None."""

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
    """Decode every image of a split and return one message per image that cannot be read.

    The images of splits in memory were decoded when they were loaded, so the result is empty for them.
    """
    messages: list[str] = []
    if isinstance(split, FolderSplit):
        for done, message in enumerate(read_ahead(_ImageCheck(split), range(len(split)), workers=workers), start=1):
            if message is not None:
                messages.append(message)
            if progress is not None:
                progress(done, len(split))
    return messages
