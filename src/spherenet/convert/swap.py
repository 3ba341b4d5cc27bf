"""A torch.nn layer and its spherical twin: one object that changes its class.

The layer stays the object it was, as torch's own lazy layers do when they see their first input. So the same
parameters, hooks (with the handles that remove them), training mode, further attributes and every other reference to
the layer are kept without being copied, and a layer with several names stays one layer.

What cannot be converted, in either direction, and what to do about it: one sentence each.

What changes around converted layers: BatchNorm, modules that write in place, a fast path that skips layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized

from spherenet.angles import AngleFunction
from spherenet.convert.layers import (
    CONVERTIBLE,
    is_chain,
    is_sealed,
    next_in_chains,
    num_filters,
    owners,
    traced_inputs,
)
from spherenet.convert.summary import put_note, set_aside
from spherenet.errors import ModelError
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

__all__ = [
    "SphereOptions",
    "become_plain",
    "become_sphere",
    "drop_batch_norms",
    "droppable_batch_norms",
    "has_plain_twin",
    "leave_fast_paths",
    "own_methods",
    "refuse_layer",
    "refuse_way_back",
    "write_out_of_place",
]

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


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def droppable_batch_norms(model: nn.Module, converted: Collection[nn.Module]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the BatchNorms that certainly follow converted layers, with their names; and why each other one is kept.

    Certain is the order of an `nn.Sequential` or of a forward that can be traced (see `neighbours`); where it cannot, a
    block of one layer and then one BatchNorm.
    """
    drop: dict[str, str] = {}
    keep: dict[str, str] = {}
    names = {module: name for name, module in model.named_modules()}
    spherical = {*converted, *(module for module in names if isinstance(module, SphereLayer))}
    places = Counter(child for module in names for child in module._modules.values())
    inputs = _Inputs(model, names)
    for module, name in names.items():
        if not isinstance(module, _BatchNorm):
            continue
        sources = inputs.of(module)
        if type(module) not in _BATCH_NORMS:
            keep[name] = f"{type(module).__name__} is not torch's own class"
        elif places[module] > 1:
            keep[name] = "it stands in several places"
        elif any(getattr(module, hooks) for hooks in _HOOKS):
            keep[name] = "it has hooks"
        elif sources is None:
            keep[name] = "the order of calls around it cannot be traced"
        elif not sources or any(source not in spherical for source in sources):
            keep[name] = "it does not directly follow a converted layer"
        elif any(num_filters(source) != module.num_features for source in sources):
            keep[name] = "it does not normalise the filters of the layer before it"
        else:
            drop[name] = names[sources[0]]
    return drop, keep


class _Inputs:
    """Whose output a module gets, each owner's forward traced once."""

    def __init__(self, model: nn.Module, names: dict[nn.Module, str]) -> None:
        self._modules = {name: module for module, name in names.items()}
        self._names = names
        self._in_chains: dict[nn.Module, list[nn.Module]] = {}
        self._traced: dict[str, dict[nn.Module, list[nn.Module]] | None] = {}
        for first, then in next_in_chains(model):
            if not isinstance(first, nn.Identity):
                self._in_chains.setdefault(then, []).append(first)

    def of(self, module: nn.Module) -> list[nn.Module] | None:
        """Return the modules that a module was called on; [] where it is something else, None where nobody knows."""
        around = [name for name in owners(self._names[module]) if not _is_list(self._modules[name])]
        owner = around[-1]
        if is_chain(self._modules[owner]):
            return self._in_chains.get(module, [])
        if owner not in self._traced:
            self._traced[owner] = traced_inputs(self._modules[owner])
        traced = self._traced[owner]
        return _the_pair(self._modules[owner]) if traced is None else traced.get(module, [])


def _the_pair(owner: nn.Module) -> list[nn.Module] | None:
    """Return the layer of a block that has nothing else with parameters but the BatchNorm registered after it."""
    parts = [part for part in owner.children() if next(part.parameters(), None) is not None]
    certain = len(parts) == 2 and isinstance(parts[0], CONVERTIBLE) and isinstance(parts[1], _BatchNorm)
    return parts[:1] if certain else None


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.ModuleDict))


def drop_batch_norms(model: nn.Module, drop: dict[str, str]) -> None:
    """Put an `nn.Identity` in the place of each BatchNorm."""
    for name, layer in drop.items():
        batch_norm = model.get_submodule(name)
        identity = nn.Identity().train(batch_norm.training)
        put_note(identity, f"{type(batch_norm).__name__} dropped after {layer}")
        model.set_submodule(name, identity)


def write_out_of_place(model: nn.Module) -> None:
    """Set `inplace=False` on each module of a chain that would overwrite what a sphere layer keeps for backward.

    Gradients are right without this: the layer notices and convolves again, which costs more than the memory saved.
    With a bias or rescaling the layer's output is a tensor that nobody keeps; in-place activations after those stay.
    """
    for first, then in next_in_chains(model):
        keeps_output = (
            isinstance(first, SphereLayer) and first.rescale is None and first._parameters.get("bias") is None
        )
        if keeps_output and getattr(then, "inplace", False) is True:
            set_aside(then, "inplace", False)
            put_note(then, "no longer in place: the sphere layer before it keeps its output")


def leave_fast_paths(model: nn.Module) -> None:
    """Switch off the inference path of torch's encoders where it would compute with the weights of sphere layers.

    In eval mode without gradients `nn.TransformerEncoderLayer` hands the weights of its linear layers to one fused
    function and never calls the layers; the attribute that it looks at first serves nothing else.
    """
    changed = set()
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            layers = (module.linear1, module.linear2)
            if any(isinstance(layer, SphereLayer) for layer in layers) and module.activation_relu_or_gelu:
                set_aside(module, "activation_relu_or_gelu", 0)
                put_note(module, "fast path of inference off: it would skip the sphere layers")
                changed.add(module)
    for module in model.modules():
        is_encoder = isinstance(module, nn.TransformerEncoder) and changed.intersection(module.layers)
        if is_encoder and module.use_nested_tensor:
            set_aside(module, "use_nested_tensor", False)
            put_note(module, "nested tensors of inference off: they need the fast path")
