"""The one interface of every data set: splits that turn an order of indices into batches."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from spherenet.data.augmentation import Augmentation
from spherenet.data.preprocessing import Preprocessing

__all__ = ["Batch", "Dataset", "Order", "Progress", "Split"]

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
