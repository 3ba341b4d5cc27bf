"""Image files: decoding to uint8 and the preprocessing that turns pixels into a network's input.

Gray, palette, 16-bit, CMYK and transparent images become 8-bit gray or RGB. Transparency is composited on white, as in
a browser; the EXIF orientation is applied; the first frame of an animation is used. Only the formats below are tried:
some of Pillow's other decoders run external programs. Pillow reads AVIF if it was built with libavif, as its wheels
are; it cannot read HEIC.
"""

from __future__ import annotations

import logging
import math
import os
import stat
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError, features
from torch import Tensor

from spherenet._util.files import open_regular
from spherenet._util.text import first_line
from spherenet.data.libtiff import without_messages
from spherenet.errors import DataError, InvalidArgument, InvalidArgumentType

__all__ = [
    "EARLIER_SUFFIXES",
    "FORMATS",
    "MAX_PIXELS",
    "SMALLEST_DEVIATION",
    "STANDARDIZATIONS",
    "SUFFIXES",
    "Pixels",
    "Preprocessing",
    "center_offset",
    "decode",
    "draft_side",
    "normalize",
    "pixel_limit",
    "read_image",
    "read_pixels",
    "signature",
    "unsupported",
]

MAX_SIDE = 8192  # of a network's input
MAX_PIXELS = (1 << 28) // 3  # 89 million, 256 MiB as RGB; Pillow's own limit only warns and can be turned off
MAX_FILE_SIDE = 1 << 16  # of an image file; Pillow needs memory to resize a row in proportion to its length
MAX_ASPECT = 10_000  # ratio of the sides of an image file
EARLIER_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff")
SUFFIXES = (*EARLIER_SUFFIXES, ".avif", ".heic", ".heif")
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", *(["AVIF"] if features.check("avif") else []))
SIGNATURES = {
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG": "PNG",
    b"GIF8": "GIF",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
}
BRANDS = {b"avif": "AVIF", b"avis": "AVIF"} | dict.fromkeys((b"heic", b"heix", b"hevc", b"heim", b"mif1"), "HEIC")
ORIENTATION = 0x0112  # the EXIF tag
TRANSPOSES = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SWAPS_SIDES = {TRANSPOSES[orientation] for orientation in (5, 6, 7, 8)}

logging.getLogger("PIL").addHandler(logging.NullHandler())  # errors are raised as DataError instead

STANDARDIZATIONS = ("data", "image")
SMALLEST_DEVIATION = 0.01  # of a standardized image, in units of normalized pixels: an empty image stays empty

Pixels = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


