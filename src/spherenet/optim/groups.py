"""Parameter groups, and one optimizer whose groups use different algorithms."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from spherenet._util.validation import require_module, require_number, require_one_of
from spherenet.angles import AngleFunction
from spherenet.errors import InvalidArgument, InvalidArgumentType
from spherenet.magnitudes import Magnitude
from spherenet.optim.kernels import require_initialized, scale_invariance
from spherenet.optim.muon import Muon
from spherenet.optim.step import SteppingOptimizer, as_list

__all__ = ["ALGORITHMS", "MixedOptimizer", "param_groups"]

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


ALGORITHMS: dict[str, type[Optimizer]] = {
    "muon": Muon,
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


class MixedOptimizer(SteppingOptimizer):
    """Update each group of parameters with the algorithm that it names.

    A group is a dictionary with `params`, `algorithm` ("muon", "sgd", "adam", "adamw" or an optimizer class) and the
    options of that algorithm. Groups with the same algorithm are updated together. The state dict has the ordinary form
    of an optimizer.

    Args:
        groups: The groups, for instance `sn.param_groups(model, 0.01, filters="muon", rest="adamw")`.
        **options: Options for each algorithm by its name, which groups may override: `muon={"lr": 0.24}`.

    Raises:
        ValueError: If an algorithm is unknown, or an option is out of its range.

    Example:
        >>> groups = sn.param_groups(model, 5e-4, filters="muon", rest="sgd")
        >>> optimizer = sn.optim.MixedOptimizer(groups, muon={"lr": 0.24}, sgd={"lr": 0.1, "momentum": 0.9})
    """

    def __init__(self, groups: Iterable[Mapping[str, Any]], **options: Mapping[str, Any]) -> None:
        for name, values in options.items():
            _require_options(name, values)
        own: list[dict[str, Any]] = []
        for group in as_list("groups", groups):
            if not isinstance(group, Mapping):
                raise InvalidArgumentType(
                    "groups",
                    f"must be dictionaries with params and algorithm, got {type(group).__name__}; see sn.param_groups.",
                )
            own.append(dict(group))
        for group in own:
            algorithm = group.get("algorithm")
            if not (isinstance(algorithm, type) and issubclass(algorithm, Optimizer)):
                require_one_of("algorithm", algorithm, ALGORITHMS)
                for name, value in options.get(str(algorithm), {}).items():
                    group.setdefault(name, value)
        self._parts: list[Optimizer] = []
        super().__init__(own, {})
        self._connect()

    def _connect(self) -> None:
        """Create an optimizer per algorithm on the same groups and the same state."""
        by_algorithm: dict[Any, list[dict[str, Any]]] = {}
        for group in self.param_groups:
            by_algorithm.setdefault(group["algorithm"], []).append(group)
        self._parts = []
        for algorithm, groups in by_algorithm.items():
            part = ALGORITHMS.get(algorithm, algorithm)(groups)
            part.state = self.state
            self._parts.append(part)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, which must name its algorithm."""
        super().add_param_group(param_group)
        if self._parts:  # otherwise the constructor connects all groups
            self._connect()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or loaded optimizer."""
        super().__setstate__(state)
        self._connect()

    def _step(self) -> None:
        """Make one step with every algorithm."""
        for part in self._parts:
            part.step()


def _require_options(algorithm: str, options: Any) -> None:
    """Raise an error unless the options are those of an algorithm; torch ignores unknown ones of a group."""
    require_one_of("an option", algorithm, ALGORITHMS)
    if not isinstance(options, Mapping):
        raise InvalidArgumentType(algorithm, f"must be a dictionary of options, got {type(options).__name__}.")
    allowed = list(inspect.signature(ALGORITHMS[algorithm]).parameters)[1:]  # after the parameters
    for name in options:
        require_one_of(f"an option of {algorithm}", name, allowed)
