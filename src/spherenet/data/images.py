"""How a picture becomes a network's input, as one value that is saved with the network.

One picture file: decoded to uint8, whatever its kind, or refused by name.

Grey, palette, 16-bit, CMYK and transparent pictures all become grey or RGB of 8 bits; transparency is laid on white,
as a browser shows it; the EXIF orientation is applied; of an animation the first frame counts. Only the six formats
below are tried: others of Pillow's run programs or were never meant for photographs.
"""

from __future__ import annotations

import logging
import math
import os
import stat
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from spherenet.data.augmentation import without_waiting
from spherenet.errors import DataError

__all__ = ["SUFFIXES", "Pixels", "Preprocessing", "centre", "decode", "normalise", "read_image"]

LARGEST_SIDE = 8192  # of a network's input: larger is a damaged file, not a wish


@dataclass(frozen=True)
class Preprocessing:
    """The picture is resized and centre cropped to `size`, and a pixel p becomes (p − mean)/std.

    `size` and `resize` are (height, width); `channels` is 1 (grey) or 3 (RGB); `mean` and `std` hold one number a
    channel, in units of pixels from 0 to 255. With `resize` the picture is resized to that and the centre of `size`
    cut out; without it, it is resized straight to `size`. Wrong values raise ValueError or TypeError.
    """

    size: tuple[int, int]
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resize: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        _require_sides("size", self.size)
        if type(self.channels) is not int or self.channels not in (1, 3):
            raise ValueError(f"channels must be 1 (grey) or 3 (RGB), got {self.channels!r}.")
        _require_numbers("mean", self.mean, self.channels)
        _require_numbers("std", self.std, self.channels)
        if min(self.std) <= 0:
            raise ValueError(f"std must be greater than 0, got {self.std!r}.")
        if self.resize is not None:
            _require_sides("resize", self.resize)
            if self.resize[0] < self.size[0] or self.resize[1] < self.size[1]:
                raise ValueError(f"resize must be at least size {self.size!r}, got {self.resize!r}.")

    @classmethod
    def standard(cls, size: tuple[int, int], channels: int, resize: tuple[int, int] | None = None) -> Preprocessing:
        """Return the released code's scaling (SPEC 4): (pixel − 127.5)/128 in every channel."""
        return cls(size, channels, (127.5,) * channels, (128.0,) * channels, resize)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as what JSON knows: numbers, lists and None."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, saved: object) -> Preprocessing:
        """Return what `as_dict` saved; anything else, wrong in type, value or size, raises DataError."""
        names = [field.name for field in fields(cls)]
        if not isinstance(saved, Mapping) or len(saved) != len(names) or any(name not in saved for name in names):
            raise DataError(f"the saved preprocessing must have exactly the fields {', '.join(names)}.")
        values: dict[str, Any] = {
            name: tuple(saved[name]) if isinstance(saved[name], list) else saved[name] for name in names
        }
        try:
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise DataError(f"the saved preprocessing is wrong: {error}") from None


def _require_sides(name: str, value: object) -> None:
    if not isinstance(value, tuple) or len(value) != 2 or any(type(side) is not int for side in value):
        raise TypeError(f"{name} must be a pair of whole numbers (height, width), got {_shown(value)}.")
    if not all(1 <= side <= LARGEST_SIDE for side in value):
        raise ValueError(f"{name} must be from 1 to {LARGEST_SIDE} on each side, got {_shown(value)}.")


def _require_numbers(name: str, value: object, count: int) -> None:
    if not isinstance(value, tuple) or len(value) != count:
        raise TypeError(f"{name} must hold {count} numbers, one for each channel, got {_shown(value)}.")
    # Bounded as well as finite: an integer from JSON may have more digits than a float can hold.
    if any(type(number) not in (int, float) or not abs(number) <= 1e6 or math.isnan(number) for number in value):
        raise ValueError(f"{name} must hold finite numbers of at most 1e6, got {_shown(value)}.")


