"""Splits, which turn an order of indices into batches, and the descriptions of data sets that hold them.

`Split` is the interface of all data; `TensorSplit` keeps its images in memory as one uint8 tensor.
"""

from __future__ import annotations

import copy
import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from spherenet.data.augmentation import Augmentation, augment
from spherenet.data.corruptions import Corruption, corrupt
from spherenet.data.images import MAX_PIXELS
from spherenet.data.preprocessing import Preprocessing, normalize
from spherenet.errors import InvalidArgument, InvalidArgumentType

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Batch", "Dataset", "DatasetInfo", "LoadOptions", "Order", "Progress", "Split", "TensorSplit"]

Order = Iterable[tuple[int, Tensor]]
"""The (epoch, indices) of each batch; read lazily, so it may be endless."""

Progress = Callable[[int, int], None]
"""Called as `progress(done, total)` during long operations."""

DataDir = str | os.PathLike[str] | None

VALIDATION_SEED = 1
"""Seed of the choice of validation images; not that of a run, so that runs with different seeds are comparable."""


class Batch(NamedTuple):
    """Images with their labels, ready for a network.

    Attributes:
        images: Normalized images on the device: float32 [N, C, H, W], channels-last in memory.
        labels: Labels on the device: int64 [N].
        indices: Positions of the images in the split, on the CPU: int64 [N].
    """

    images: Tensor
    labels: Tensor
    indices: Tensor


class Split(ABC):
    """One split of a data set, for training or for testing.

    Attributes:
        labels: int64 [N] on the CPU.
        preprocessing: Conversion to the network's input.
        corruption: Corruption of all images, None for none; see `corrupted`.
    """

    labels: Tensor
    preprocessing: Preprocessing
    corruption: Corruption | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def subset(self, indices: Tensor) -> Split:
        """Return a split of the images at `indices`, numbered from 0 (for example a fold of a cross-validation)."""

    def corrupted(self, corruption: Corruption | None) -> Self:
        """Return the same split with corrupted images, or with None without; no image is copied or changed.

        Images are corrupted after the augmentation and before the normalization. The corruption of an image depends on
        its index in the split; a subset numbers its images anew.

        Raises:
            ValueError: If the corruption needs colors and the images are gray.
        """
        if corruption is not None:  # tried on one pixel, so that an error comes at once
            corrupt(torch.zeros(1, self.preprocessing.channels, 1, 1, dtype=torch.uint8), corruption)
        split = copy.copy(self)
        split.corruption = corruption
        return split

    def _network_input(self, pixels: Tensor, indices: Tensor) -> Tensor:
        """Return uint8 [N, H, W, C] as the input of the network, corrupted if the split is."""
        if self.corruption is not None:
            pixels = corrupt(pixels.permute(0, 3, 1, 2), self.corruption, indices).permute(0, 2, 3, 1)
        return normalize(pixels, self.preprocessing)

    @abstractmethod
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
        """Yield one batch on `device` per (epoch, indices) of `order`, in that order.

        The augmentation of an image depends only on (seed, epoch, index), not on the batch, the order, the device or
        the number of workers or processes. Closing the generator stops the workers.

        Args:
            order: The (epoch, indices) of each batch. With workers, a few batches are requested in advance.
            device: Device of the batches.
            augmentation: Random changes of the images, or None for evaluation.
            seed: Seed of the augmentation.
            workers: Number of processes that decode images; 0 decodes in this process.
            while_waiting: Called about once per second while no batch arrives from the workers; may raise.

        Raises:
            DataError: An image cannot be read, or a worker failed.
            IndexError: An index is outside the split.
        """

    def held_out(self, fraction: float) -> Tensor:
        """Return which images a validation split holds out: bool [N], about a fraction of each class.

        The choice is stratified and reproducible: it depends on the images and their order only. A class holds out at
        least one of its images and keeps at least one; a class of one image holds out none.
        """
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(VALIDATION_SEED))
        mask = torch.zeros(len(self), dtype=torch.bool)
        for label in sorted(set(self.labels.tolist())):
            members = order[self.labels[order] == label]
            mask[members[: min(max(round(len(members) * fraction), 1), len(members) - 1)]] = True
        return mask

    def listing_hash(self) -> str:
        """Return a hash of the split's images, their order and their labels, which identifies the data."""
        return self._hash().hexdigest()

    def _hash(self) -> hashlib.blake2b:
        """Return a hash of the labels; subclasses add what identifies their images."""
        return hashlib.blake2b(self.labels.numpy().tobytes(), digest_size=16)

    def require_indices(self, indices: Tensor) -> Tensor:
        """Return `indices` if they are int64 [N] on the CPU and inside the split."""
        if not isinstance(indices, Tensor) or indices.dtype != torch.int64 or indices.dim() != 1:
            got = f"{indices.dtype} {list(indices.shape)}" if isinstance(indices, Tensor) else type(indices).__name__
            raise InvalidArgumentType("indices", f"must be an int64 tensor [N], got {got}.")
        if indices.device.type != "cpu":
            raise InvalidArgumentType("indices", f"must be on the CPU, got a tensor on {indices.device}.")
        count = len(self.labels)
        if indices.numel() and (int(indices.min()) < 0 or int(indices.max()) >= count):
            outside = int(indices[(indices < 0) | (indices >= count)][0])
            raise IndexError(f"indices must be from 0 to {count - 1}, got {outside}.")
        return indices


@dataclass(frozen=True)
class Dataset:
    """A data set that is ready for use.

    Attributes:
        name: Name of the data set.
        classes: Names of the classes, in the order of their labels.
        preprocessing: Conversion from an image to the network's input.
        train: Split for training.
        test: Split for testing.
        validation: Split for the selection of a checkpoint, held out of the training images; None if there is none.
        broken: Paths of images in the folder that cannot be read and were left out.
        messages: Sentences for the user about the files that were left out.
    """

    name: str
    classes: tuple[str, ...]
    preprocessing: Preprocessing
    train: Split
    test: Split
    validation: Split | None = None
    broken: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()


