"""A model made ready for inference: every sphere layer and the head frozen, in a copy."""

from __future__ import annotations

import copy
from collections import Counter

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from spherenet.errors import ModelError
from spherenet.export.frozen import BatchNorm, FrozenSphereConv, FrozenSphereLinear
from spherenet.export.frozen_head import FrozenClassifier, frozen_scores
from spherenet.layers import SphereConv1d, SphereConv2d, SphereConv3d, SphereLayer, SphereLinear
from spherenet.models import Classifier

__all__ = ["freeze"]

_CONVOLUTIONS = (SphereConv1d, SphereConv2d, SphereConv3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def freeze(model: nn.Module) -> nn.Module:
    """Return a copy for inference in which sphere layers have unit weights and k, β, γ and bias as constants.

    Any module will do; a `Classifier` becomes images → scores, its class weights of unit length where the loss ignores
    their norm. A BatchNorm right after a SphereConv in an `nn.Sequential` is folded into it and leaves an identity. The
    copy is in evaluation mode, needs no gradients and consists of plain torch operations, which torch.export,
    TorchScript and ONNX take. Layers of a subclass with its own `forward` stay as they are; hooks of frozen layers are
    dropped. Equal to the model but for rounding: about 1e-6 in float32, 1e-12 in float64.
    Raises ModelError for a lazy layer that has seen no input yet.
    """
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ModelError(f"{name} has no values yet: run the model once before it is frozen.")
    twin = copy.deepcopy(model).eval().requires_grad_(False)
    uses = Counter(child for module in twin.modules() for child in module._modules.values() if child is not None)
    with torch.no_grad():
        return _frozen(twin, {}, uses)


def _frozen(module: nn.Module, known: dict[nn.Module, nn.Module], uses: Counter[nn.Module]) -> nn.Module:
    """The frozen form of a module; one that stands in several places is frozen once."""
    if module not in known:
        known[module] = _make(module, known, uses)
    return known[module]


def _make(module: nn.Module, known: dict[nn.Module, nn.Module], uses: Counter[nn.Module]) -> nn.Module:
    if isinstance(module, SphereLayer):
        return _frozen_layer(module)
    if isinstance(module, Classifier) and type(module).forward is Classifier.forward:
        features = _frozen(module.features, known, uses)
        return FrozenClassifier(features, frozen_scores(module.head, module.criterion)).eval()
    if type(module) is nn.Sequential:
        _fold_batch_norms(module, known, uses)
    for name, child in module._modules.items():
        if child is not None:
            module._modules[name] = _frozen(child, known, uses)
    return module


def _frozen_layer(layer: SphereLayer, batch_norm: BatchNorm | None = None) -> nn.Module:
    # A subclass that only adds to a layer is frozen with it; one with a forward of its own is another layer.
    if isinstance(layer, _CONVOLUTIONS) and type(layer).forward is SphereConv2d.forward:
        return FrozenSphereConv(layer, batch_norm).eval()
    if isinstance(layer, SphereLinear) and type(layer).forward is SphereLinear.forward:
        return FrozenSphereLinear(layer).eval()
    return layer


def _fold_batch_norms(sequence: nn.Sequential, known: dict[nn.Module, nn.Module], uses: Counter[nn.Module]) -> None:
    """Freeze each SphereConv of a sequence together with the BatchNorm after it: out·a + b is a scale and a shift."""
    for index in range(len(sequence) - 1):
        layer, after = sequence[index], sequence[index + 1]
        foldable = isinstance(layer, _CONVOLUTIONS) and type(after) in _BATCH_NORMS and after.running_mean is not None
        alone = uses[layer] == uses[after] == 1 and not _has_hooks(layer) and not _has_hooks(after)
        if foldable and alone and after.num_features == layer.out_channels:
            frozen = _frozen_layer(layer, after)  # type: ignore[arg-type]
            if frozen is not layer:
                known[layer] = frozen
                sequence[index + 1] = nn.Identity().eval()


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
