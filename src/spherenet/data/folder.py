"""The data set `folder`: image files in one folder per class, decoded when needed, for data larger than memory."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from spherenet._util.files import user_path
from spherenet.data.augmentation import Augmentation, Purpose, augment, draw
from spherenet.data.images import MAX_PIXELS, Pixels, center_offset, decode, unsupported
from spherenet.data.listing import Listing, held_out, list_folder
from spherenet.data.preprocessing import Preprocessing
from spherenet.data.splits import Batch, DataDir, Dataset, DatasetInfo, LoadOptions, Order, Progress, Split
from spherenet.data.workers import read_ahead
from spherenet.errors import DataError, InvalidArgumentType

__all__ = ["FOLDER", "FolderSplit", "broken_images", "check_images", "describe_broken"]

IMAGENET_SIZE, IMAGENET_RESIZE = 224, 256
MAX_NAMED = 5
"""Number of files that a message names."""


def _find(data_dir: DataDir) -> Path | None:
    folder = user_path(data_dir) if data_dir is not None else None
    return folder if folder is not None and os.path.isdir(folder) else None


def _load(options: LoadOptions) -> Dataset:
    if options.data_dir is None:
        raise DataError("the data set 'folder' requires a folder of images: set data_dir (--data-dir).")
    root = user_path(options.data_dir).absolute()
    resize = round(options.preprocessing.size[0] * IMAGENET_RESIZE / IMAGENET_SIZE)
    preprocessing = Preprocessing.standard(
        options.preprocessing.size,
        options.preprocessing.channels,
        resize=(resize, resize),
        keep_aspect=options.resize == "crop",
        standardize=options.preprocessing.standardize,
    )

    def listing_without(skipped: Collection[str]) -> Listing:
        fraction, seed = options.test_fraction, options.seed
        return list_folder(root, test_fraction=fraction, seed=seed, skipped=frozenset(skipped))

    def split(images: list[tuple[str, int]]) -> FolderSplit:
        labels = torch.tensor([label for _, label in images], dtype=torch.int64)
        return FolderSplit(root, [path for path, _ in images], labels, preprocessing, options.max_pixels)

    broken = options.broken or ()
    listing = listing_without(broken)
    messages = _messages(listing, root)
    if options.broken is None:
        images = listing.train + (listing.validation or []) + listing.test
        if options.on_broken == "skip":
            errors = broken_images(split(images), options.progress, workers=options.workers)
        else:  # known without reading the files
            reasons = {index: unsupported(path) for index, (path, _) in enumerate(images)}
            errors = {index: f"{images[index][0]!r}: {reason}" for index, reason in reasons.items() if reason}
        if errors and options.on_broken == "stop":
            remedy = "convert or remove them, or add --on-broken skip"
            raise DataError(f"{describe_broken(errors.values(), len(images))}; {remedy}.")
        if errors:
            broken = tuple(images[index][0] for index in errors)
            message = describe_broken(errors.values(), len(images))
            try:
                listing = listing_without(broken)
            except DataError as error:
                raise DataError(f"{message}; without them {error}") from None
            messages.append(f"{message}; they are left out.")
    return Dataset(
        "folder",
        listing.classes,
        preprocessing,
        split(listing.train),
        split(listing.test),
        None if listing.validation is None else split(listing.validation),
        broken=tuple(broken),
        messages=tuple(messages),
    )


def _messages(listing: Listing, root: Path) -> list[str]:
    """Return sentences about files of a folder that a user may be wrong about."""
    titles = {
        "that are not images": listing.unused,
        "that are beside the folders of the classes and not used": listing.outside,
        "without an extension, which are used": [
            path
            for path, _ in listing.train + (listing.validation or []) + listing.test
            if not os.path.splitext(path)[1]
        ],
    }
    return [
        f"files in {str(root)!r} {title}: {len(paths)} ({_first(list(map(repr, paths)), ', ')})."
        for title, paths in titles.items()
        if paths
    ]


def describe_broken(messages: Iterable[str], total: int) -> str:
    """Return "2 of 10 images cannot be read: …", without a period, which names the first few.

    Args:
        messages: Error message of each image.
        total: Number of images that were decoded.
    """
    listed = [message.rstrip(".") for message in messages]
    return f"{len(listed)} of {total} images cannot be read: {_first(listed, '; ')}"


def _first(texts: list[str], separator: str) -> str:
    more = f" and {len(texts) - MAX_NAMED} more" if len(texts) > MAX_NAMED else ""
    return separator.join(texts[:MAX_NAMED]) + more


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
        max_pixels: Largest number of pixels of an image file.
    """

    def __init__(
        self,
        root: Path,
        paths: Sequence[str],
        labels: Tensor,
        preprocessing: Preprocessing,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        if labels.dtype != torch.int64 or labels.shape != (len(paths),):
            raise InvalidArgumentType(
                "labels", f"must be int64 [{len(paths)}], got {labels.dtype} {list(labels.shape)}."
            )
        self.labels = labels
        self.preprocessing = preprocessing
        self.max_pixels = max_pixels
        self._root = root
        # One array of bytes: the reference counts of a list of strings would copy its pages into every worker.
        self._paths = np.array([os.fsencode(path) for path in paths], dtype=np.bytes_)

    def path(self, index: int) -> Path:
        """Return the path of the image at `index`."""
        return self._root / os.fsdecode(bytes(self._paths[index]))

    def decode(self, index: int) -> Pixels:
        """Return the image at `index` before its crop: uint8 [H, W, C]. Raises DataError if it cannot be read."""
        outer, channels = self.preprocessing.outer, self.preprocessing.channels
        keep_aspect = self.preprocessing.keep_aspect
        return decode(self.path(index), outer, channels, keep_aspect, max_pixels=self.max_pixels)

    def subset(self, indices: Tensor) -> FolderSplit:
        """Return a split of the images at `indices`."""
        self.require_indices(indices)
        subset = FolderSplit(self._root, [], torch.empty(0, dtype=torch.int64), self.preprocessing, self.max_pixels)
        subset.labels, subset._paths = self.labels[indices], self._paths[indices.numpy()]
        subset.corruption = self.corruption
        return subset

    def held_out(self, fraction: float) -> Tensor:
        """Return which images a validation split holds out, by a hash of the name as in `listing.held_out`."""
        mask = torch.zeros(len(self), dtype=torch.bool)
        for members in torch.split(self.labels.argsort(stable=True), self.labels.bincount().tolist()):
            names = [bytes(self._paths[index]).replace(os.fsencode(os.sep), b"/") for index in members.tolist()]
            mask[members] = torch.tensor(held_out(names, fraction, "validation"), dtype=torch.bool)
        return mask

    def class_hashes(self, classes: int) -> list[str]:
        """Return a hash of the names of the images per class."""
        members = torch.split(self.labels.argsort(stable=True), self.labels.bincount(minlength=classes).tolist())
        return [self.subset(indices).listing_hash()[:8] for indices in members]

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
                yield Batch(self._network_input(images, indices), labels, indices)
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
        outer = preprocessing.outer
        if self.random_crop:
            tops = draw(self.seed, epoch, indices, Purpose.CROP_TOP, outer[0] - height + 1).tolist()
            lefts = draw(self.seed, epoch, indices, Purpose.CROP_LEFT, outer[1] - width + 1).tolist()
        else:
            top, left = center_offset(outer, preprocessing.size)
            tops, lefts = [top] * len(indices), [left] * len(indices)
        images = np.empty((len(indices), height, width, channels), dtype=np.uint8)
        for image, index, top, left in zip(images, indices.tolist(), tops, lefts, strict=True):
            try:
                pixels = self.split.decode(index)
            except DataError as error:
                remedy = "--on-broken skip leaves such images out, spherenet data lists them"
                raise DataError(f"{str(error).rstrip('.')}; {remedy}.") from None
            image[:] = pixels[top : top + height, left : left + width]
        return torch.from_numpy(images)


class _ImageCheck:
    """Returns the error message of the image at an index, or None."""

    def __init__(self, split: FolderSplit) -> None:
        self.split = split

    def __call__(self, index: int) -> str | None:
        try:
            self.split.decode(index)
        except DataError as error:
            return str(error)
        return None


def broken_images(split: Split, progress: Progress | None = None, *, workers: int = 0) -> dict[int, str]:
    """Decode every image of a split and return the error message of each image that cannot be read, by its index.

    The images of splits in memory were decoded when they were loaded, so the result is empty for them.

    Args:
        split: Images to decode.
        progress: Called with (done, total) after each image.
        workers: Number of processes that decode images.
    """
    messages: dict[int, str] = {}
    if isinstance(split, FolderSplit):
        for index, message in enumerate(read_ahead(_ImageCheck(split), range(len(split)), workers=workers)):
            if message is not None:
                messages[index] = message
            if progress is not None:
                progress(index + 1, len(split))
    return messages


def check_images(split: Split, progress: Progress | None = None, *, workers: int = 0) -> list[str]:
    """Decode every image of a split and return one message per image that cannot be read, see `broken_images`.

    Args:
        split: Images to decode.
        progress: Called with (done, total) after each image.
        workers: Number of processes that decode images.
    """
    return list(broken_images(split, progress, workers=workers).values())
