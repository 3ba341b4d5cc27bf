"""A torch.nn layer and its spherical twin: one object that changes its class.

The layer stays the object it was, as torch's own lazy layers do when they see their first input. So the same
parameters, hooks (with the handles that remove them), training mode, further attributes and every other reference to
the layer are kept without being copied, and a layer with several names stays one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from spherenet.layers import (
    LazySphereConv1d,
    LazySphereConv2d,
    LazySphereConv3d,
    LazySphereLinear,
    SphereConv1d,
    SphereConv2d,
    SphereConv3d,
    SphereLayer,
    SphereLinear,
)
from spherenet.ops.angle_functions import AngleFunction

__all__ = ["SphereOptions", "become_plain", "become_sphere", "has_plain_twin", "num_filters", "own_methods"]

_SPHERE_OF: dict[type[nn.Module], type[SphereLayer]] = {
    nn.Conv1d: SphereConv1d,
    nn.Conv2d: SphereConv2d,
    nn.Conv3d: SphereConv3d,
    nn.Linear: SphereLinear,
    nn.LazyConv1d: LazySphereConv1d,
    nn.LazyConv2d: LazySphereConv2d,
    nn.LazyConv3d: LazySphereConv3d,
    nn.LazyLinear: LazySphereLinear,
}
_PLAIN_OF: dict[type[nn.Module], type[nn.Module]] = {sphere: plain for plain, sphere in _SPHERE_OF.items()}

_HARMLESS = {"reset_parameters", "extra_repr", "_abc_impl"}
_TELLING = {"__call__", "__getattr__", "__getattribute__"}
"""What a subclass may define and still compute what torch's class computes; of Python's own names, what it may not."""


@dataclass(frozen=True)
class SphereOptions:
    """What makes a layer spherical, as in `SphereConv2d`."""

    operator: str | AngleFunction
    k: float | None
    k_sharing: str
    rescale: str | Sequence[float] | None
    eps: float

    def check(self, layer: nn.Module) -> None:
        """Raise what `become_sphere` would raise, without touching the layer."""
        self._set_up(SphereLayer(), layer)

    def apply(self, layer: nn.Module) -> None:
        """Add k, β and γ to a layer that has its spherical class."""
        self._set_up(layer, layer)

    def _set_up(self, target: Any, layer: Any) -> None:
        filters, weight = num_filters(layer), layer.weight
        options = (self.operator, self.k, self.k_sharing, self.rescale, self.eps)
        target._set_up_sphere(filters, *options, weight.device, weight.dtype)


def num_filters(layer: Any) -> int:
    """Return the number of output channels or features."""
    return int(layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels)


def own_methods(layer: nn.Module) -> list[str]:
    """Return what the layer's class adds to torch's class: with any of it, the twin would behave differently."""
    if "forward" in vars(layer):  # wrapped on the object, as tools that move weights about do: it would stay plain
        return ["forward"]
    torch_class = _torch_class(layer)
    additions = [cls for cls in type(layer).__mro__ if cls not in torch_class.__mro__]
    names = [name for cls in additions for name in vars(cls)]
    return [name for name in names if (name in _TELLING if name.startswith("__") else name not in _HARMLESS)]


def become_sphere(layer: Any, options: SphereOptions) -> None:
    """Turn a convolution or linear layer into its spherical twin, in place; `options` must have been checked.

    k, β and γ are new parameters where they are learned, on the weight's device and of its dtype. Those of a frozen
    layer are frozen too.
    """
    layer.__class__ = _SPHERE_OF[_torch_class(layer)]
    options.apply(layer)
    if not layer.weight.requires_grad:
        if isinstance(options.operator, str):  # an angle that was handed in may serve layers that are not frozen
            layer.angle.requires_grad_(False)
        if layer.rescale == "learned":
            layer.beta.requires_grad_(False)
            layer.gamma.requires_grad_(False)


def has_plain_twin(layer: nn.Module) -> bool:
    """Return whether a sphere layer is one of the library's own, not a subclass."""
    return type(layer) in _PLAIN_OF


def become_plain(layer: Any) -> list[str]:
    """Turn a sphere layer into torch's class, in place; return which of k, β and γ were dropped."""
    dropped = ["k"] if layer.k is not None else []
    dropped += ["β and γ"] if layer.rescale is not None else []
    layer.__class__ = _PLAIN_OF[type(layer)]
    for name in ("angle", "beta", "gamma", "eps", "k_sharing", "rescale"):
        delattr(layer, name)
    return dropped


def _torch_class(layer: nn.Module) -> type[nn.Module]:
    return next(cls for cls in type(layer).__mro__ if cls in _SPHERE_OF)
