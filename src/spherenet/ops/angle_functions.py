"""Angle functions as objects: what a layer or a loss holds, learned parameters included.

An angle function maps cosines to outputs. It always sees the *filters in the last dimension*, whatever the
layer, so a parameter of shape [filters] broadcasts by itself.

To plug in your own g, wrap a function of θ,

    sn.SphereConv2d(3, 64, 3, operator=sn.CustomAngle(lambda theta: 1 - (theta / math.pi) ** 2 * 2))

or, where g has parameters of its own, subclass `AngleFunction` and write `forward(cosine)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spherenet.ops import angles
from spherenet.ops.arguments import require_k, require_one_of

__all__ = [
    "DEFAULT_K",
    "DEFAULT_LEARNED_K",
    "OPERATORS",
    "AngleFunction",
    "CosineAngle",
    "CustomAngle",
    "LearnableSigmoidAngle",
    "LinearAngle",
    "SigmoidAngle",
    "make_angle",
]

OPERATORS = ("linear", "cosine", "sigmoid", "learnable")

DEFAULT_K = 0.3
"""The sigmoid's k where none is given: the paper's choice for its larger experiments."""

DEFAULT_LEARNED_K = 0.5
"""Where a learned k starts (the paper's value)."""

SMALLEST_LEARNED_K = 0.01
"""Floor of a learned k: there the sigmoid is a step already, and a smaller k would only lose its gradient."""


class AngleFunction(nn.Module):
    """A function g of the angle θ, evaluated on c = cos θ (SPEC 1 (1)).

    A subclass writes `forward(cosine)`: a floating tensor of any shape with the filters last, to a tensor of
    the same shape. It should decrease in θ; nothing else is required. Use `ops.angles.angle_from_cosine`
    rather than `acos` to get θ: its gradient stays finite at θ = 0 and θ = π.
    """

    name: str = "custom"

    @property
    def k(self) -> Tensor | float | None:
        """The positive k of a sigmoid; None where g has none."""
        return None

    def forward(self, cosine: Tensor) -> Tensor:
        """Return g for each cosine."""
        raise NotImplementedError(f"{type(self).__name__} must define forward(cosine).")

    def at(self, theta: Tensor) -> Tensor:
        """Return g(θ) for angles rather than cosines."""
        value: Tensor = self(theta.cos())
        return value

    def derivative(self, cosine: Tensor) -> Tensor:
        """Return dg/dc; multiply by −sin θ for dg/dθ."""
        derivative: Tensor = torch.func.jvp(self.forward, (cosine,), (torch.ones_like(cosine),))[1]
        return derivative


class LinearAngle(AngleFunction):
    """g = 1 − 2θ/π."""

    name = "linear"

    def forward(self, cosine: Tensor) -> Tensor:
        """Return g for each cosine."""
        return angles.linear(cosine)

    def derivative(self, cosine: Tensor) -> Tensor:
        """Return dg/dc."""
        return angles.linear_derivative(cosine)


class CosineAngle(AngleFunction):
    """g = cos θ."""

    name = "cosine"

    def forward(self, cosine: Tensor) -> Tensor:
        """Return g for each cosine."""
        return angles.cosine(cosine)

    def derivative(self, cosine: Tensor) -> Tensor:
        """Return dg/dc."""
        return angles.cosine_derivative(cosine)


class _SigmoidFamily(AngleFunction):
    """What the sigmoids share: g and its derivative from their k."""

    def forward(self, cosine: Tensor) -> Tensor:
        """Return g for each cosine."""
        return angles.sigmoid(cosine, self._positive_k())

    def derivative(self, cosine: Tensor) -> Tensor:
        """Return dg/dc."""
        return angles.sigmoid_derivative(cosine, self._positive_k())

    def _positive_k(self) -> Tensor | float:
        k = self.k
        assert k is not None
        return k


class SigmoidAngle(_SigmoidFamily):
    """g = tanh(asin(c)/(2k)) / tanh(π/(4k)) with a fixed k: a step for small k, linear for large k."""

    name = "sigmoid"

    def __init__(self, k: float = DEFAULT_K) -> None:
        """k: a finite number greater than 0."""
        super().__init__()
        self._k = require_k(k)

    @property
    def k(self) -> float:
        """The fixed k."""
        return self._k

    def extra_repr(self) -> str:
        """Name k in the printed module."""
        return f"k={self._k:g}"


class LearnableSigmoidAngle(_SigmoidFamily):
    """The sigmoid with a trained k > 0, one a filter or one in all.

    k = 0.01 + softplus(raw_k): positive by construction, near 0.5 it moves about as freely as k itself would.
    Hand one object to several layers to share its k.
    """

    name = "learnable"

    def __init__(
        self,
        num_filters: int | None = None,
        k: float = DEFAULT_LEARNED_K,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """num_filters: how many k; None for a single one, shared by all filters. k: where each starts."""
        super().__init__()
        self.initial_k = require_k(k)
        if self.initial_k <= SMALLEST_LEARNED_K:
            raise ValueError(f"k must be greater than {SMALLEST_LEARNED_K:g} where it is learned, got {k!r}.")
        shape = () if num_filters is None else (num_filters,)
        self.raw_k = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set every k to its initial value."""
        excess = self.initial_k - SMALLEST_LEARNED_K
        # The inverse of softplus, in the form that neither overflows nor cancels.
        nn.init.constant_(self.raw_k, excess + math.log(-math.expm1(-excess)))

    @property
    def k(self) -> Tensor:
        """The positive k, of shape [] or [filters], in float32 at least."""
        raw = self.raw_k.float() if self.raw_k.dtype in (torch.bfloat16, torch.float16) else self.raw_k
        return SMALLEST_LEARNED_K + F.softplus(raw)

    def extra_repr(self) -> str:
        """Name the number of k in the printed module."""
        shared = "shared" if self.raw_k.dim() == 0 else f"{self.raw_k.numel()} filters"
        return f"{shared}, initial_k={self.initial_k:g}"


class CustomAngle(AngleFunction):
    """A user's own g, given as a function of θ ∈ [0, π] on tensors; autograd differentiates it."""

    def __init__(self, g: Callable[[Tensor], Tensor], name: str = "custom") -> None:
        """g: elementwise function of θ. name: what printed modules and logs call it."""
        super().__init__()
        if not callable(g):
            raise TypeError(f"g must be a function of θ, got {g!r}.")
        self.g = g
        self.name = name

    def forward(self, cosine: Tensor) -> Tensor:
        """Return g for each cosine."""
        return self.g(angles.angle_from_cosine(cosine))

    def extra_repr(self) -> str:
        """Name the function in the printed module."""
        return self.name


def make_angle(
    operator: str | AngleFunction,
    k: float | None = None,
    *,
    num_filters: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> AngleFunction:
    """Return the angle function of a name; an object is returned as it is.

    k: of a sigmoid (0.3 when None) or where a learned one starts (0.5 when None); refused elsewhere.
    num_filters: how many k a learnable sigmoid has; None for one.
    """
    if isinstance(operator, AngleFunction):
        if k is not None:
            raise ValueError(f"k must be None when operator is an angle function object, got {k!r}.")
        return operator
    if not isinstance(operator, str):
        raise TypeError(
            f"operator must be one of {', '.join(map(repr, OPERATORS))} or an AngleFunction object, "
            f"got {operator!r} of type {type(operator).__name__}."
        )
    require_one_of("operator", operator, OPERATORS)
    if operator in ("linear", "cosine"):
        if k is not None:
            raise ValueError(f"k must be None for the {operator} operator, which has none, got {k!r}.")
        return LinearAngle() if operator == "linear" else CosineAngle()
    if operator == "sigmoid":
        return SigmoidAngle(DEFAULT_K if k is None else k)
    return LearnableSigmoidAngle(num_filters, DEFAULT_LEARNED_K if k is None else k, device=device, dtype=dtype)
