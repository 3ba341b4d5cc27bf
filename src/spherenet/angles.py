"""The angle functions g(θ) of SPEC 1 (1), written as pure functions of c = cos θ.

Each g has three functions: its value, its derivative dg/dc and its inverse g ↦ c. They are written in c
because c is what a convolution yields, and because `asin c` has no cancellation at θ = π/2 where
`1 − 2θ/π` loses digits. All are odd in c, decrease in θ and map [−1, 1] onto [−1, 1].

The derivative dg/dc of a function with a slope at θ = 0 grows like 1/sin θ. The gradient that reaches a
patch does not: it is multiplied by sin θ. Both factors are computed from the same rounded c, so sin θ is
kept above a floor (`sine`), which makes the product bounded and its limit at θ = 0 and θ = π zero.

Angle functions as objects: what a layer or a loss holds, learned parameters included.

An angle function maps cosines to outputs. It always sees the *filters in the last dimension*, whatever the
layer, so a parameter of shape [filters] broadcasts by itself.

To plug in your own g, wrap a function of θ,

    sn.SphereConv2d(3, 64, 3, operator=sn.CustomAngle(lambda theta: 1 - (theta / math.pi) ** 2 * 2))

or, where g has parameters of its own, subclass `AngleFunction` and write `forward(cosine)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spherenet.elementary import ShortDerivative, keep, short
from spherenet.validation import require_one_of, require_positive

__all__ = [
    "DEFAULT_K",
    "DEFAULT_LEARNED_K",
    "OPERATORS",
    "SMALLEST_K",
    "AngleFunction",
    "CosineAngle",
    "CustomAngle",
    "LearnableSigmoidAngle",
    "LinearAngle",
    "SigmoidAngle",
    "angle_from_cosine",
    "asin",
    "cosine",
    "cosine_derivative",
    "cosine_inverse",
    "linear",
    "linear_derivative",
    "linear_inverse",
    "make_angle",
    "require_k",
    "sigmoid",
    "sigmoid_derivative",
    "sigmoid_inverse",
    "sine",
]

SMALLEST_K = 1e-6
"""Below this k the sigmoid is a step in every format, and 1/k² overflows float32 where k is learned."""


def require_k(value: object) -> float:
    """Return the sigmoid's k, a finite number of at least `SMALLEST_K`."""
    number = require_positive("k", value)
    if number < SMALLEST_K:
        raise ValueError(f"k must be at least {SMALLEST_K:g}, got {value!r}: below it the sigmoid is a step.")
    return number


def sine(cosine: Tensor) -> Tensor:
    """sin θ from c = cos θ, kept above 4√ε of the dtype.

    A float cosine of a few hundred products is off by about ε, so 1 − c² is noise below some ε. The floor
    of 16 ε is far enough above the noise for the gradient bound max|dg/dθ|/‖x‖ to hold near θ = 0.
    """
    floor = 16 * torch.finfo(cosine.dtype).eps
    return ((1 - cosine) * (1 + cosine)).clamp_min(floor).sqrt()


