"""Images with which the page starts, for the classes of the data sets that the package knows."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from spherenet.data.cifar import CIFAR10
from spherenet.data.digits import read_mnist5k

__all__ = ["sample_images"]

STRIP = Path(__file__).with_name("cifar10.png")
"""The first test image of each class of CIFAR-10, side by side (Krizhevsky, Learning multiple layers of features from
tiny images, 2009)."""


def sample_images(classes: Sequence[str]) -> list[dict[str, str]]:
    """Return one image of each class as a PNG data URL, if the classes are those of CIFAR-10 or the ten digits."""
    if tuple(classes) == CIFAR10.classes:
        with Image.open(STRIP, formats=["PNG"]) as strip:
            pixels = list(np.split(np.asarray(strip.convert("RGB")), len(CIFAR10.classes), axis=1))
    elif tuple(classes) == tuple("0123456789"):
        pixels = _digits()
    else:
        return []
    return [{"class": name, "image": _data_url(image)} for name, image in zip(classes, pixels, strict=True)]


def _digits() -> list[np.ndarray]:
    """Return the first test image of each digit of the embedded data set."""
    _, (images, labels) = read_mnist5k()
    return [images[labels == digit][0].squeeze(2).numpy() for digit in range(10)]


def _data_url(pixels: np.ndarray) -> str:
    stream = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(stream, "PNG")
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
