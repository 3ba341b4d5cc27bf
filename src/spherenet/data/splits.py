"""The one interface of every data set: splits that turn an order of indices into batches.

A split that lives in memory as one uint8 tensor and is augmented in batches on the device.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from spherenet.data.augmentation import Augmentation, augment, without_waiting
from spherenet.data.images import Preprocessing, normalise

__all__ = ["Batch", "Dataset", "Order", "Progress", "Split", "TensorSplit"]


Order = Iterable[tuple[int, Tensor]]
"""The batches asked for, one (epoch, indices) at a time; read lazily, so it may be endless."""

Progress = Callable[[int, int], None]
"""Called as `progress(done, total)` while something long goes on."""


class Batch(NamedTuple):
    """Pictures as a network takes them.

    `images` float32 [N, C, H, W], normalised, channels-last in memory, and `labels` int64 [N], both on the device;
    `indices` int64 [N], on the CPU: the pictures' positions in the split.
    """

    images: Tensor
    labels: Tensor
    indices: Tensor


class Split(ABC):
    """One part of a data set; `labels` is int64 [N] on the CPU."""

    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def subset(self, indices: Tensor) -> Split:
        """Return the split of these pictures alone, counted anew from 0 (a fold of a cross-validation)."""

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
        """Yield one batch on `device` for each (epoch, indices) of `order`, in that order.

        `augmentation=None` is for evaluation. The augmentation of a picture depends only on (seed, epoch, its index):
        not on batch, order, device, workers or the number of processes. `workers` processes read ahead where pictures
        must be decoded; a few batches of `order` are then asked for in advance. Closing the generator ends them.
        `while_waiting` is called about every second in which no batch arrives from them; it may raise.
        A picture that cannot be read raises DataError, an index outside the split IndexError.
        """

    def listing_hash(self) -> str:
        """Return a hash of which images the split has, in which order and of which class: other data, another hash."""
        return self._hash().hexdigest()

    def _hash(self) -> hashlib.blake2b:
        """A hash of the labels, to which a split adds what tells its images apart."""
        return hashlib.blake2b(self.labels.numpy().tobytes(), digest_size=16)

    def require_indices(self, indices: Tensor) -> Tensor:
        """Return `indices` if they are int64 [N] on the CPU and all in the split."""
        if not isinstance(indices, Tensor) or indices.dtype != torch.int64 or indices.dim() != 1:
            raise TypeError(f"indices must be an int64 tensor [N], got {_described(indices)}.")
        if indices.device.type != "cpu":
            raise TypeError(f"indices must be on the CPU, got a tensor on {indices.device}.")
        if indices.numel() and (int(indices.min()) < 0 or int(indices.max()) >= len(self)):
            outside = int(indices[(indices < 0) | (indices >= len(self))][0])
            raise IndexError(f"indices must be from 0 to {len(self) - 1}, got {outside}.")
        return indices


def _described(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


@dataclass(frozen=True)
class Dataset:
    """A named data set: its classes in the order of their labels, how its pictures are prepared, and its two splits."""

    name: str
    classes: tuple[str, ...]
    preprocessing: Preprocessing
    train: Split
    test: Split


LUMA = 19595, 38470, 7471  # 0.299, 0.587 and 0.114 of 2¹⁶: Pillow's grey, to the last bit
RESIZED_AT_ONCE = 4096  # pictures: bounds the float copies that a resize makes


class TensorSplit(Split):
    """Pictures uint8 [N, H, W, C] and labels int64 [N], both on the CPU; `workers` are not needed and not used.

    Pictures of another size or number of channels than the preprocessing's are converted once, here. On another
    device a copy of all pictures is kept there from the first batch on; subsets share it.
    """

    def __init__(self, pictures: Tensor, labels: Tensor, preprocessing: Preprocessing) -> None:
        if pictures.dtype != torch.uint8 or pictures.dim() != 4 or pictures.shape[-1] not in (1, 3):
            raise TypeError(f"pictures must be uint8 [N, H, W, 1 or 3], got {pictures.dtype} {list(pictures.shape)}.")
        if labels.dtype != torch.int64 or labels.shape != pictures.shape[:1]:
            raise TypeError(f"labels must be int64 [{len(pictures)}], got {labels.dtype} {list(labels.shape)}.")
        if len(pictures) == 0 or preprocessing.resize is not None:
            raise ValueError(
                "pictures in memory must be one or more, and preprocessing.resize None: they have one size."
            )
        self.labels = labels
        self.preprocessing = preprocessing
        self._pictures = {torch.device("cpu"): _resized(_recoloured(pictures, preprocessing), preprocessing)}
        self._positions = torch.arange(len(labels))

    def subset(self, indices: Tensor) -> TensorSplit:
        """Return the split of these pictures alone; no picture is copied."""
        self.require_indices(indices)
        made = object.__new__(TensorSplit)
        made.labels, made.preprocessing, made._pictures = self.labels[indices], self.preprocessing, self._pictures
        made._positions = self._positions[indices]
        return made

    def _hash(self) -> hashlib.blake2b:
        """Labels, positions, and all pixels: two sets of the same size are told apart."""
        found = super()._hash()
        found.update(self._positions.numpy().tobytes())
        found.update(self._pictures[torch.device("cpu")].numpy().data)
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
        pictures = self._on(torch.device(device))
        for epoch, indices in order:
            positions = without_waiting(self._positions[self.require_indices(indices)], device)
            # Whole pictures as rows of one matrix: index_select copies each with one memcpy, indexing does not.
            chosen = pictures.flatten(1).index_select(0, positions).view(-1, *pictures.shape[1:])
            if augmentation is not None:
                chosen = augment(chosen, indices, augmentation, seed=seed, epoch=epoch)
            labels = without_waiting(self.labels[indices], device)
            yield Batch(normalise(chosen, self.preprocessing), labels, indices)

    def _on(self, device: torch.device) -> Tensor:
        device = torch.empty(0, device=device).device  # "cuda" is "cuda:0"
        if device not in self._pictures:
            self._pictures[device] = self._pictures[torch.device("cpu")].to(device)
        return self._pictures[device]


def _recoloured(pictures: Tensor, preprocessing: Preprocessing) -> Tensor:
    if pictures.shape[-1] == preprocessing.channels:
        return pictures
    if preprocessing.channels == 3:
        return pictures.expand(-1, -1, -1, 3).contiguous()
    grey = torch.full(pictures.shape[:3], 0x8000, dtype=torch.int32)
    for channel, weight in enumerate(LUMA):
        grey.add_(pictures[..., channel], alpha=weight)
    return grey.bitwise_right_shift_(16).to(torch.uint8).unsqueeze(-1)


def _resized(pictures: Tensor, preprocessing: Preprocessing) -> Tensor:
    if tuple(pictures.shape[1:3]) == preprocessing.size:
        return pictures.contiguous()
    resized = [
        F.interpolate(part.permute(0, 3, 1, 2), preprocessing.size, mode="bilinear", antialias=True)
        for part in torch.split(pictures, RESIZED_AT_ONCE)
    ]
    return torch.cat(resized).permute(0, 2, 3, 1).contiguous()
