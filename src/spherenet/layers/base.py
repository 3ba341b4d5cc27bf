"""What all sphere layers share: angle and magnitude function, centering, rescaling and eps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from spherenet.angles import AngleFunction, make_angle
from spherenet.functional import require_center
from spherenet.magnitudes import Magnitude, make_magnitude
from spherenet.validation import OptionCheck, require_number, require_one_of, require_positive

__all__ = ["SphereLayer", "make_lazy"]


class SphereLayer(OptionCheck, nn.Module):
    """Mixin of the layers whose output is β·(h(‖x‖)·g(θ) + b) + γ (docs/concepts.md, Eq. 1 to 3, 14 and 15).

    It precedes the torch.nn class among the bases of a layer. `angle` is g and `k` its parameter, None if g has none.
    `beta` and `gamma` are parameters [filters] if they are learned, numbers if they are fixed, and None without
    rescaling.
    """

    angle: AngleFunction
    beta: nn.Parameter | float | None
    gamma: nn.Parameter | float | None
    eps: float
    center: str | None = None
    magnitude: Magnitude | None = None

    def _set_up_sphere(
        self,
        num_filters: int,
        operator: str | AngleFunction,
        k: float | None,
        k_sharing: str,
        rescale: str | Sequence[float] | None,
        eps: float,
        center: str | None,
        magnitude: str | Magnitude | None,
        radius: float | str | None,
        device: Any,
        dtype: Any,
    ) -> None:
        """Add the attributes of a sphere layer; the last step of a constructor."""
        require_one_of("k_sharing", k_sharing, ("filter", "layer"))
        self.eps = require_positive("eps", eps)
        self.k_sharing = k_sharing
        num_k = None if k_sharing == "layer" else num_filters
        self.angle = make_angle(operator, k, num_filters=num_k, device=device, dtype=dtype)
        k_of_angle = self.angle.k
        if isinstance(k_of_angle, Tensor) and k_of_angle.dim() == 1 and len(k_of_angle) != num_filters:
            raise ValueError(
                f"operator must have {num_filters} k, one per filter, got an object with {len(k_of_angle)}."
            )
        kernel = getattr(self, "weight", None)  # lazy layers do not know their kernels yet
        size = kernel[0].numel() if isinstance(kernel, Tensor) and not is_lazy(kernel) and len(kernel) else None
        self.center = require_center(center, size)
        self.magnitude = make_magnitude(magnitude, radius, num_filters=num_filters, device=device, dtype=dtype)
        self.rescale = _check_rescale(rescale)
        if self.rescale == "learned":
            self.beta = nn.Parameter(torch.ones(num_filters, device=device, dtype=dtype))
            self.gamma = nn.Parameter(torch.zeros(num_filters, device=device, dtype=dtype))
        elif isinstance(self.rescale, tuple):
            self.beta, self.gamma = self.rescale
        else:
            self.beta = self.gamma = None

    @property
    def operator(self) -> str:
        """The name of the angle function."""
        return self.angle.name

    @property
    def k(self) -> Tensor | float | None:
        """The parameter of g: a number, a tensor [filters] or [], or None if g has none."""
        return self.angle.k

    def reset_parameters(self) -> None:
        """Initialize weight and bias as torch.nn does, and set k, β and γ to their initial values."""
        super().reset_parameters()  # type: ignore[misc]
        # torch's constructors call this before the attributes of a sphere layer exist.
        if isinstance(getattr(self, "angle", None), nn.Module):
            reset_angle = getattr(self.angle, "reset_parameters", None)
            if reset_angle is not None:
                reset_angle()
            if self.magnitude is not None:
                self.magnitude.reset_parameters()
            if isinstance(self.beta, nn.Parameter) and isinstance(self.gamma, nn.Parameter):
                nn.init.ones_(self.beta)
                nn.init.zeros_(self.gamma)

    def extra_repr(self) -> str:
        """Return torch's own description followed by the options of a sphere layer."""
        options = [super().extra_repr(), f"operator={self.operator!r}"]
        if self.center is not None:
            options.append(f"center={self.center!r}")
        if self.rescale is not None:
            options.append(f"rescale={self.rescale!r}")
        options.append(f"eps={self.eps:g}")
        return ", ".join(options)


def make_lazy(layer: Any, device: Any, dtype: Any) -> None:
    """Leave the weight and bias of a lazy layer uninitialized until its first input."""
    layer.weight = nn.UninitializedParameter(device=device, dtype=dtype)  # type: ignore[call-arg]
    if layer.bias is not None:
        layer.bias = nn.UninitializedParameter(device=device, dtype=dtype)  # type: ignore[call-arg]


def _check_rescale(rescale: str | Sequence[float] | None) -> str | tuple[float, float] | None:
    if rescale is None or rescale == "learned":
        return rescale
    if isinstance(rescale, str) or not isinstance(rescale, Sequence) or len(rescale) != 2:
        raise ValueError(f'rescale must be None, "learned" or a pair of numbers (beta, gamma), got {rescale!r}.')
    return require_number("rescale[0]", rescale[0]), require_number("rescale[1]", rescale[1])
