"""A split that lives in memory as one uint8 tensor and is augmented in batches on the device."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator

import torch
from torch import Tensor
from torch.nn import functional as F

from spherenet.data.augmentation import Augmentation, augment
from spherenet.data.preprocessing import Preprocessing, normalise
from spherenet.data.split import Batch, Order, Split
from spherenet.data.transfer import without_waiting

__all__ = ["TensorSplit"]

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
