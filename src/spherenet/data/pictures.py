"""One picture file: decoded to uint8, whatever its kind, or refused by name.

Grey, palette, 16-bit, CMYK and transparent pictures all become grey or RGB of 8 bits; transparency is laid on white,
as a browser shows it; the EXIF orientation is applied; of an animation the first frame counts. Only the six formats
below are tried: others of Pillow's run programs or were never meant for photographs.
"""

from __future__ import annotations

import logging
import os
import stat
import warnings
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from spherenet.data.preprocessing import Preprocessing, normalise
from spherenet.errors import DataError

__all__ = ["SUFFIXES", "Pixels", "centre", "decode", "read_image"]

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
