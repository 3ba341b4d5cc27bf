"""The preprocessing that turns pixels into a network's input."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from spherenet.errors import DataError, InvalidArgument, InvalidArgumentType

__all__ = ["SMALLEST_DEVIATION", "STANDARDIZATIONS", "Preprocessing", "normalize"]

MAX_SIDE = 8192  # of a network's input
STANDARDIZATIONS = ("data", "image")
SMALLEST_DEVIATION = 0.01  # of a standardized image, in units of normalized pixels: an empty image stays empty


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
