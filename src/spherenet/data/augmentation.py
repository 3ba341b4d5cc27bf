"""Random integers that are a function of (seed, epoch, index, purpose) and of nothing else.

A picture's augmentation must not depend on which batch, worker, process or device it meets, nor on what was drawn
before. So there is no generator with a state: each number is the output of SplitMix64 (Steele, Lea and Flood, 2014)
started at a key made of seed, epoch and purpose, at the step `index`. The arithmetic is that of unsigned 64-bit
integers, which numpy wraps the same way everywhere.

What training does to a batch: random flips and crops, drawn from (seed, epoch, index) alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

__all__ = ["AUGMENTATIONS", "Augmentation", "Purpose", "augment", "draw", "shuffled", "without_waiting"]

GAMMA = 0x9E3779B97F4A7C15  # 2⁶⁴ divided by the golden ratio: the step of SplitMix64
MULTIPLIERS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
WORD = (1 << 64) - 1


class Purpose(IntEnum):
    """What a random number is for: the numbers of two purposes have nothing to do with each other."""

    HORIZONTAL_FLIP = 0
    VERTICAL_FLIP = 1
    PADDED_CROP_TOP = 2
    PADDED_CROP_LEFT = 3
    CROP_TOP = 4
    CROP_LEFT = 5
    SHUFFLE = 6


def _mixed(word: int) -> int:
    """Return SplitMix64's output for the state `word`, in Python's integers."""
    word = ((word ^ (word >> 30)) * MULTIPLIERS[0]) & WORD
    word = ((word ^ (word >> 27)) * MULTIPLIERS[1]) & WORD
    return word ^ (word >> 31)


def _key(seed: int, epoch: int, purpose: Purpose) -> int:
    key = 0
    for part in (seed, epoch, purpose):
        key = _mixed((key + GAMMA + part) & WORD)
    return key


def _words(seed: int, epoch: int, indices: Tensor, purpose: Purpose) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Return one uniform 64-bit word for each index: [N] uint64."""
    steps = indices.numpy().astype(np.uint64)
    words = np.uint64(_key(seed, epoch, purpose)) + steps * np.uint64(GAMMA)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(MULTIPLIERS[0])
    words = (words ^ (words >> np.uint64(27))) * np.uint64(MULTIPLIERS[1])
    return words ^ (words >> np.uint64(31))


def draw(seed: int, epoch: int, indices: Tensor, purpose: Purpose, below: int) -> Tensor:
    """Return a uniform integer of [0, below) for each index: [N] int64, CPU.

    The word's upper 32 bits are scaled by `below` (at most 2³¹): a value's probability is off by less than 2⁻³².
    """
    upper = _words(seed, epoch, indices, purpose) >> np.uint64(32)
    return torch.from_numpy(((upper * np.uint64(below)) >> np.uint64(32)).astype(np.int64))


def shuffled(seed: int, count: int) -> Tensor:
    """Return the numbers 0 … count − 1 in a random order that is the same on every machine and version."""
    words = _words(seed, 0, torch.arange(count), Purpose.SHUFFLE)
    return torch.from_numpy(np.argsort(words, kind="stable"))


def without_waiting(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a CPU tensor on a device.

    A plain `to` waits until the device has finished its work so far, which costs a step its overlap. Copies from
    ordinary memory are taken over before the call returns, so that the source may be freed. MPS is not known to do so.
    """
    return tensor.to(device, non_blocking=torch.device(device).type != "mps")


LARGEST_PADDING = 512


@dataclass(frozen=True)
class Augmentation:
    """Which random changes a training picture goes through; each is drawn anew in every epoch.

    `crop_padding`: the picture stands in that many black pixels on each side and a window of its own size is cut out
    anywhere. `random_crop`: where the preprocessing resizes to more than `size`, the window of `size` is cut out
    anywhere instead of in the centre (ImageNet's recipe); elsewhere it changes nothing.
    """

    horizontal_flip: bool = False
    vertical_flip: bool = False
    crop_padding: int = 0
    random_crop: bool = False

    def __post_init__(self) -> None:
        for name in ("horizontal_flip", "vertical_flip", "random_crop"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be true or false, got {getattr(self, name)!r}.")
        if type(self.crop_padding) is not int or not 0 <= self.crop_padding <= LARGEST_PADDING:
            raise ValueError(
                f"crop_padding must be a whole number from 0 to {LARGEST_PADDING}, got {self.crop_padding!r}."
            )


AUGMENTATIONS: dict[str, Augmentation] = {
    "none": Augmentation(),
    "flip": Augmentation(horizontal_flip=True),
    "flip-crop": Augmentation(horizontal_flip=True, crop_padding=4),
    "flips-crop": Augmentation(horizontal_flip=True, vertical_flip=True, crop_padding=4),
    "imagenet": Augmentation(horizontal_flip=True, random_crop=True),
}
"""By name, as SPEC 4 has them: `flip` is the paper's CIFAR-10, `flips-crop` its CIFAR-10+ and CIFAR-100,
`flip-crop` the same as its released code did it, `imagenet` its ImageNet."""


def augment(pictures: Tensor, indices: Tensor, augmentation: Augmentation, *, seed: int, epoch: int) -> Tensor:
    """Return the pictures, flipped and cropped: uint8 [N, H, W, C] to the same, on their device.

    `indices` (CPU) are the pictures' positions in their split. The output's pixel (y, x) of picture n is read at
    (rows[n, y], columns[n, x]) of the padded picture: one gather does both flips and the crop.
    """
    count, height, width, channels = pictures.shape
    padding = augmentation.crop_padding
    if count == 0 or not (augmentation.horizontal_flip or augmentation.vertical_flip or padding):
        return pictures

    def read_at(length: int, flip: bool, flip_purpose: Purpose, crop_purpose: Purpose) -> Tensor:
        positions = torch.arange(length).expand(count, length)
        if flip:
            flipped = draw(seed, epoch, indices, flip_purpose, 2).bool()
            positions = torch.where(flipped[:, None], length - 1 - positions, positions)
        if padding:
            positions = positions + draw(seed, epoch, indices, crop_purpose, 2 * padding + 1)[:, None]
        return positions

    rows = read_at(height, augmentation.vertical_flip, Purpose.VERTICAL_FLIP, Purpose.PADDED_CROP_TOP)
    columns = read_at(width, augmentation.horizontal_flip, Purpose.HORIZONTAL_FLIP, Purpose.PADDED_CROP_LEFT)
    padded_height, padded_width = height + 2 * padding, width + 2 * padding
    rows = rows + torch.arange(count)[:, None] * padded_height
    # Only [N, H] and [N, W] numbers travel to the device; the [N, H, W] positions are made there.
    rows, columns = without_waiting(rows, pictures.device), without_waiting(columns, pictures.device)
    pixels = (rows * padded_width)[:, :, None] + columns[:, None, :]
    if padding:
        padded = pictures.new_zeros(count, padded_height, padded_width, channels)
        padded[:, padding:-padding, padding:-padding] = pictures
        pictures = padded
    return pictures.reshape(-1, channels).index_select(0, pixels.view(-1)).view(count, height, width, channels)
