"""The layers of a model: each once, with all its names and the modules it stands in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from spherenet.layers import SphereLayer
from spherenet.ops.angle_functions import AngleFunction

__all__ = ["CONVERTIBLE", "Layer", "find_layers", "is_sealed", "owners", "weight_modules"]

CONVERTIBLE = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)

_WRAPPERS = {
    "DistributedDataParallel": "wrapped by DistributedDataParallel: convert it before wrapping",
    "FullyShardedDataParallel": "wrapped by FullyShardedDataParallel: convert it before wrapping",
    "FSDPModule": "sharded by fully_shard: convert it before sharding",
}
"""Wrappers that would not notice a changed layer, by the name of torch's class: importing them all takes a second."""


@dataclass
class Layer:
    """A module that a conversion must decide about.

    names: every dotted name it has, "" for the model itself. around: the modules it stands in, by their names.
    """

    module: nn.Module
    names: list[str]
    around: dict[str, nn.Module] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]


def find_layers(model: nn.Module) -> list[Layer]:
    """Return the convolutions and linear layers of a model in the order of their definition, quantised ones included.

    A part of the model that nothing inside may be changed of (`is_sealed`) counts as one layer. What is inside a sphere
    layer (its angle function) or a parametrisation is no layer of the model.
    """
    found: dict[int, Layer] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    closed: set[str] = set()
    for name, module in modules.items():
        around = owners(name)
        if closed.intersection(around):
            continue
        sealed = is_sealed(module) is not None
        if sealed or _is_closed(module):
            closed.add(name)
        if sealed or isinstance(module, CONVERTIBLE) or _is_quantised_layer(module):
            layer = found.setdefault(id(module), Layer(module, []))
            layer.names.append(name)
            layer.around |= {owner: modules[owner] for owner in around}
    return list(found.values())


def owners(name: str) -> list[str]:
    """Return the names of the modules around the one of this name, the model ("") first."""
    parts = name.split(".") if name else []
    return [".".join(parts[:depth]) for depth in range(len(parts))]


def weight_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module that owns a weight of two dimensions or more, with its first name, in order of definition.

    These are the layers in a wide sense: transposed convolutions, embeddings, recurrent and angular ones included.
    """
    closed: set[str] = set()
    for name, module in model.named_modules():
        if closed.intersection(owners(name)):
            continue
        if _is_closed(module):
            closed.add(name)
        if isinstance(module, (_ConvNd, nn.Linear)) or _is_quantised_layer(module) or _owns_weight(module):
            yield name, module


def is_sealed(module: nn.Module) -> str | None:
    """Return why nothing inside a scripted, compiled or wrapped module can be changed; None where it can."""
    names = [cls.__name__ for cls in type(module).__mro__ if cls.__module__.startswith("torch.")]
    wrapped = next((_WRAPPERS[name] for name in names if name in _WRAPPERS), None)
    if wrapped is not None:
        return wrapped
    if isinstance(module, torch.jit.ScriptModule):
        reason = "scripted: convert it before torch.jit"
    elif "OptimizedModule" in names or module.__dict__.get("_compiled_call_impl") is not None:
        reason = "compiled: convert it before torch.compile"
    else:
        return None
    # A scripted activation, say, has nothing that could be converted.
    return reason if any(_is_matrix(p) for p in module.parameters()) else None


def _owns_weight(module: nn.Module) -> bool:
    return any("weight" in name and _is_matrix(p) for name, p in module.named_parameters(recurse=False))


def _is_matrix(parameter: nn.Parameter) -> bool:
    return not is_lazy(parameter) and parameter.dim() >= 2


def _is_closed(module: nn.Module) -> bool:
    return isinstance(module, (SphereLayer, AngleFunction, ParametrizationList))


def _is_quantised_layer(module: nn.Module) -> bool:
    cls = type(module)
    quantised = cls.__module__.startswith("torch.ao.nn.") and ("quantized" in cls.__module__ or "qat" in cls.__module__)
    return quantised and cls.__name__.startswith(("Conv", "Linear")) and not cls.__name__.endswith("PackedParams")
