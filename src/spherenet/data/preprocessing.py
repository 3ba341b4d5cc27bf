"""How a picture becomes a network's input, as one value that is saved with the network."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from spherenet.data.transfer import without_waiting
from spherenet.errors import DataError

__all__ = ["Preprocessing", "normalise"]

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