class _BoundedAsin(ShortDerivative):
    """asin of a clamped cosine whose derivative 1/sin θ stays finite at ±1; sin θ is the floored cos of the result."""

    @staticmethod
    def forward(cosine: Tensor) -> Tensor:
        return cosine.clamp(-1, 1).asin()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        keep(ctx, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else grad / _floored_cosine(ctx.saved_tensors[0])

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent / _floored_cosine(ctx.saved_tensors[0])


def _floored_cosine(latitude: Tensor) -> Tensor:
    """sin θ from π/2 − θ, kept above its floor as in `sine`."""
    return latitude.cos().clamp_min(4 * torch.finfo(latitude.dtype).eps ** 0.5)


_bounded_asin = short(_BoundedAsin)


def asin(cosine: Tensor) -> Tensor:
    """π/2 − θ from c = cos θ; c is clamped to [−1, 1], the derivative is bounded (see the module)."""
    result: Tensor = _bounded_asin(cosine)
    return result


def angle_from_cosine(cosine: Tensor) -> Tensor:
    """θ ∈ [0, π] from c = cos θ, with the bounded derivative of `asin`."""
    return math.pi / 2 - asin(cosine)


def cosine(cosine: Tensor) -> Tensor:
    """g = cos θ: c itself, clamped to [−1, 1]."""
    return cosine.clamp(-1, 1)


def cosine_derivative(cosine: Tensor) -> Tensor:
    """dg/dc = 1."""
    return torch.ones_like(cosine)


def cosine_inverse(value: Tensor) -> Tensor:
    """c = g."""
    return value.clamp(-1, 1)


def linear(cosine: Tensor) -> Tensor:
    """g = 1 − 2θ/π = (2/π)·asin c."""
    return asin(cosine) * (2 / math.pi)


def linear_derivative(cosine: Tensor) -> Tensor:
    """dg/dc = (2/π)/sin θ."""
    return (2 / math.pi) / sine(cosine)


def linear_inverse(value: Tensor) -> Tensor:
    """c = sin(πg/2)."""
    return (value.clamp(-1, 1) * (math.pi / 2)).sin()


def _tanh(value: Tensor | float) -> Any:
    return value.tanh() if isinstance(value, Tensor) else math.tanh(value)


class _FixedSigmoid(ShortDerivative):
    """y = q·tanh(a·h) of the latitude a, with h = 1/(2k) and q = 1/tanh(π/(4k)):  dy = h·(q − y²/q)·da."""

    @staticmethod
    def forward(latitude: Tensor, k: float) -> Tensor:
        return (latitude / (2 * k)).tanh() / math.tanh(math.pi / (4 * k))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.k = inputs[1]
        keep(ctx, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return None if grad is None else grad * _FixedSigmoid.slope(ctx), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return tangent * _FixedSigmoid.slope(ctx)

    @staticmethod
    def slope(ctx: Any) -> Tensor:
        """dy/da = h·q − y²·h/q."""
        (value,) = ctx.saved_tensors
        h, tau = 0.5 / ctx.k, math.tanh(math.pi / (4 * ctx.k))
        return torch.rsub(value * value, h / tau, alpha=h * tau)


class _LearnedSigmoid(ShortDerivative):
    """y = tanh(a·h)/τ with a tensor k that broadcasts; returns y, h and τ, which its derivatives use.

    With B = 1/τ − y²τ and W = 1/τ − τ:  dy = B·(h·da + a·dh) + y·W·πh²·dk,  dh = −2h²·dk,  dτ = −τ·W·πh²·dk.
    """

    @staticmethod
    def forward(latitude: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = 0.5 / k
        tau = (h * (math.pi / 2)).tanh()
        return (latitude * h).tanh() / tau, h, tau

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
        keep(ctx, inputs[0], *output)

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, grad_h: Tensor | None, grad_tau: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        latitude, value, h, tau = ctx.saved_tensors
        inverse = tau.reciprocal()
        grad_latitude = None
        to_h, along = grad_h, None if grad_tau is None else -tau * grad_tau
        if grad is not None:
            by_argument = grad * (inverse - value * value * tau)
            grad_latitude = by_argument * h if ctx.needs_input_grad[0] else None
            if ctx.needs_input_grad[1]:
                to_h = _total((by_argument * latitude).sum_to_size(h.shape), to_h)
                along = _total((grad * value).sum_to_size(h.shape), along)
        if not ctx.needs_input_grad[1] or (to_h is None and along is None):
            return grad_latitude, None
        to_h = torch.zeros_like(h) if to_h is None else to_h
        along = torch.zeros_like(h) if along is None else along
        return grad_latitude, torch.addcmul(to_h, along, inverse - tau, value=-math.pi / 2) * h * h * -2

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor | None, k_tangent: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        latitude, value, h, tau = ctx.saved_tensors
        inverse = tau.reciprocal()
        by_argument = inverse - value * value * tau
        change = torch.zeros_like(value) if tangent is None else by_argument * h * tangent
        if k_tangent is None:
            return change, torch.zeros_like(h), torch.zeros_like(tau)
        h_tangent = -2 * h * h * k_tangent
        relative = math.pi * h * h * (inverse - tau) * k_tangent
        return change + by_argument * latitude * h_tangent + value * relative, h_tangent, -tau * relative


def _total(first: Tensor, second: Tensor | None) -> Tensor:
    return first if second is None else first + second


class _WithoutRoundingAboveOne(ShortDerivative):
    """Clamp what only rounding carries beyond ±1: the derivative is 1.

    The result is a tensor that no derivative needs, so that the next layer may change it in place.
    """

    @staticmethod
    def forward(value: Tensor) -> Tensor:
        return value.clamp(-1, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent.clone()


_fixed_sigmoid, _learned_sigmoid = short(_FixedSigmoid), short(_LearnedSigmoid)
_without_rounding_above_one = short(_WithoutRoundingAboveOne)


def sigmoid(cosine: Tensor, k: Tensor | float) -> Tensor:
    """g = C(k)·(1−e^u)/(1+e^u) with u = θ/k − π/(2k), as tanh(asin(c)/(2k)) / tanh(π/(4k)).

    k is a positive number or a positive tensor that broadcasts against `cosine`.
    """
    latitude = asin(cosine)
    value = _learned_sigmoid(latitude, k)[0] if isinstance(k, Tensor) else _fixed_sigmoid(latitude, k)
    result: Tensor = _without_rounding_above_one(value)
    return result


def sigmoid_derivative(cosine: Tensor, k: Tensor | float) -> Tensor:
    """dg/dc = C(k)·sech²(asin(c)/(2k)) / (2k·sin θ)."""
    # 1/cosh² keeps its relative accuracy where 1 − tanh² is rounding noise; cosh overflows to inf, not to NaN.
    steepness = 1 / (asin(cosine) / (2 * k)).cosh().square()
    result: Tensor = steepness / (2 * k * _tanh(math.pi / (4 * k)) * sine(cosine))
    return result


def sigmoid_inverse(value: Tensor, k: Tensor | float) -> Tensor:
    """c = sin(2k·atanh(g·tanh(π/(4k)))); where tanh saturates, the largest c that the format can tell apart."""
    below_one = 1 - torch.finfo(value.dtype).eps
    scaled = (value * _tanh(math.pi / (4 * k))).clamp(-below_one, below_one)
    latitude: Tensor = 2 * k * scaled.atanh()
    return latitude.clamp(-math.pi / 2, math.pi / 2).sin()


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
    the same shape. It should decrease in θ; nothing else is required. Use `ops.angle_from_cosine`
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
        return linear(cosine)

    def derivative(self, cosine: Tensor) -> Tensor:
        """Return dg/dc."""
        return linear_derivative(cosine)


class CosineAngle(AngleFunction):
    """g = cos θ."""

    name = "cosine"

    def forward(self, cosine: Tensor) -> Tensor:
        """Return g for each cosine."""
        return cosine.clamp(-1, 1)

    def derivative(self, cosine: Tensor) -> Tensor:
        """Return dg/dc."""
        return cosine_derivative(cosine)


class _SigmoidFamily(AngleFunction):
    """What the sigmoids share: g and its derivative from their k."""

    def forward(self, cosine: Tensor) -> Tensor:
        """Return g for each cosine."""
        return sigmoid(cosine, self._positive_k())

    def derivative(self, cosine: Tensor) -> Tensor:
        """Return dg/dc."""
        return sigmoid_derivative(cosine, self._positive_k())

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
        return self.g(angle_from_cosine(cosine))

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
