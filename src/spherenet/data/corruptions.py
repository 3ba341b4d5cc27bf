"""Corruptions of 8-bit images by formulas, to measure what light, noise and compression do to a network.

The corruption of an image is a function of its index in the split and of the corruption. It does not depend on the
batch, the device, the process or the number of calls: all networks see the same corrupted images.
"""

from __future__ import annotations

import io
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from spherenet._util.text import short
from spherenet._util.validation import require_number, require_one_of
from spherenet.data.augmentation import Purpose, draw
from spherenet.errors import InvalidArgument, InvalidArgumentType

__all__ = ["CORRUPTIONS", "Corruption", "CorruptionInfo", "corrupt", "parse_corruption"]

MID_GRAY = 127.5
SPOT_RADIUS = 0.25  # standard deviation of the spot, as a fraction of the shorter side
BLUR_REACH = 3  # standard deviations after which the kernel of the blur ends
RESOLUTION = 1 << 31  # of random fractions


@dataclass(frozen=True)
class Corruption:
    """One corruption with its strength, written "spot:0.85".

    Args:
        name: One of `CORRUPTIONS`.
        strength: Number in the range of that corruption.

    Raises:
        TypeError: If the strength is not a number.
        ValueError: If the name is unknown, or the strength is out of range.
    """

    name: str
    strength: float

    def __post_init__(self) -> None:
        info = CORRUPTIONS[require_one_of("corruption", self.name, CORRUPTIONS)]
        strength = require_number(f"strength of {self.name}", self.strength)
        if not info.lowest <= strength <= info.highest:
            raise InvalidArgument(
                "strength", f"of {self.name} must be from {info.lowest:g} to {info.highest:g}, got {self.strength!r}."
            )

    def __str__(self) -> str:
        return f"{self.name}:{self.strength:g}"


def parse_corruption(text: str) -> Corruption:
    """Return the corruption of a text such as "spot:0.85".

    Raises:
        ValueError: If the text has another form, the name is unknown, or the strength is out of range.
    """
    name, separator, number = text.partition(":")
    if name in CORRUPTIONS or separator:
        info = CORRUPTIONS[require_one_of("corruption", name, CORRUPTIONS)]
        allowed = f"a number from {info.lowest:g} to {info.highest:g}"
    else:
        raise InvalidArgument(
            "corruption", f"must be KIND:STRENGTH with one of {', '.join(CORRUPTIONS)}, got {short(text)!r}."
        )
    try:
        strength = float(number)
    except ValueError:
        strength = math.nan
    if not info.lowest <= strength <= info.highest:
        got = short(repr(number)) if separator else "none"
        raise InvalidArgument("strength", f"of {name} must be {allowed}, got {got}.")
    return Corruption(name, strength)


def corrupt(images: Tensor, corruption: Corruption | str, indices: Tensor | None = None) -> Tensor:
    """Return corrupted images: uint8 [N, C, H, W] to the same, on their device.

    Values are computed in float64, rounded to the nearest integer and clipped to 0 … 255. The same image with the same
    index has the same corruption in every batch.

    Args:
        images: Images with pixels from 0 to 255, uint8 [N, C, H, W] with C = 1 (gray) or 3 (RGB).
        corruption: A `Corruption`, or its text such as "spot:0.85"; `CORRUPTIONS` lists names, ranges and formulas.
        indices: Positions of the images in their split, int64 [N]; they decide about positions and noise. By default
            0 … N − 1.

    Raises:
        TypeError: If images or indices have another dtype or shape.
        ValueError: If the corruption is unknown or out of range, or needs colors and the images are gray.
    """
    if not isinstance(images, Tensor) or images.dtype != torch.uint8 or images.dim() != 4:
        got = f"{images.dtype} {list(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
        raise InvalidArgumentType("images", f"must be uint8 [N, C, H, W], got {got}.")
    if images.shape[1] not in (1, 3):
        raise InvalidArgument("images", f"must have 1 or 3 channels, got {images.shape[1]}.")
    if indices is None:
        indices = torch.arange(len(images))
    elif indices.dtype != torch.int64 or indices.shape != images.shape[:1]:
        raise InvalidArgumentType(
            "indices", f"must be int64 [{len(images)}], got {indices.dtype} {list(indices.shape)}."
        )
    if isinstance(corruption, str):
        corruption = parse_corruption(corruption)
    if len(images) == 0:
        return images
    # On the CPU, because other devices round differently.
    pixels = images.to("cpu", torch.float64)
    changed = CORRUPTIONS[corruption.name].apply(pixels, corruption.strength, _Draws(corruption.name, indices.cpu()))
    return changed.round_().clamp_(0, 255).to(images.device, torch.uint8)


