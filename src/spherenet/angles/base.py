"""Base class of angle functions g(θ) with general implementations of all methods, and g as a function of the user."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from spherenet._util.positive import PositiveParameter
from spherenet._util.validation import NotScriptable
from spherenet.angles.elementary import angle_from_cosine
from spherenet.errors import InvalidArgumentType

__all__ = ["AngleFunction", "CustomAngle", "Device", "K", "LearnedAngle", "inside_range"]

Device = torch.device | str | None
K = Tensor | float | None


def inside_range(theta: Tensor) -> Tensor:
    """Return angles clamped to [0, π] with derivative 1, because a user's g may be undefined outside."""
    return theta + (theta.clamp(0, math.pi) - theta).detach()


class AngleFunction(NotScriptable, nn.Module):
    """A function g of the angle θ, evaluated on c = cos θ (Eq. 1).

    A subclass defines `forward(cosine)`, which maps a floating point tensor of any shape with the filters last to a
    tensor of the same shape. It should decrease in θ; nothing else is required. Use `angle_from_cosine` instead of
    `acos` to compute θ: its gradient is finite at θ = 0 and θ = π.

    The other methods have general implementations. A class that defines another g must not be a subclass of a built-in
    one, whose derivative, inverse and kernels would stay.

    Raises:
        TypeError: If a subclass of a built-in class redefines `forward` or `value`.
    """

    name: str = "custom"
    """Name of the operator."""

    parameter: ClassVar[PositiveParameter | None] = None
    """Name, start and range of the parameter of g; None if g has none."""

    is_learned: ClassVar[bool] = False
    """Whether the parameter is trained."""

    k: K = None
    """Value of the parameter, whatever its name: one number or a tensor [filters] or []; None if g has none."""

    kernel_id: ClassVar[str | None] = None
    """Name under which the fused kernels know g; None if they do not."""

    kernel_number: ClassVar[int] = -1
    """Number of g in the native kernels (csrc/api.h), if it has a `kernel_id`."""

    is_recoverable: ClassVar[bool] = True
    """Whether float32 values of g determine the cosine well enough for the kernels' backward pass."""

    has_formula: ClassVar[bool] = False
    """Whether `value(cosine, k)` defines g, not `forward(cosine)`."""

    is_identity: ClassVar[bool] = False
    """Whether g(θ) is cos θ itself."""

    constant_drop: ClassVar[float | None] = None
    """g(0) − g(π) if it is a constant; None to compute it."""

    @property
    def is_same_for_all_filters(self) -> bool:
        """Whether g is the same for every filter or class, so that it may be applied to one of them alone."""
        return False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.has_formula = cls.forward is AngleFunction.forward
        built_in = next((base for base in cls.__mro__[1:] if vars(base).get("kernel_id") is not None), None)
        if built_in is not None and ("forward" in vars(cls) or "value" in vars(cls)):
            raise InvalidArgumentType(
                cls.__name__,
                "must be a subclass of AngleFunction to define another g, got a subclass of "
                f"{built_in.__name__}, whose derivative, inverse and kernels would stay.",
            )

    @classmethod
    def has_k(cls) -> bool:
        """Return whether g has a parameter that is called k."""
        return cls.parameter is not None and cls.parameter.name == "k"

    @classmethod
    def create(cls, k: float | None, num_filters: int | None, device: Device, dtype: torch.dtype | None) -> Any:
        """Return an object for the arguments of a layer; only a learned parameter needs the last three."""
        options: dict[str, Any] = {} if k is None else {"k": k}
        if cls.is_learned:
            options |= {"num_filters": num_filters, "device": device, "dtype": dtype}
        return cls(**options)

    def forward(self, cosine: Tensor) -> Tensor:
        """Return g for each cosine, filters last."""
        return self.value(cosine, self.k)

    def value(self, cosine: Tensor, k: K) -> Tensor:
        """Return g for an explicit parameter that broadcasts against the cosines."""
        raise NotImplementedError(f"{type(self).__name__} must define forward(cosine).")

    def derivative(self, cosine: Tensor) -> Tensor:
        """Return dg/dc; multiply by −sin θ for dg/dθ."""
        derivative: Tensor = torch.func.jvp(self.forward, (cosine,), (torch.ones_like(cosine),))[1]
        return derivative

    def inverse(self, value: Tensor, k: K) -> Tensor:
        """Return the cosine at which g has a value."""
        raise NotImplementedError(f"{type(self).__name__} does not define an inverse.")

    def at(self, theta: Tensor) -> Tensor:
        """Return g(θ) for angles in [0, π], up to rounding.

        Built-in classes compute it from θ, not from cos θ: the way back from cos θ to θ would lose half of the digits
        near 0 and π, and with them the slope of a g that has one there.
        """
        return self(inside_range(theta).cos())  # type: ignore[no-any-return]

    def for_inference(self, cosine: Tensor) -> Tensor:
        """Return g of clamped cosines by operations that exporters know, if there are any."""
        return self(cosine)  # type: ignore[no-any-return]

    # --- the margin function (Eq. 6) ---

    def extended(self, phi: Tensor) -> Tensor:
        """Return g extended to all φ ≥ 0: g(φ − jπ) − j·(g(0) − g(π)) with j = ⌊φ/π⌋.

        It consists of copies of g, each lower by g(0) − g(π), and is continuous and decreasing for every decreasing g.
        Because the copies meet, a j that rounding makes too large or too small by 1 causes only rounding error.
        """
        turns = (phi.detach() / math.pi).floor()
        return self.at(phi - turns * math.pi) - turns * self.drop(phi)

    def drop(self, like: Tensor) -> Tensor | float:
        """Return g(0) − g(π), one value per class if g differs between classes."""
        if self.constant_drop is not None:
            return self.constant_drop
        one = like.new_ones(like.shape[-1:])
        drop: Tensor = self(one) - self(-one)
        return drop

    def psi(self, cosine: Tensor, m: float) -> Tensor:
        """Return ψ_m(θ) = g extended to mθ, for any real m ≥ 1 (Eq. 6).

        m = 1 is g itself. With the cosine it is ψ of A-Softmax.

        Shape:
            cosine [*, C], or [*] for one class per row if g is the same for all classes → the same shape.
        """
        return self(cosine) if m == 1 else self.extended(angle_from_cosine(cosine) * m)

    def psi_derivative(self, theta: Tensor, m: float) -> Tensor:
        """Return dψ_m/dθ; where two copies of g meet, the derivative of the right one (of g at 0)."""
        point = theta.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(self.extended(m * point).sum(), point)
        return gradient

    # --- factors: g(c) = outer·shape(c, inner), for kernels that work in place and for frozen layers ---

    @staticmethod
    def factors(k: K) -> tuple[Any, Any] | None:
        """Return (inner, outer) for a parameter k; inner is None if the shape has no parameter.

        None if g has no such form.
        """
        return None

    @staticmethod
    def shape(cosine: Tensor, inner: Any, out: Tensor | None = None) -> Tensor:
        """Return g/outer of clamped cosines, written to `out` if given."""
        raise NotImplementedError

    @staticmethod
    def multiply_by_slope_(grad: Tensor, cosine: Tensor, shape: Tensor, inner: Any) -> None:
        """Multiply grad in place by d(g/outer)/dc; `shape` holds g/outer and is overwritten."""
        raise NotImplementedError