@dataclass(frozen=True)
class Preprocessing:
    """Conversion of an image to a network's input, saved with the network.

    The image is resized and center-cropped to `size`; a pixel p becomes x = (p − mean)/std. With `standardize` "image",
    x becomes (x − m)/max(σ, 0.01), where m and σ are mean and standard deviation of all values of the image, so that
    the input does not depend on its brightness and contrast. `export.preprocessing_steps` states every step exactly.

    Args:
        size: (height, width) of the input.
        channels: 1 (gray) or 3 (RGB).
        mean: One number per channel, in units of pixels from 0 to 255.
        std: One number per channel, in the same units.
        resize: (height, width) before the center crop; None resizes directly to `size`.
        keep_aspect: Whether the image is resized by the same factor in both directions, so that it covers `resize`, and
            the parts on both sides are cut off. Otherwise it is stretched or compressed to `resize`.
        standardize: "data" for the same scaling of all images, "image" to standardize each image as well.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: An argument is out of range.
    """

    size: tuple[int, int]
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resize: tuple[int, int] | None = None
    keep_aspect: bool = False
    standardize: str = "data"

    def __post_init__(self) -> None:
        _require_sides("size", self.size)
        if type(self.channels) is not int or self.channels not in (1, 3):
            raise InvalidArgument("channels", f"must be 1 (gray) or 3 (RGB), got {_shorten(self.channels)}.")
        _require_numbers("mean", self.mean, self.channels)
        _require_numbers("std", self.std, self.channels)
        if min(self.std) <= 0:
            raise InvalidArgument("std", f"must be greater than 0, got {self.std!r}.")
        if self.resize is not None:
            _require_sides("resize", self.resize)
            if self.resize[0] < self.size[0] or self.resize[1] < self.size[1]:
                raise InvalidArgument("resize", f"must be at least size {self.size!r}, got {self.resize!r}.")
        if not isinstance(self.keep_aspect, bool):
            raise InvalidArgumentType("keep_aspect", f"must be true or false, got {_shorten(self.keep_aspect)}.")
        if not isinstance(self.standardize, str) or self.standardize not in STANDARDIZATIONS:
            allowed = " or ".join(map(repr, STANDARDIZATIONS))
            raise InvalidArgument("standardize", f"must be {allowed}, got {_shorten(self.standardize)}.")

    @property
    def outer(self) -> tuple[int, int]:
        """(height, width) before the center crop."""
        return self.resize or self.size

    @classmethod
    def standard(
        cls,
        size: tuple[int, int],
        channels: int,
        resize: tuple[int, int] | None = None,
        keep_aspect: bool = False,
        standardize: str = "data",
    ) -> Preprocessing:
        """Return the scaling of the paper's released code: (pixel − 127.5)/128 in every channel."""
        return cls(size, channels, (127.5,) * channels, (128.0,) * channels, resize, keep_aspect, standardize)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values: numbers, lists and None.

        Defaults of `keep_aspect` and `standardize` are left out, so that earlier versions can read what they can
        reproduce.
        """
        return {
            field.name: list(value) if isinstance(value, tuple) else value
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default or field.name in _REQUIRED_FIELDS
        }

    @classmethod
    def from_dict(cls, saved: object) -> Preprocessing:
        """Return the preprocessing that `as_dict` saved.

        Raises:
            DataError: A field is missing, unknown or wrong.
        """
        allowed = [field.name for field in fields(cls)]
        if (
            not isinstance(saved, Mapping)
            or any(name not in saved for name in _REQUIRED_FIELDS)
            or any(name not in allowed for name in saved)
        ):
            raise DataError(
                f"the saved preprocessing must have the fields {', '.join(_REQUIRED_FIELDS)} and no others except "
                "keep_aspect and standardize."
            )
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()
        }
        try:
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise DataError(f"the saved preprocessing is wrong: {error}") from None


_REQUIRED_FIELDS = ("size", "channels", "mean", "std", "resize")
"""Fields of every saved preprocessing. Earlier versions have no others: their images were squashed."""


def _require_sides(name: str, value: object) -> None:
    if not isinstance(value, tuple) or len(value) != 2 or any(type(side) is not int for side in value):
        raise InvalidArgumentType(name, f"must be a pair of integers (height, width), got {_shorten(value)}.")
    if not all(1 <= side <= MAX_SIDE for side in value):
        raise InvalidArgument(name, f"must be from 1 to {MAX_SIDE} on each side, got {_shorten(value)}.")


def _require_numbers(name: str, value: object, count: int) -> None:
    if not isinstance(value, tuple) or len(value) != count:
        raise InvalidArgumentType(name, f"must hold {count} numbers, one per channel, got {_shorten(value)}.")
    # Bounded as well as finite: an integer from JSON may have more digits than a float can hold.
    if any(type(number) not in (int, float) or not abs(number) <= 1e6 or math.isnan(number) for number in value):
        raise InvalidArgument(name, f"must hold finite numbers of at most 1e6, got {_shorten(value)}.")


def _shorten(value: object) -> str:
    """Return the value's repr, shortened: a value from a file may have any length."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer too long to print, or deeply nested lists
        return f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= 80 else f"{text[:77]}..."


def normalize(images: Tensor, preprocessing: Preprocessing) -> Tensor:
    """Return pixels as a network's input: uint8 [N, H, W, C] to float32 [N, C, H, W], channels-last in memory."""
    count, height, width, channels = images.shape
    # Whole rows, so that the innermost loop has length W·C instead of C.
    rows = images.reshape(count, height, width * channels).to(torch.float32)
    for values, apply in ((preprocessing.mean, rows.sub_), (preprocessing.std, rows.div_)):
        if len(set(values)) == 1:
            apply(values[0])
        else:
            apply(torch.tensor(values).to(rows.device, non_blocking=rows.device.type != "mps").repeat(width))
    if preprocessing.standardize == "image":
        # float64, so that an image has the same values in every batch; MPS has none.
        exact = rows.to(torch.float32 if rows.device.type == "mps" else torch.float64)
        variance, mean = torch.var_mean(exact, (1, 2), correction=0, keepdim=True)
        rows = ((exact - mean) / variance.sqrt().clamp_min(SMALLEST_DEVIATION)).to(torch.float32)
    return rows.view(count, height, width, channels).permute(0, 3, 1, 2)


