"""Checks of arguments that several rooms share; each raises one sentence with the value and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from difflib import get_close_matches
from typing import TypeVar

import torch
from torch import Tensor

__all__ = ["require_floating", "require_number", "require_one_of", "require_positive"]

T = TypeVar("T")


def require_number(name: str, value: object) -> float:
    """Return `value` as a float; bools, strings, NaN and infinities are refused."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}.")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value!r}.")
    return float(value)


def require_positive(name: str, value: object) -> float:
    """Return `value` as a float > 0."""
    number = require_number(name, value)
    if number <= 0:
        raise ValueError(f"{name} must be greater than 0, got {value!r}.")
    return number


def require_one_of(name: str, value: T, allowed: Iterable[T]) -> T:
    """Return `value` if it is allowed; otherwise name what is, the nearest spelling first."""
    choices = list(allowed)
    if value in choices:
        return value
    near = get_close_matches(str(value), [str(choice) for choice in choices], n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.{hint}")


def require_floating(name: str, tensor: Tensor) -> None:
    """Refuse integer, boolean and complex tensors."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}.")
    if not torch.is_floating_point(tensor):
        raise TypeError(f"{name} must be a floating point tensor, got {tensor.dtype}.")
