"""Which sphere layers a model has, and their kernels as matrices.

The walk is repeated on every call: for the 69 layers of cnn-69 it takes a hundredth of the time of their Gram
matrices (benchmarks/orthogonality.py), and a remembered list would go stale when a layer is replaced or a
weight tied. A caller who wants to spare it too passes `sphere_layers(model)` where a model is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from spherenet.layers import SphereLayer
from spherenet.ops.norms import working_dtype

__all__ = ["Modules", "kernel_matrix", "sphere_layers", "zero_of"]

Modules: TypeAlias = nn.Module | Iterable[nn.Module] | Mapping[str, nn.Module]
"""What a regulariser takes: a model, a single layer, several of them, or several with their names."""

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def sphere_layers(modules: Modules) -> dict[str, SphereLayer]:
    """Return the sphere layers of a model under their names, each weight once.

    A layer that occurs twice, or whose weight is another layer's, is listed under its first name. Of several
    unnamed modules each name begins with the module's index; a bare layer goes by the name of its class.
    Raises TypeError for anything but modules, ValueError for a lazy layer that has not seen an input yet.
    """
    found: dict[str, SphereLayer] = {}
    seen: set[int] = set()
    for name, module in _named_modules(modules):
        if not isinstance(module, SphereLayer):
            continue
        # A parametrised weight is computed on each access: then there is nothing to share but the layer itself.
        weight = module._parameters.get("weight")
        if isinstance(weight, UninitializedParameter):
            raise ValueError(
                f"model must be initialised, but {name or type(module).__name__} is lazy and has no weight yet: "
                f"run one batch through it first."
            )
        owner = id(module) if weight is None else id(weight)
        if owner not in seen:
            seen.add(owner)
            found[name or type(module).__name__] = module
    return found


def kernel_matrix(layer: SphereLayer) -> Tensor:
    """Return the flattened kernels of a layer, [groups, kernels of a group, fan-in], in float32 at least.

    Kernels of different groups look at different channels, so an angle between them means nothing: each group
    is a matrix of its own. The order of the entries within a kernel is the one the weight has in memory; no
    inner product depends on it, and a channels-last weight is not copied.
    """
    weight = cast(Tensor, layer.weight)
    groups = cast(int, getattr(layer, "groups", 1))
    kernels, fan_in = weight.shape[0] // groups, weight.shape[1:].numel()
    layout = _CHANNELS_LAST.get(weight.dim())
    if layout is not None and weight.is_contiguous(memory_format=layout):
        weight = weight.movedim(1, -1)
    return weight.reshape(groups, kernels, fan_in).to(working_dtype(weight.dtype))


def zero_of(modules: Modules) -> Tensor:
    """Return the scalar 0 where the modules live: what a regulariser says of a model without sphere layers."""
    first = next((p for _, module in _named_modules(modules) for p in module.parameters(recurse=False)), None)
    if first is None:
        return torch.zeros(())
    return torch.zeros((), dtype=working_dtype(first.dtype), device=first.device)


def _named_modules(modules: Modules) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(modules, nn.Module):
        yield from modules.named_modules()
        return
    if not isinstance(modules, Iterable):
        raise TypeError(f"model must be a module or several modules, got {modules!r}.")
    pairs = modules.items() if isinstance(modules, Mapping) else ((str(i), m) for i, m in enumerate(modules))
    for prefix, module in pairs:
        if not isinstance(module, nn.Module):
            raise TypeError(f"model must hold modules only, got an object of type {type(module).__name__}.")
        yield from module.named_modules(prefix=prefix)
