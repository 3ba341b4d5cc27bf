"""What changes around converted layers: BatchNorm, modules that write in place, a fast path that skips layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from spherenet.convert.neighbours import is_chain, next_in_chains, traced_inputs
from spherenet.convert.notes import put_note, set_aside
from spherenet.convert.survey import CONVERTIBLE, owners
from spherenet.convert.twins import num_filters
from spherenet.layers import SphereLayer

__all__ = ["drop_batch_norms", "droppable_batch_norms", "leave_fast_paths", "write_out_of_place"]

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
