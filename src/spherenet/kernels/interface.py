"""What every fast implementation of SphereConv is told about g and about the affine map after it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["Affine", "Angle"]


class Angle(NamedTuple):
    """A built-in angle function: "cosine", "linear" or "sigmoid" with its k, a number or a tensor [1] or [O]."""

    name: str
    k: Tensor | float | None


class Affine(NamedTuple):
    """out = beta·(g + bias) + gamma, each a tensor [O] or None."""

    bias: Tensor | None
    beta: Tensor | None
    gamma: Tensor | None