def _shown(value: object) -> str:
    """Return the value's repr, cut: what comes from a file may be of any length."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer too long to print, or lists nested without end
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= 80 else f"{text[:77]}..."


def normalise(pictures: Tensor, preprocessing: Preprocessing) -> Tensor:
    """Return (pixel − mean)/std of uint8 [N, H, W, C] as float32 [N, C, H, W], channels-last in memory."""
    count, height, width, channels = pictures.shape
    # Whole rows, so that the innermost loop is W·C long and not C.
    rows = pictures.reshape(count, height, width * channels).to(torch.float32)
    for values, apply in ((preprocessing.mean, rows.sub_), (preprocessing.std, rows.div_)):
        if len(set(values)) == 1:
            apply(values[0])
        else:
            apply(without_waiting(torch.tensor(values), rows.device).repeat(width))
    return rows.view(count, height, width, channels).permute(0, 3, 1, 2)


SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff")
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF")
LARGEST_PICTURE = (1 << 28) // 3  # pixels, 89 million: 256 MiB as RGB. Pillow only warns there, and can be told not to
ORIENTATION = 0x0112  # the EXIF tag
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SIDEWAYS = {TURNS[orientation] for orientation in (5, 6, 7, 8)}

logging.getLogger("PIL").addHandler(logging.NullHandler())  # what it has to say of broken files, we say

Pixels = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


def decode(path: str | Path, size: tuple[int, int], channels: int) -> Pixels:
    """Return the picture resized to `size` (height, width) as uint8 [H, W, C].

    A file that is missing, no regular file, of another format, damaged, cut short, or of more than
    `LARGEST_PICTURE` pixels raises DataError naming it.
    """
    try:
        # Pillow warns of odd metadata and of large pictures: the former is none of ours, the latter checked below.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _decoded(path, size, channels)
    except DataError:
        raise
    except Exception as error:
        # Decoders meet hostile bytes with exceptions of every kind; to the reader all mean the same.
        raise DataError(f"the picture {str(path)!r} cannot be read: {_reason(error)}.") from None


def _decoded(path: str | Path, size: tuple[int, int], channels: int) -> Pixels:
    with _opened(path) as image:
        if image.format != "PNG":
            return _pixels(image, size, channels)
        image.verify()  # the one format with checksums; loading does not compare them, and this ends the reading
    with _opened(path) as image:
        return _pixels(image, size, channels)


def _opened(path: str | Path) -> Image.Image:
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for ever
        raise DataError(f"the picture {str(path)!r} is not a regular file.")
    image = Image.open(path, formats=FORMATS)
    if image.width * image.height > LARGEST_PICTURE:
        image.close()
        raise DataError(
            f"the picture {str(path)!r} has {image.width} × {image.height} pixels; "
            f"allowed are {LARGEST_PICTURE} in all."
        )
    return image


def _pixels(image: Image.Image, size: tuple[int, int], channels: int) -> Pixels:
    # A JPEG can be decoded at a half, a quarter or an eighth of its size: photographs then cost a tenth.
    image.draft(None, (2 * max(size), 2 * max(size)))
    image.load()
    turn = TURNS.get(_orientation(image))  # only now: Pillow turns a TIFF itself while it loads
    height, width = reversed(size) if turn in SIDEWAYS else size
    plain = _eight_bits(image, "L" if channels == 1 else "RGB").resize((width, height), Image.Resampling.BILINEAR)
    if turn is not None:
        plain = plain.transpose(turn)
    return np.array(plain, dtype=np.uint8).reshape(*size, channels)


def _orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(ORIENTATION, 1)
    except Exception:  # damaged metadata around sound pixels, common among photographs: they stand as they are
        return 1
    return value if isinstance(value, int) else 1


def _eight_bits(image: Image.Image, mode: str) -> Image.Image:
    if image.mode == "F":
        raise ValueError("its pixels are floating point numbers, which have no agreed range")
    if image.mode.startswith("I"):  # 16 bits, in one of several byte orders; mode "I" holds them in 32
        values = np.asarray(image).clip(0, 65535).astype(np.int32)
        image = Image.fromarray(((values + 128) // 257).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert(mode)


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "it is not a JPEG, PNG, BMP, GIF, WebP or TIFF picture"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    first_line = (str(error).splitlines() or [""])[0].rstrip(".")[:200]
    return ascii(first_line)[1:-1] or type(error).__name__


def centre(whole: tuple[int, int], size: tuple[int, int]) -> tuple[int, int]:
    """Return (top, left) of the window of `size` in the middle of `whole`."""
    return (whole[0] - size[0]) // 2, (whole[1] - size[1]) // 2


def read_image(path: str | Path, preprocessing: Preprocessing) -> Tensor:
    """Return a picture as a network takes it: float32 [C, H, W]; one that cannot be read raises DataError.

    The same numbers as a folder's evaluation batches hold.
    """
    whole = preprocessing.resize or preprocessing.size
    pixels = decode(path, whole, preprocessing.channels)
    (top, left), (height, width) = centre(whole, preprocessing.size), preprocessing.size
    window = torch.from_numpy(pixels[top : top + height, left : left + width])
    return normalise(window.unsqueeze(0), preprocessing)[0]
