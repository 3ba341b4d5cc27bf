"""Convert a single layer by changing its class, and check beforehand that this is possible.

The layer stays the same object, as torch's own lazy layers do when they see their first input. Its parameters, hooks,
training mode, further attributes and all references to it are kept without copying, and a layer with several names
stays one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from spherenet.angles import AngleFunction
from spherenet.convert.layers import CONVERTIBLE, TRANSPOSED, num_filters, sealed_reason
from spherenet.errors import ModelError
from spherenet.layers import (
    LazySphereConv1d,
    LazySphereConv2d,
    LazySphereConv3d,
    LazySphereLinear,
    SphereConv1d,
    SphereConv2d,
    SphereConv3d,
    SphereConvTranspose1d,
    SphereConvTranspose2d,
    SphereConvTranspose3d,
    SphereLayer,
    SphereLinear,
)
from spherenet.magnitudes import Magnitude

__all__ = [
    "SphereOptions",
    "can_be_centered",
    "make_plain",
    "make_spherical",
    "overridden_methods",
    "require_convertible",
    "require_revertible",
]

_SPHERE_CLASSES: dict[type[nn.Module], type[SphereLayer]] = {
    nn.Conv1d: SphereConv1d,
    nn.Conv2d: SphereConv2d,
    nn.Conv3d: SphereConv3d,
    nn.Linear: SphereLinear,
    nn.ConvTranspose1d: SphereConvTranspose1d,
    nn.ConvTranspose2d: SphereConvTranspose2d,
    nn.ConvTranspose3d: SphereConvTranspose3d,
    nn.LazyConv1d: LazySphereConv1d,
    nn.LazyConv2d: LazySphereConv2d,
    nn.LazyConv3d: LazySphereConv3d,
    nn.LazyLinear: LazySphereLinear,
}
_PLAIN_CLASSES: dict[type[nn.Module], type[nn.Module]] = {sphere: plain for plain, sphere in _SPHERE_CLASSES.items()}

_HARMLESS_METHODS = {"reset_parameters", "extra_repr", "_abc_impl"}
_HARMFUL_SPECIAL_METHODS = {"__call__", "__getattr__", "__getattribute__"}


@dataclass(frozen=True)
class SphereOptions:
    """Options of a sphere layer, as in `SphereConv2d`."""

    operator: str | AngleFunction
    k: float | None
    k_sharing: str
    rescale: str | Sequence[float] | None
    eps: float
    center: str | None = None
    magnitude: str | Magnitude | None = None
    radius: float | str | None = None

    def check(self, layer: nn.Module) -> None:
        """Raise the errors of `make_spherical` without changing the layer."""
        self._set_up(SphereLayer(), layer)

    def apply(self, layer: nn.Module) -> None:
        """Add the attributes of a sphere layer to a layer that already has its sphere class."""
        self._set_up(layer, layer)

    def _set_up(self, target: Any, layer: Any) -> None:
        center = self.center if can_be_centered(layer) else None
        options = (self.operator, self.k, self.k_sharing, self.rescale, self.eps, center, self.magnitude, self.radius)
        target._set_up_sphere(num_filters(layer), *options, layer.weight.device, layer.weight.dtype)


def make_spherical(layer: Any, options: SphereOptions) -> None:
    """Change a convolution or linear layer into a sphere layer. `options.check(layer)` must have passed.

    Learned k, β, γ and radii are new parameters with the device and dtype of the weight. They are frozen if the weight is.
    """
    layer.__class__ = _SPHERE_CLASSES[_torch_class(layer)]
    options.apply(layer)
    if not layer.weight.requires_grad:
        if isinstance(options.operator, str):  # an angle function object may be shared with trainable layers
            layer.angle.requires_grad_(False)
        if isinstance(options.magnitude, str) and layer.magnitude is not None:
            layer.magnitude.requires_grad_(False)
        if layer.rescale == "learned":
            layer.beta.requires_grad_(False)
            layer.gamma.requires_grad_(False)


def make_plain(layer: Any) -> list[str]:
    """Change a sphere layer into the torch layer; return which of its options were dropped."""
    dropped = ["k"] if layer.k is not None else []
    dropped += ["β and γ"] if layer.rescale is not None else []
    dropped += ["centering"] if layer.center is not None else []
    dropped += ["magnitude function"] if layer.magnitude is not None else []
    layer.__class__ = _PLAIN_CLASSES[type(layer)]
    for name in ("angle", "beta", "gamma", "eps", "k_sharing", "rescale", "center", "magnitude"):
        delattr(layer, name)
    return dropped


def can_be_centered(layer: Any) -> bool:
    """Return whether the kernels of a layer have several entries; a single one is its own mean."""
    weight = layer.weight
    return is_lazy(weight) or weight.numel() == 0 or weight.numel() > num_filters(layer)


def overridden_methods(layer: nn.Module) -> list[str]:
    """Return the methods that a subclass adds to torch's class and that a sphere layer would lose."""
    if "forward" in vars(layer):  # set on the object, e.g. by a tool that offloads weights
        return ["forward"]
    torch_class = _torch_class(layer)
    subclasses = [cls for cls in type(layer).__mro__ if cls not in torch_class.__mro__]
    names = [name for cls in subclasses for name in vars(cls)]
    return [
        name
        for name in names
        if (name in _HARMFUL_SPECIAL_METHODS if name.startswith("__") else name not in _HARMLESS_METHODS)
    ]


