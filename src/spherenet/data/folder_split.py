"""A split of picture files, decoded as they are needed: for folders larger than memory."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from spherenet.data.augmentation import Augmentation, augment
from spherenet.data.draws import Purpose, draw
from spherenet.data.pictures import centre, decode
from spherenet.data.preprocessing import Preprocessing, normalise
from spherenet.data.reading_ahead import read_ahead
from spherenet.data.split import Batch, Order, Progress, Split
from spherenet.data.transfer import without_waiting
from spherenet.errors import DataError

__all__ = ["FolderSplit", "check_images"]

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
