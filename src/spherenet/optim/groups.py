"""Parameter groups: which parameters are decayed, and which a matrix optimizer such as `Muon` updates.

The output of a sphere layer depends on the directions of its kernels only, and so do losses that normalize the class
weights of an `AngularHead`. Weight decay of such scale-invariant weights regularizes nothing; it only changes the
effective learning rate. `param_groups` leaves it out.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from spherenet._util.validation import require_module, require_number
from spherenet.angles import AngleFunction
from spherenet.errors import InvalidArgument
from spherenet.magnitudes import Magnitude
from spherenet.optim.kernels import require_initialized, scale_invariance

__all__ = ["param_groups"]

_NEVER_DECAYED = (
    AngleFunction,  # k: decay of the parameter behind it would pull every k toward 0.7
    Magnitude,  # a radius, likewise
    _NormBase,  # BatchNorm, InstanceNorm and related layers
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.Embedding,  # decay would shrink rows that no batch has used
    nn.EmbeddingBag,
)

_FILTERED = (nn.modules.conv._ConvNd, nn.Linear)
"""Layers whose weights are matrices with one row per filter; sphere layers are among their subclasses."""


def param_groups(
    model: nn.Module, weight_decay: float = 0.0, *, filters: str | None = None, rest: str = "adamw"
) -> list[dict[str, Any]]:
    """Return the groups "decay" and "no_decay", which contain every trainable parameter of a model once.

    With `filters`, a third group "filters" comes first: the weights of convolutions and linear layers, plain or of the
    sphere, for an optimizer of matrices such as `Muon`. The class weights of an `AngularHead` are not among them. Each
    group then names its algorithm, for `MixedOptimizer`. If your classifier is a plain linear layer, move its weight to
    another group.

    Decayed are weights with two dimensions or more: those of convolutions, linear layers, attention and recurrent
    layers, your own parameters, and an `AngularHead` under plain softmax. Not decayed are all parameters of sphere
    layers (weight, k, β, γ, radius, bias), of an `AngularHead` under a loss that normalizes its weights, of modules
    with `scale_invariant = True` or `no_weight_decay = True`, such as those of normalized transformers, of angle and
    magnitude functions, normalization layers and embeddings, and all parameters with fewer than two dimensions (biases,
    scales). A parameter that several modules share is decayed only
    if each of them would decay it.

    The loss of a head is found in the model: the nearest module that contains both of them. If the loss is not part of
    the model, pass both together, e.g. `param_groups(nn.ModuleList([model, criterion]), 5e-4)`.

    Both groups always exist, even if they are empty, so that the saved state of an optimizer fits when parameters are
    frozen. Frozen parameters (`requires_grad=False`) are left out; freeze them before this call.

    Args:
        model: The model.
        weight_decay: Weight decay of the group "decay", at least 0.
        filters: Algorithm of the weights of convolutions and linear layers, e.g. "muon"; None for no such group.
        rest: Algorithm of all other parameters if `filters` is given: "sgd", "adam" or "adamw".

    Returns:
        Dictionaries with the keys name, params and weight_decay, and algorithm if `filters` is given.

    Raises:
        TypeError: If `model` is not a module, or `weight_decay` not a number.
        ValueError: If `weight_decay` is out of range, or a parameter is lazy and has no shape yet.

    Example:
        >>> optimizer = torch.optim.Adam(sn.param_groups(model, 5e-4), lr=1e-3)
        >>> optimizer = sn.optim.MixedOptimizer(sn.param_groups(model, 0.01, filters="muon"))
    """
    require_module("model", model)
    weight_decay = require_number("weight_decay", weight_decay)
    if weight_decay < 0:
        raise InvalidArgument("weight_decay", f"must be at least 0, got {weight_decay!r}.")
    invariant = scale_invariance(model)
    decayed: dict[nn.Parameter, bool] = {}
    matrices: dict[nn.Parameter, bool] = {}

    def collect(module: nn.Module, prefix: str, exempt: bool) -> None:
        # A module exempts its children: a learned k belongs to the angle of a layer, a parametrized weight to a list.
        exempt = exempt or invariant[module] or isinstance(module, _NEVER_DECAYED)
        exempt = exempt or getattr(module, "no_weight_decay", False)
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if parameter.requires_grad:
                require_initialized(name, parameter)
                decayed[parameter] = not exempt and parameter.dim() >= 2 and decayed.get(parameter, True)
                is_filter = isinstance(module, _FILTERED) and name.rpartition(".")[2] == "weight"
                matrices[parameter] = is_filter and parameter.dim() >= 2 and matrices.get(parameter, True)
        for name, child in module.named_children():
            collect(child, f"{prefix}.{name}" if prefix else name, exempt)

    collect(model, "", False)
    groups: list[dict[str, Any]] = [
        {"name": "decay", "params": [p for p, yes in decayed.items() if yes], "weight_decay": weight_decay},
        {"name": "no_decay", "params": [p for p, yes in decayed.items() if not yes], "weight_decay": 0.0},
    ]
    if filters is None:
        return groups
    for group in groups:
        group["params"] = [parameter for parameter in group["params"] if not matrices[parameter]]
        group["algorithm"] = rest
    chosen = [parameter for parameter, yes in matrices.items() if yes]
    return [{"name": "filters", "params": chosen, "weight_decay": 0.0, "algorithm": filters}, *groups]