def pixel_limit(megapixels: float | None) -> int:
    """Return the largest number of pixels of an image for a limit in millions, None for the default."""
    return MAX_PIXELS if megapixels is None else round(megapixels * 1e6)


def decode(
    path: str | Path,
    size: tuple[int, int],
    channels: int,
    keep_aspect: bool = False,
    *,
    max_pixels: int = MAX_PIXELS,
) -> Pixels:
    """Return an image file resized to `size` (height, width) as uint8 [H, W, C].

    Args:
        path: The file.
        size: (height, width) of the result.
        channels: 1 (gray) or 3 (RGB).
        keep_aspect: Whether to cut off two sides instead of distorting the image, as in `Preprocessing`.
        max_pixels: Largest number of pixels of the file, which bounds the memory of decoding it.

    Raises:
        DataError: The file is missing, not a regular file, of another format, corrupt, or too large: it has more than
            `max_pixels` pixels, a side of more than `MAX_FILE_SIDE`, sides in a ratio of more than `MAX_ASPECT`, or
            more bytes than such an image needs.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd metadata and of large images; _open checks the size
            with _open(path, max_pixels) as image:
                if image.format != "PNG":
                    return _pixels(image, size, channels, keep_aspect)
                image.verify()  # loading a PNG does not compare its checksums; afterwards the file must be reopened
            with _open(path, max_pixels) as image:
                return _pixels(image, size, channels, keep_aspect)
    except DataError:
        raise
    except Exception as error:  # decoders raise exceptions of many types on corrupt files
        raise DataError(f"the image {str(path)!r} cannot be read: {_reason(error, path)}.") from None


_pillow_limit = Lock()


def _open(path: str | Path, max_pixels: int) -> Image.Image:
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):  # opening a pipe would block
        raise DataError(f"the image {str(path)!r} is not a regular file.")
    # WebP, AVIF and chunks of PNG are read as a whole. Four channels of 16 bits have as many bytes.
    if status.st_size > (largest := 8 * max(max_pixels, MAX_PIXELS)):
        raise DataError(f"the image {str(path)!r} must have at most {largest} bytes, got {status.st_size}.")
    with _pillow_limit:  # a global variable; our limit replaces it, and opening reads no pixels
        before, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            image = Image.open(path, formats=FORMATS)
        finally:
            Image.MAX_IMAGE_PIXELS = before
    if problem := _too_large(*image.size, max_pixels):
        image.close()
        raise DataError(f"the image {str(path)!r} must have {problem}.")
    return image


def _too_large(width: int, height: int, max_pixels: int) -> str | None:
    """Return which bound an image of this size exceeds, None if it exceeds none."""
    long, short = max(width, height), min(width, height)
    if long * short > max_pixels:
        return f"at most {max_pixels} pixels, got {width} × {height} (--max-megapixels sets the limit)"
    if long > MAX_FILE_SIDE:
        return f"sides of at most {MAX_FILE_SIDE} pixels, got {width} × {height}"
    ratio = f"a long side of at most {MAX_ASPECT} times the short one, got {width} × {height}"
    return ratio if long > MAX_ASPECT * short else None


def draft_side(size: tuple[int, int]) -> int:
    """Return the least side length to which a JPEG is reduced while it is decoded, for a result of `size`."""
    return 2 * max(size)


def _pixels(image: Image.Image, size: tuple[int, int], channels: int, keep_aspect: bool) -> Pixels:
    """Decode, resize and orient an open image. `export.preprocessing_steps` documents the steps."""
    # JPEG can be decoded at 1/2, 1/4 or 1/8 of its size, which takes a tenth of the time for photographs.
    image.draft(None, (draft_side(size), draft_side(size)))
    with without_messages() if image.format == "TIFF" else nullcontext():
        image.load()
    transpose = TRANSPOSES.get(_orientation(image))  # after load: Pillow orients a TIFF itself while loading
    height, width = reversed(size) if transpose in SWAPS_SIDES else size
    converted = _convert(image, "L" if channels == 1 else "RGB")
    if keep_aspect:
        # Reads only the part that is kept: resizing a very long image first could exhaust the memory.
        converted = ImageOps.fit(converted, (width, height), Image.Resampling.BILINEAR)
    else:
        converted = converted.resize((width, height), Image.Resampling.BILINEAR)
    if transpose is not None:
        converted = converted.transpose(transpose)
    return np.array(converted, dtype=np.uint8).reshape(*size, channels)


def _orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(ORIENTATION, 1)
    except Exception:  # corrupt metadata with valid pixels is common among photographs: not rotated
        return 1
    return value if isinstance(value, int) else 1


def _convert(image: Image.Image, mode: str) -> Image.Image:
    """Convert to 8 bits per channel of the given mode, on white where the image is transparent."""
    if image.mode == "F":
        raise InvalidArgument("floating", "point pixels are not supported, because they have no standard range")
    if image.mode == "I":
        raise InvalidArgument("pixels", "of 32-bit integers are not supported, because they have no standard range")
    if image.mode.startswith("I"):  # 16 bits in one of several byte orders
        values = np.asarray(image).astype(np.int32)
        image = Image.fromarray(((values + 128) // 257).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert(mode)


def _reason(error: Exception, path: str | Path) -> str:
    if isinstance(error, UnidentifiedImageError):
        return _unsupported(signature(path)) or "it is not a JPEG, PNG, BMP, GIF, WebP, TIFF or AVIF image"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return first_line(error)


def signature(path: str | Path) -> str | None:
    """Return the image format that the first bytes of a file are those of, e.g. "JPEG" or "HEIC", or None."""
    try:
        with open_regular(path, follow_links=True) as file:
            start = file.read(12)
    except OSError:
        return None
    if start[:4] == b"RIFF" and start[8:] == b"WEBP":
        return "WEBP"
    if start[:2] == b"BM" and start[6:10] == bytes(4):  # a text may start with BM, too
        return "BMP"
    if start[4:8] == b"ftyp":
        return BRANDS.get(start[8:])
    return next((name for prefix, name in SIGNATURES.items() if start.startswith(prefix)), None)


def unsupported(path: str | Path) -> str | None:
    """Return why an image cannot be read if its extension is that of a format that Pillow does not support."""
    name = str(path).lower()
    return _unsupported("HEIC" if name.endswith((".heic", ".heif")) else "AVIF" if name.endswith(".avif") else None)


def _unsupported(image_format: str | None) -> str | None:
    if image_format == "HEIC":
        return "it is an HEIC image, which Pillow does not read (convert it to JPEG, e.g. with ImageMagick)"
    if image_format == "AVIF" and "AVIF" not in FORMATS:
        return (
            "it is an AVIF image, which this build of Pillow does not read (install a wheel of pillow, or convert it)"
        )
    return None


def center_offset(outer: tuple[int, int], size: tuple[int, int]) -> tuple[int, int]:
    """Return (top, left) of the window of `size` in the center of `outer`."""
    return (outer[0] - size[0]) // 2, (outer[1] - size[1]) // 2


def read_image(path: str | Path, preprocessing: Preprocessing, *, max_pixels: int = MAX_PIXELS) -> Tensor:
    """Return an image file as a network's input: float32 [C, H, W], identical to the batches of a folder.

    Args:
        path: The file.
        preprocessing: Conversion to the network's input.
        max_pixels: Largest number of pixels of the file, as in `decode`.

    Raises:
        DataError: The file cannot be read.
    """
    pixels = read_pixels(path, preprocessing, max_pixels=max_pixels)
    return normalize(torch.from_numpy(pixels).unsqueeze(0), preprocessing)[0]


def read_pixels(path: str | Path, preprocessing: Preprocessing, *, max_pixels: int = MAX_PIXELS) -> Pixels:
    """Return an image file before its normalization: uint8 [H, W, C] of the preprocessing's size.

    Arguments and errors are those of `read_image`.
    """
    outer, (height, width) = preprocessing.outer, preprocessing.size
    pixels = decode(path, outer, preprocessing.channels, preprocessing.keep_aspect, max_pixels=max_pixels)
    top, left = center_offset(outer, preprocessing.size)
    return pixels[top : top + height, left : left + width]