class LoadOptions(NamedTuple):
    """Options of `load_dataset` that the loader of a data set receives."""

    data_dir: DataDir
    preprocessing: Preprocessing
    test_fraction: float
    seed: int
    download: bool
    progress: Progress | None
    on_broken: Literal["stop", "skip"] = "stop"
    broken: Collection[str] | None = None
    workers: int = 0
    resize: str = "crop"
    max_pixels: int = MAX_PIXELS


@dataclass(frozen=True)
class DatasetInfo:
    """Description of a data set and the functions that find and load it.

    Attributes:
        summary: One line for users.
        classes: Number of classes; None if it depends on the folder, as for `train` and `test`.
        train: Number of training images.
        test: Number of test images.
        size: Default (height, width) of the images.
        channels: Default number of channels.
        augmentation: Name of the default augmentation.
        find: Returns the file or folder that `load` would read, or None.
        load: Returns the data set.
    """

    summary: str
    classes: int | None
    train: int | None
    test: int | None
    size: tuple[int, int]
    channels: int
    augmentation: str
    find: Callable[[DataDir], Path | None]
    load: Callable[[LoadOptions], Dataset]


LUMA = 19595, 38470, 7471  # 0.299, 0.587 and 0.114 of 2¹⁶: bit-identical to Pillow's conversion to gray
IMAGES_PER_RESIZE = 4096  # bounds the float copies of a resize
CPU = torch.device("cpu")


class TensorSplit(Split):
    """A split in memory. `batches` ignores `workers`: nothing has to be decoded.

    Images of another size or number of channels than the preprocessing's are converted once, in the constructor. The
    first batch on another device copies all images to it; subsets share the copy.

    Args:
        images: uint8 [N, H, W, C] on the CPU, C = 1 or 3.
        labels: int64 [N] on the CPU.
        preprocessing: Conversion to the network's input, without `resize`.
    """

    def __init__(self, images: Tensor, labels: Tensor, preprocessing: Preprocessing) -> None:
        if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[-1] not in (1, 3):
            raise InvalidArgumentType(
                "images", f"must be uint8 [N, H, W, 1 or 3], got {images.dtype} {list(images.shape)}."
            )
        if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
            raise InvalidArgumentType(
                "labels", f"must be int64 [{len(images)}], got {labels.dtype} {list(labels.shape)}."
            )
        if len(images) == 0:
            raise InvalidArgument("images", "must hold at least one image, got none.")
        if preprocessing.resize is not None:
            raise InvalidArgument(
                "preprocessing.resize", f"must be None for images in memory, got {preprocessing.resize}."
            )
        self.labels = labels
        self.preprocessing = preprocessing
        self._images = {CPU: _resize(_convert_channels(images, preprocessing.channels), preprocessing.size)}
        self._positions = torch.arange(len(labels))

    def subset(self, indices: Tensor) -> TensorSplit:
        """Return a split of the images at `indices`; no image is copied."""
        self.require_indices(indices)
        subset = object.__new__(TensorSplit)
        subset.labels, subset.preprocessing, subset._images = self.labels[indices], self.preprocessing, self._images
        subset._positions, subset.corruption = self._positions[indices], self.corruption
        return subset

    def _hash(self) -> hashlib.blake2b:
        """Return a hash of labels, positions and all pixels."""
        digest = super()._hash()
        digest.update(self._positions.numpy().tobytes())
        digest.update(self._images[CPU].numpy().data)
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
        device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
        if device not in self._images:
            self._images[device] = self._images[CPU].to(device)
        images = self._images[device]
        # A blocking copy would wait until the device has finished its queued work. CUDA reads ordinary memory before
        # the call returns, so that the source may be freed; MPS does not guarantee this.
        non_blocking = device.type != "mps"
        for epoch, indices in order:
            is_valid = isinstance(indices, Tensor) and indices.dtype == torch.int64 and indices.dim() == 1
            is_valid = is_valid and indices.device.type == "cpu"
            if not is_valid or (len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < len(self.labels)):
                self.require_indices(indices)
            positions = self._positions[indices].to(device, non_blocking=non_blocking)
            # Images as rows of a matrix: index_select copies each with one memcpy, indexing does not.
            selected = images.flatten(1).index_select(0, positions).view(-1, *images.shape[1:])
            if augmentation is not None:
                selected = augment(selected, indices, augmentation, seed=seed, epoch=epoch)
            labels = self.labels[indices].to(device, non_blocking=non_blocking)
            yield Batch(self._network_input(selected, indices), labels, indices)


def _convert_channels(images: Tensor, channels: int) -> Tensor:
    """Convert between gray and RGB as Pillow does."""
    if images.shape[-1] == channels:
        return images
    if channels == 3:
        return images.expand(-1, -1, -1, 3).contiguous()
    gray = torch.full(images.shape[:3], 0x8000, dtype=torch.int32)
    for channel, weight in enumerate(LUMA):
        gray.add_(images[..., channel], alpha=weight)
    return gray.bitwise_right_shift_(16).to(torch.uint8).unsqueeze(-1)


def _resize(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize images [N, H, W, C] by bilinear interpolation with antialiasing."""
    if tuple(images.shape[1:3]) == size:
        return images.contiguous()
    resized = [
        F.interpolate(chunk.permute(0, 3, 1, 2), size, mode="bilinear", antialias=True)
        for chunk in torch.split(images, IMAGES_PER_RESIZE)
    ]
    return torch.cat(resized).permute(0, 2, 3, 1).contiguous()
