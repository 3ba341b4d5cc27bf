"""What cannot be converted, in either direction, and what to do about it: one sentence each."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from spherenet.convert.survey import CONVERTIBLE, is_sealed
from spherenet.convert.twins import has_plain_twin, own_methods
from spherenet.errors import ModelError
from spherenet.layers import SphereLayer

__all__ = ["refuse_layer", "refuse_way_back"]


def refuse_layer(name: str, module: nn.Module) -> None:
    """Raise ModelError for a scripted, compiled or wrapped part and for a layer with a quantised or computed weight."""
    way_out = ", or skip it" if name else ""
    sealed = is_sealed(module)
    if sealed is not None:
        raise ModelError(f"{_called(name)} is {sealed}{way_out}.")
    problem = _problem(module)
    if problem is not None:
        raise ModelError(f"{_called(name)} of type {type(module).__name__} {problem}{way_out}.")


def refuse_way_back(model: nn.Module) -> None:
    """Raise ModelError for a scripted, compiled or wrapped part and for sphere layers not the library's own."""
    for name, module in model.named_modules():
        sealed = is_sealed(module)
        if sealed is not None:
            raise ModelError(f"{_called(name)} is {sealed}.")
        if isinstance(module, SphereLayer) and not has_plain_twin(module):
            problem = _problem(module) or "has no plain counterpart: only the library's own sphere layers have"
            raise ModelError(f"{_called(name)} of type {type(module).__name__} {problem}.")


def _problem(module: nn.Module) -> str | None:
    """Return what is wrong with the weight of a layer and what to do, None where nothing is."""
    if not isinstance(module, CONVERTIBLE) or type(module).__module__.startswith("torch.ao."):
        return "is quantised: convert the model before quantising it"
    weight = module._parameters.get("weight")
    if isinstance(weight, Tensor) and not weight.is_floating_point():
        return f"is quantised or complex, its weight is {weight.dtype}: convert the floating point model"
    # Libraries that quantise or shard hide it in a tensor that claims a floating point dtype but computes for itself.
    if isinstance(weight, Tensor) and type(weight).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"has a weight of type {type(weight).__name__}: convert the model before quantising or sharding it"
    if is_parametrized(module):
        return "is parametrised: call torch.nn.utils.parametrize.remove_parametrizations first"
    computed = [name for name in ("weight", "bias") if name not in module._parameters]
    if computed and not own_methods(module):
        return f"computes its {computed[0]} in a hook (weight_norm, spectral_norm, pruning): remove the hook first"
    return None


def _called(name: str) -> str:
    return f"layer {name!r}" if name else "the model"
