"""What every spherical layer shares: its angle function, its rescaling and its eps (SPEC 1 (1), (2); SPEC 6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spherenet.angles import AngleFunction, make_angle
from spherenet.validation import require_number, require_one_of, require_positive

__all__ = ["SphereLayer", "forget_inputs"]


class SphereLayer(nn.Module):
    """Mixin of the layers whose output is β·(g(θ) + b) + γ.

    It comes before the torch.nn class it refines. `angle` is the layer's g, `k` its positive k (None where g
    has none), `beta` and `gamma` the rescaling: parameters of shape [filters] when learned, numbers when
    fixed, None without rescaling.
    """

    angle: AngleFunction
    beta: nn.Parameter | float | None
    gamma: nn.Parameter | float | None
    eps: float

    def _set_up_sphere(
        self,
        num_filters: int,
        operator: str | AngleFunction,
        k: float | None,
        k_sharing: str,
        rescale: str | Sequence[float] | None,
        eps: float,
        device: Any,
        dtype: Any,
    ) -> None:
        """Add the parts of a spherical layer; the last step of a constructor."""
        require_one_of("k_sharing", k_sharing, ("filter", "layer"))
        self.eps = require_positive("eps", eps)
        self.k_sharing = k_sharing
        shared = None if k_sharing == "layer" else num_filters
        self.angle = make_angle(operator, k, num_filters=shared, device=device, dtype=dtype)
        k_of_angle = self.angle.k
        if isinstance(k_of_angle, Tensor) and k_of_angle.dim() == 1 and len(k_of_angle) != num_filters:
            raise ValueError(f"operator must have {num_filters} k, one a filter, got an object with {len(k_of_angle)}.")
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
        """The positive k: a number, a tensor of shape [filters] or [], or None where the operator has none."""
        return self.angle.k

    def reset_parameters(self) -> None:
        """Draw weight and bias as torch.nn does; k, β and γ go back to where they start."""
        super().reset_parameters()  # type: ignore[misc]
        # torch's constructors call this before the spherical parts exist; those start reset.
        if isinstance(getattr(self, "angle", None), nn.Module):
            reset_angle = getattr(self.angle, "reset_parameters", None)
            if reset_angle is not None:
                reset_angle()
            if isinstance(self.beta, nn.Parameter) and isinstance(self.gamma, nn.Parameter):
                nn.init.ones_(self.beta)
                nn.init.zeros_(self.gamma)

    def extra_repr(self) -> str:
        """torch's own description, then what makes the layer spherical."""
        parts = [super().extra_repr(), f"operator={self.operator!r}"]
        if self.rescale is not None:
            parts.append(f"rescale={self.rescale!r}")
        parts.append(f"eps={self.eps:g}")
        return ", ".join(parts)


def forget_inputs(layer: Any, device: Any, dtype: Any) -> None:
    """Make a lazy layer's weight and bias wait for the first input."""
    layer.weight = nn.UninitializedParameter(device=device, dtype=dtype)  # type: ignore[call-arg]
    if layer.bias is not None:
        layer.bias = nn.UninitializedParameter(device=device, dtype=dtype)  # type: ignore[call-arg]


def _check_rescale(rescale: str | Sequence[float] | None) -> str | tuple[float, float] | None:
    if rescale is None or rescale == "learned":
        return rescale
    if isinstance(rescale, str) or not isinstance(rescale, Sequence) or len(rescale) != 2:
        raise ValueError(f'rescale must be None, "learned" or a pair of numbers (beta, gamma), got {rescale!r}.')
    return require_number("rescale[0]", rescale[0]), require_number("rescale[1]", rescale[1])