class _Draws(NamedTuple):
    """Random numbers of a corruption, one per image, by name of the corruption and index of the image."""

    name: str
    indices: Tensor

    @property
    def seed(self) -> int:
        return zlib.crc32(self.name.encode())

    def integer(self, purpose: Purpose, below: int) -> Tensor:
        """Return an integer from 0 to below − 1 per image: int64 [N]."""
        return draw(self.seed, 0, self.indices, purpose, below)

    def fraction(self, purpose: Purpose) -> Tensor:
        """Return a number in [0, 1) per image: float64 [N, 1, 1, 1]."""
        return (self.integer(purpose, RESOLUTION).double() / RESOLUTION).view(-1, 1, 1, 1)

    def normal(self, shape: torch.Size) -> Tensor:
        """Return standard normal numbers: float64 [N, C, H, W]."""
        keys = self.integer(Purpose.CORRUPTION_NOISE, RESOLUTION).tolist()
        generator = torch.Generator()
        return torch.stack(
            [torch.randn(shape[1:], generator=generator.manual_seed(key), dtype=torch.float64) for key in keys]
        )


def _grid(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return y [H, 1] and x [1, W] of the pixels' centers, in units of the shorter side; the image's center is 0."""
    height, width = images.shape[2:]
    y, x = (torch.arange(side, dtype=torch.float64) - (side - 1) / 2 for side in (height, width))
    return y[:, None] / min(height, width), x[None, :] / min(height, width)


def _point(images: Tensor, draws: _Draws) -> tuple[Tensor, Tensor]:
    """Return (y, x) of one point per image in the middle half of its height and width: float64 [N, 1, 1, 1] each."""
    height, width = images.shape[2:]
    rows, columns = (draws.fraction(purpose) for purpose in (Purpose.CORRUPTION_ROW, Purpose.CORRUPTION_COLUMN))
    short_side = min(height, width)
    return (rows - 0.5) / 2 * height / short_side, (columns - 0.5) / 2 * width / short_side


def _direction(draws: _Draws) -> tuple[Tensor, Tensor]:
    """Return (y, x) of one unit vector per image: float64 [N, 1, 1, 1] each."""
    angle = 2 * math.pi * draws.fraction(Purpose.CORRUPTION_ANGLE)
    return angle.sin(), angle.cos()


def _spot(images: Tensor, strength: float, draws: _Draws) -> Tensor:
    (y, x), (center_y, center_x) = _grid(images), _point(images, draws)
    squared_distance = (y - center_y) ** 2 + (x - center_x) ** 2
    return images * (1 - strength * (1 - (-squared_distance / (2 * SPOT_RADIUS**2)).exp()))


def _ramp(images: Tensor, strength: float, draws: _Draws) -> Tensor:
    (y, x), (up, right) = _grid(images), _direction(draws)
    position = y * up + x * right
    lowest, highest = position.amin((1, 2, 3), keepdim=True), position.amax((1, 2, 3), keepdim=True)
    return images * (1 - strength * (position - lowest) / (highest - lowest).clamp_min(1e-12))


def _shadow(images: Tensor, strength: float, draws: _Draws) -> Tensor:
    (y, x), (center_y, center_x), (up, right) = _grid(images), _point(images, draws), _direction(draws)
    is_shaded = (y - center_y) * up + (x - center_x) * right > 0
    return images * (1 - strength * is_shaded.double())


def _gamma(images: Tensor, strength: float, draws: _Draws) -> Tensor:
    return 255 * (images / 255) ** strength


CAST_ORDERS = torch.tensor(list(permutations((0.0, 0.5, 1.0))), dtype=torch.float64)


def _cast(images: Tensor, strength: float, draws: _Draws) -> Tensor:
    if images.shape[1] != 3:
        raise InvalidArgument("images", f"must have 3 channels for the corruption 'cast', got {images.shape[1]}.")
    orders = CAST_ORDERS[draws.integer(Purpose.CORRUPTION_COLOR, len(CAST_ORDERS))]
    return images * (1 - strength * orders[:, :, None, None])


def _contrast(images: Tensor, strength: float, draws: _Draws) -> Tensor:
    return MID_GRAY + (1 - strength) * (images - MID_GRAY)


def _dark(images: Tensor, strength: float, draws: _Draws) -> Tensor:
    return (1 - strength) * images


def _bright(images: Tensor, strength: float, draws: _Draws) -> Tensor:
    return images + strength


def _noise(images: Tensor, strength: float, draws: _Draws) -> Tensor:
    return images + strength * draws.normal(images.shape)


def _blur(images: Tensor, strength: float, draws: _Draws) -> Tensor:
    if strength == 0:
        return images
    reach = math.ceil(BLUR_REACH * strength)
    weights = [math.exp(-0.5 * (offset / strength) ** 2) for offset in range(-reach, reach + 1)]
    total = sum(weights)
    for dimension in (2, 3):
        side = images.shape[dimension]
        # A sum in a fixed order, so that the result does not depend on the size of the batch.
        blurred = torch.zeros_like(images)
        for offset, weight in zip(range(-reach, reach + 1), weights, strict=True):
            source = (torch.arange(side) + offset).clamp(0, side - 1)
            blurred.add_(images.index_select(dimension, source), alpha=weight / total)
        images = blurred
    return images


def _jpeg(images: Tensor, strength: float, draws: _Draws) -> Tensor:
    changed = np.empty((len(images), *images.shape[2:], images.shape[1]), dtype=np.uint8)
    for source, target in zip(images.to(torch.uint8).permute(0, 2, 3, 1), changed, strict=True):
        file = io.BytesIO()
        pixels = np.ascontiguousarray(source.squeeze(2).numpy() if source.shape[2] == 1 else source.numpy())
        Image.fromarray(pixels).save(file, "JPEG", quality=round(strength))
        with Image.open(file, formats=["JPEG"]) as image:
            target[:] = np.asarray(image).reshape(target.shape)
    return torch.from_numpy(changed).permute(0, 3, 1, 2).double()


class CorruptionInfo(NamedTuple):
    """Description of a corruption.

    Attributes:
        formula: What becomes of a pixel p from 0 to 255 with the strength s, for users.
        lowest: Smallest strength.
        highest: Largest strength.
        apply: Function (images float64 [N, C, H, W], strength, random numbers) → images.
    """

    formula: str
    lowest: float
    highest: float
    apply: Callable[[Tensor, float, _Draws], Tensor]


CORRUPTIONS: dict[str, CorruptionInfo] = {
    "spot": CorruptionInfo("p·(1 − s·(1 − exp(−8·d²))), d: distance from a point in units of the side", 0, 1, _spot),
    "ramp": CorruptionInfo("p·(1 − s·t), t: from 0 to 1 across the image in one direction", 0, 1, _ramp),
    "shadow": CorruptionInfo("p·(1 − s) on one side of a line", 0, 1, _shadow),
    "gamma": CorruptionInfo("255·(p/255)^s", 0.1, 10, _gamma),
    "cast": CorruptionInfo("p·(1 − s·c), c: 0, 1/2 and 1 for the three colors in one of six orders", 0, 1, _cast),
    "contrast": CorruptionInfo("127.5 + (1 − s)·(p − 127.5)", 0, 1, _contrast),
    "dark": CorruptionInfo("p·(1 − s)", 0, 1, _dark),
    "bright": CorruptionInfo("p + s", 0, 255, _bright),
    "noise": CorruptionInfo("p + s·n, n: standard normal per pixel and color", 0, 255, _noise),
    "blur": CorruptionInfo("Gaussian blur with the standard deviation s in pixels, border repeated", 0, 16, _blur),
    "jpeg": CorruptionInfo("JPEG of the quality s (Pillow, rounded to an integer); 100 is best", 1, 100, _jpeg),
}
"""The registry: one line per corruption, with its formula and the range of its strength s."""
