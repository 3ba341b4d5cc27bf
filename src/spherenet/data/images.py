"""Image files: decoding to uint8 at the size that a preprocessing asks for.

Gray, palette, 16-bit, CMYK and transparent images become 8-bit gray or RGB. Transparency is composited on white, as in
a browser; the EXIF orientation is applied; the first frame of an animation is used. Only the formats below are tried:
some of Pillow's other decoders run external programs. Pillow reads AVIF if it was built with libavif, as its wheels
are; it cannot read HEIC.
"""

from __future__ import annotations

import ctypes
import logging
import os
import stat
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError, _imaging, features
from torch import Tensor

from spherenet._util.files import open_regular
from spherenet._util.text import first_line
from spherenet.data.preprocessing import Preprocessing, normalize
from spherenet.errors import DataError

__all__ = [
    "FORMATS",
    "MAX_PIXELS",
    "SUFFIXES",
    "Pixels",
    "center_offset",
    "decode",
    "draft_side",
    "oriented_size",
    "pixel_limit",
    "read_image",
    "read_pixels",
    "signature",
    "unsupported",
]

MAX_PIXELS = (1 << 28) // 3  # 89 million, 256 MiB as RGB; Pillow's own limit only warns and can be turned off
MAX_FILE_SIDE = 1 << 16  # of an image file; Pillow needs memory to resize a row in proportion to its length
MAX_ASPECT = 10_000  # ratio of the sides of an image file
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".avif", ".heic", ".heif")
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

Pixels = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


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
    with _readable(path):
        with _open(path, max_pixels) as image:
            if image.format != "PNG":
                return _pixels(image, size, channels, keep_aspect)
            image.verify()  # loading a PNG does not compare its checksums; afterwards the file must be reopened
        with _open(path, max_pixels) as image:
            return _pixels(image, size, channels, keep_aspect)


def oriented_size(path: str | Path, *, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Return (height, width) of an image as it is shown, from the header of its file.

    Arguments and errors are those of `decode`.
    """
    with _readable(path), _open(path, max_pixels) as image:
        width, height = image.size
        return (width, height) if TRANSPOSES.get(_orientation(image)) in SWAPS_SIDES else (height, width)


@contextmanager
def _readable(path: str | Path) -> Iterator[None]:
    """Raise DataError for any error of a decoder, and ignore warnings."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd metadata and of large images; _open checks the size
            yield
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
    with _silent_libtiff() if image.format == "TIFF" else nullcontext():
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


_libtiff_handlers = Lock()  # they are global variables of the library


@cache
def _libtiff_setters() -> tuple[Any, ...]:
    """Return the functions that replace libtiff's handlers of messages, none if Pillow does not export them."""
    try:
        # The symbols of a library include those of the libraries that it is linked with.
        library = ctypes.CDLL(_imaging.__file__)
        setters = [getattr(library, name) for name in ("TIFFSetErrorHandler", "TIFFSetWarningHandler")]
    except (OSError, AttributeError, TypeError):  # Windows, where libtiff is a part of Pillow; or built without it
        return ()
    for setter in setters:
        setter.argtypes, setter.restype = [ctypes.c_void_p], ctypes.c_void_p
    return tuple(setters)


@contextmanager
def _silent_libtiff() -> Iterator[None]:
    """Run a block in which libtiff, with which Pillow decodes TIFF, prints nothing besides the error that it raises.

    Other users of libtiff in the process are as before afterwards.
    """
    with _libtiff_handlers, ExitStack() as stack:
        for setter in _libtiff_setters():
            stack.callback(setter, setter(None))
        yield


def _orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(ORIENTATION, 1)
    except Exception:  # corrupt metadata with valid pixels is common among photographs: not rotated
        return 1
    return value if isinstance(value, int) else 1


def _convert(image: Image.Image, mode: str) -> Image.Image:
    """Convert to 8 bits per channel of the given mode, on white where the image is transparent."""
    if image.mode == "F":
        raise ValueError("floating point pixels are not supported, because they have no standard range")
    if image.mode == "I":
        raise ValueError("pixels of 32-bit integers are not supported, because they have no standard range")
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