class LearnedAngle(AngleFunction):
    """An angle function whose `parameter` is learned, one value per filter or one for all.

    Args:
        num_filters: Number of values; None for a single one.
        initial: Initial value of each of them.
        device: Device of the parameter.
        dtype: Dtype of the parameter.
    """

    parameter: ClassVar[PositiveParameter]
    is_learned = True

    def __init__(
        self, num_filters: int | None, initial: float, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.initial = self.parameter.require_initial(initial)
        raw = self.parameter.create(num_filters, self.initial, device, dtype)
        self.register_parameter(f"raw_{self.parameter.name}", raw)

    @property
    def raw(self) -> nn.Parameter:
        """The trained tensor, of shape [] or [filters], any real numbers."""
        return getattr(self, f"raw_{self.parameter.name}")  # type: ignore[no-any-return]

    @property
    def k(self) -> Tensor:  # type: ignore[override]
        """The positive values, of shape [] or [filters], in float32 or float64."""
        return self.parameter.value(self.raw)

    @property
    def is_same_for_all_filters(self) -> bool:
        """Whether there is a single value."""
        return self.raw.dim() == 0

    def reset_parameters(self) -> None:
        """Set every value to its initial value."""
        self.parameter.reset(self.raw, self.initial)

    def extra_repr(self) -> str:
        """Return the number of values and their initial value."""
        shared = "shared" if self.raw.dim() == 0 else f"{self.raw.numel()} filters"
        return f"{shared}, initial_{self.parameter.name}={self.initial:g}"


class CustomAngle(AngleFunction):
    """A g given as a function of θ ∈ [0, π] on tensors; autograd differentiates it.

    Args:
        g: Elementwise function of θ.
        name: Name in printed modules and logs.
    """

    is_same_for_all_filters = True

    def __init__(self, g: Callable[[Tensor], Tensor], name: str = "custom") -> None:
        super().__init__()
        if not callable(g):
            raise InvalidArgumentType("g", f"must be a function of θ, got {g!r}.")
        self.g = g
        self.name = name

    def forward(self, cosine: Tensor) -> Tensor:
        """Return g for each cosine."""
        return self.g(angle_from_cosine(cosine))

    def at(self, theta: Tensor) -> Tensor:
        """Return g(θ)."""
        return self.g(inside_range(theta))

    def for_inference(self, cosine: Tensor) -> Tensor:
        """Return g(θ) without the bounded derivative, a Python function that exporters do not know."""
        return self.g(math.pi / 2 - cosine.asin())

    def extra_repr(self) -> str:
        """Return the name."""
        return self.name