def _torch_class(layer: nn.Module) -> type[nn.Module]:
    return next(cls for cls in type(layer).__mro__ if cls in _SPHERE_CLASSES)


def require_convertible(name: str, module: nn.Module) -> None:
    """Raise ModelError for a scripted, compiled or wrapped module and for a quantized or computed weight."""
    hint = ", or skip it" if name else ""
    sealed = sealed_reason(module)
    if sealed is not None:
        raise ModelError(f"{_quoted(name)} is {sealed}{hint}.")
    problem = _weight_problem(module)
    if problem is not None:
        raise ModelError(f"{_quoted(name)} of type {type(module).__name__} {problem}{hint}.")


def require_revertible(model: nn.Module) -> None:
    """Raise ModelError for a scripted, compiled or wrapped module and for a subclass of the sphere layers."""
    for name, module in model.named_modules():
        sealed = sealed_reason(module)
        if sealed is not None:
            raise ModelError(f"{_quoted(name)} is {sealed}.")
        if isinstance(module, SphereLayer) and type(module) not in _PLAIN_CLASSES:
            problem = _weight_problem(module) or "is a subclass of a sphere layer, which has no plain counterpart"
            raise ModelError(f"{_quoted(name)} of type {type(module).__name__} {problem}.")


def _weight_problem(module: nn.Module) -> str | None:
    """Return why the weight of a layer cannot be converted and what to do about it, or None if it can."""
    if not isinstance(module, (*CONVERTIBLE, *TRANSPOSED)) or type(module).__module__.startswith("torch.ao."):
        return "is quantized: convert the model before quantizing it"
    weight = module._parameters.get("weight")
    if isinstance(weight, Tensor) and not weight.is_floating_point():
        return f"is quantized or complex, its weight is {weight.dtype}: convert the floating point model"
    # Quantization and sharding libraries use tensor subclasses that report a floating point dtype.
    if isinstance(weight, Tensor) and type(weight).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"has a weight of type {type(weight).__name__}: convert the model before quantizing or sharding it"
    if is_parametrized(module):
        return "is parametrized: call torch.nn.utils.parametrize.remove_parametrizations first"
    computed = [name for name in ("weight", "bias") if name not in module._parameters]
    if computed and not overridden_methods(module):
        return f"computes its {computed[0]} in a hook (weight_norm, spectral_norm, pruning): remove the hook first"
    return None


def _quoted(name: str) -> str:
    return f"layer {name!r}" if name else "the model"
