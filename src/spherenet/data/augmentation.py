"""What training does to a batch: random flips and crops, drawn from (seed, epoch, index) alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spherenet.data.draws import Purpose, draw
from spherenet.data.transfer import without_waiting

__all__ = ["AUGMENTATIONS", "Augmentation", "augment"]

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
