"""Random flips, crops and light of batches, drawn from (seed, epoch, index) alone.

The augmentation of an image must not depend on its batch, worker, process or device, or on earlier draws. Hence there
is no generator with a state: each number is the output of SplitMix64 (Steele, Lea and Flood, 2014) started at a key
derived from seed, epoch and purpose, at step `index`. The arithmetic is unsigned 64-bit, which numpy wraps identically
on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from spherenet.errors import InvalidArgument, InvalidArgumentType

__all__ = ["AUGMENTATIONS", "Augmentation", "Purpose", "augment", "draw", "shuffled"]

GAMMA = 0x9E3779B97F4A7C15  # 2⁶⁴ divided by the golden ratio: the step of SplitMix64
MULTIPLIERS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MASK = (1 << 64) - 1
MAX_PADDING = 512

Bits = np.ndarray[tuple[int], np.dtype[np.uint64]]


class Purpose(IntEnum):
    """Use of a random number; the numbers of different purposes are independent."""

    HORIZONTAL_FLIP = 0
    VERTICAL_FLIP = 1
    PADDED_CROP_TOP = 2
    PADDED_CROP_LEFT = 3
    CROP_TOP = 4
    CROP_LEFT = 5
    SHUFFLE = 6
    CORRUPTION_ROW = 7
    CORRUPTION_COLUMN = 8
    CORRUPTION_ANGLE = 9
    CORRUPTION_COLOR = 10
    CORRUPTION_NOISE = 11
    BRIGHTNESS = 12
    CONTRAST = 13
    FIRST_COLOR = 14
    SECOND_COLOR = 15
    THIRD_COLOR = 16


def _key(seed: int, epoch: int, purpose: Purpose) -> int:
    """Hash seed, epoch and purpose to 64 bits: SplitMix64 in Python integers."""
    key = 0
    for number in (seed, epoch, purpose):
        key = (key + GAMMA + number) & MASK
        key = ((key ^ (key >> 30)) * MULTIPLIERS[0]) & MASK
        key = ((key ^ (key >> 27)) * MULTIPLIERS[1]) & MASK
        key ^= key >> 31
    return key


def _random_bits(seed: int, epoch: int, indices: Tensor, purpose: Purpose) -> Bits:
    """Return 64 uniform bits per index: uint64 [N]."""
    bits = np.uint64(_key(seed, epoch, purpose)) + indices.numpy().astype(np.uint64) * np.uint64(GAMMA)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(MULTIPLIERS[0])
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(MULTIPLIERS[1])
    return bits ^ (bits >> np.uint64(31))


def draw(seed: int, epoch: int, indices: Tensor, purpose: Purpose, below: int) -> Tensor:
    """Return a uniform integer in [0, below) per index: int64 [N] on the CPU.

    The upper 32 bits are scaled by `below` (at most 2³¹), so a value's probability is off by less than 2⁻³².
    """
    upper = _random_bits(seed, epoch, indices, purpose) >> np.uint64(32)
    return torch.from_numpy(((upper * np.uint64(below)) >> np.uint64(32)).astype(np.int64))


def shuffled(seed: int, count: int) -> Tensor:
    """Return a random permutation of 0 … count − 1 that is the same on every machine and version."""
    bits = _random_bits(seed, 0, torch.arange(count), Purpose.SHUFFLE)
    return torch.from_numpy(np.argsort(bits, kind="stable"))


@dataclass(frozen=True)
class Augmentation:
    """Random changes of training images, drawn again in every epoch.

    Args:
        horizontal_flip: Mirror left and right with probability 1/2.
        vertical_flip: Mirror top and bottom with probability 1/2.
        crop_padding: Pad each side with this many pixels and crop a random window of the original size.
        random_crop: If the preprocessing resizes to more than `size`, crop at a random position instead of the center
            (as for ImageNet); otherwise no effect.
        reflect: Pad with the mirrored image instead of black pixels.
        alternating: Mirror each image in every other epoch, starting at random, so that two epochs show both sides.
            `horizontal_flip` must be true.
        light: Random light of at most this strength, from 0 to 1: a pixel p becomes 127.5 + c·(b·k·p − 127.5), rounded
            and clipped, with contrast c and brightness b uniform in 1 ± light per image, and k uniform in 1 ± light/2
            per color of an RGB image.
    """

    horizontal_flip: bool = False
    vertical_flip: bool = False
    crop_padding: int = 0
    random_crop: bool = False
    reflect: bool = False
    alternating: bool = False
    light: float = 0.0

    def __post_init__(self) -> None:
        for name in ("horizontal_flip", "vertical_flip", "random_crop", "reflect", "alternating"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgumentType(name, f"must be true or false, got {getattr(self, name)!r}.")
        if type(self.crop_padding) is not int or not 0 <= self.crop_padding <= MAX_PADDING:
            raise InvalidArgument(
                "crop_padding", f"must be an integer from 0 to {MAX_PADDING}, got {self.crop_padding!r}."
            )
        if type(self.light) not in (int, float) or not 0 <= self.light <= 1:
            raise InvalidArgument("light", f"must be a number from 0 to 1, got {self.light!r}.")
        if self.alternating and not self.horizontal_flip:
            raise InvalidArgument("alternating", "must be false without horizontal_flip, got true.")


AUGMENTATIONS: dict[str, Augmentation] = {
    "none": Augmentation(),
    "flip": Augmentation(horizontal_flip=True),
    "flip-crop": Augmentation(horizontal_flip=True, crop_padding=4),
    "flips-crop": Augmentation(horizontal_flip=True, vertical_flip=True, crop_padding=4),
    "translate": Augmentation(horizontal_flip=True, crop_padding=2, reflect=True, alternating=True),
    "imagenet": Augmentation(horizontal_flip=True, random_crop=True),
    "flip-light": Augmentation(horizontal_flip=True, light=0.5),
    "light": Augmentation(horizontal_flip=True, crop_padding=2, reflect=True, alternating=True, light=0.5),
}
"""Augmentations by name. The paper uses `flip` for CIFAR-10, `flips-crop` for CIFAR-10+ and CIFAR-100 and `imagenet`
for ImageNet; its released code uses `flip-crop` in place of `flips-crop`. `translate` belongs to the speed recipe.
`flip-light` and `light` are `flip` and `translate` with random brightness, contrast and color."""


def _reflected(positions: Tensor, length: int) -> Tensor:
    """Return positions outside [0, length) mirrored at the first and last pixel, which are not repeated."""
    if length == 1:
        return torch.zeros_like(positions)
    period = 2 * (length - 1)
    positions = positions % period
    return torch.minimum(positions, period - positions)


def _relit(images: Tensor, indices: Tensor, light: float, *, seed: int, epoch: int) -> Tensor:
    """Return images with random brightness, contrast and color, see `Augmentation`: uint8 [N, H, W, C] to the same."""

    def factor(purpose: Purpose, spread: float) -> Tensor:
        return 1 + spread * (draw(seed, epoch, indices, purpose, 1 << 31).double() / (1 << 30) - 1)

    gains = factor(Purpose.BRIGHTNESS, light)[:, None]
    if images.shape[3] == 3:
        colors = (Purpose.FIRST_COLOR, Purpose.SECOND_COLOR, Purpose.THIRD_COLOR)
        gains = gains * torch.stack([factor(color, light / 2) for color in colors], 1)
    contrast = factor(Purpose.CONTRAST, light)[:, None]
    # 127.5 + contrast·(gain·p − 127.5) as one product and one sum
    scale, offset = (
        values.to(images.device, torch.float32)[:, None, None] for values in (contrast * gains, 127.5 * (1 - contrast))
    )
    return (images * scale).add_(offset).round_().clamp_(0, 255).to(torch.uint8)


def augment(images: Tensor, indices: Tensor, augmentation: Augmentation, *, seed: int, epoch: int) -> Tensor:
    """Flip, crop and relight images: uint8 [N, H, W, C] to the same, on their device.

    Pixel (y, x) of output n is read from (rows[n, y], columns[n, x]) of the padded image n, so that one gather performs
    both flips and the crop.

    Args:
        images: The images.
        indices: Positions of the images in their split, int64 [N] on the CPU.
        augmentation: The random changes.
        seed: Seed of the run.
        epoch: Number of the epoch.
    """
    count, height, width, channels = images.shape
    padding = augmentation.crop_padding
    if augmentation.light and count:
        images = _relit(images, indices, augmentation.light, seed=seed, epoch=epoch)
    if count == 0 or not (augmentation.horizontal_flip or augmentation.vertical_flip or padding):
        return images

    def source_positions(length: int, flip: bool, flip_purpose: Purpose, crop_purpose: Purpose) -> Tensor:
        positions = torch.arange(length).expand(count, length)
        if flip:
            alternates = augmentation.alternating and flip_purpose == Purpose.HORIZONTAL_FLIP
            flipped = draw(seed, 0 if alternates else epoch, indices, flip_purpose, 2).bool()
            flipped = flipped ^ bool(alternates and epoch % 2)
            positions = torch.where(flipped[:, None], length - 1 - positions, positions)
        if padding:
            positions = positions + draw(seed, epoch, indices, crop_purpose, 2 * padding + 1)[:, None]
        if augmentation.reflect:
            positions = _reflected(positions - padding, length)
        return positions

    rows = source_positions(height, augmentation.vertical_flip, Purpose.VERTICAL_FLIP, Purpose.PADDED_CROP_TOP)
    columns = source_positions(width, augmentation.horizontal_flip, Purpose.HORIZONTAL_FLIP, Purpose.PADDED_CROP_LEFT)
    border = 0 if augmentation.reflect else padding  # reflected positions are inside the image
    padded_height, padded_width = height + 2 * border, width + 2 * border
    rows = rows + torch.arange(count)[:, None] * padded_height
    # Copy [N, H] and [N, W] positions to the device and expand them to [N, H, W] there.
    device, non_blocking = images.device, images.device.type != "mps"
    rows, columns = rows.to(device, non_blocking=non_blocking), columns.to(device, non_blocking=non_blocking)
    pixels = (rows * padded_width)[:, :, None] + columns[:, None, :]
    if border:
        padded = images.new_zeros(count, padded_height, padded_width, channels)
        padded[:, border:-border, border:-border] = images
        images = padded
    return images.reshape(-1, channels).index_select(0, pixels.view(-1)).view(count, height, width, channels)
