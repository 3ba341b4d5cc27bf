"""Where a convolution looks: sizes for each dimension and the padding of torch.nn's modes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

__all__ = ["Geometry", "pad_input", "per_dimension", "same_as_numbers"]


class Geometry(NamedTuple):
    """How a kernel moves over its input, one number per spatial dimension; all empty for a fully connected layer."""

    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1


def per_dimension(value: int | Sequence[int], spatial_dims: int) -> tuple[int, ...]:
    """Return one number a dimension from a number, a sequence of one or a whole sequence."""
    if type(value) is tuple and len(value) == spatial_dims:
        return value
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * spatial_dims if len(values) == 1 else values


def _begin_and_end(
    kernel_size: Sequence[int], padding: str | Sequence[int], dilation: Sequence[int]
) -> list[tuple[int, int]]:
    """How much is padded before and after each dimension; "same" puts the odd pixel after, as torch does."""
    if padding == "valid":
        return [(0, 0)] * len(kernel_size)
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel_size, dilation, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(int(amount), int(amount)) for amount in padding]


def pad_input(
    x: Tensor,
    kernel_size: Sequence[int],
    padding: str | Sequence[int],
    dilation: Sequence[int],
    padding_mode: str = "zeros",
) -> Tensor:
    """Pad the spatial dimensions of x as torch.nn's convolutions do for `padding_mode`."""
    amounts = [n for pair in reversed(_begin_and_end(kernel_size, padding, dilation)) for n in pair]
    if not any(amounts):
        return x
    return F.pad(x, amounts, mode="constant" if padding_mode == "zeros" else padding_mode)


def same_as_numbers(
    x: Tensor, kernel_size: Sequence[int], padding: str | Sequence[int], dilation: Sequence[int]
) -> tuple[Tensor, tuple[int, ...]]:
    """Return an input and a padding in numbers that together mean `padding`.

    The input is padded here only where "same" is lopsided (an even kernel), which numbers cannot say.
    """
    sides = _begin_and_end(kernel_size, padding, dilation)
    if all(begin == end for begin, end in sides):
        return x, tuple(begin for begin, _ in sides)
    return pad_input(x, kernel_size, padding, dilation), (0,) * len(sides)
