"""Adjust the modules around converted layers.

Three kinds of neighbors change: BatchNorm is dropped on request, in-place activations stop overwriting the output of
sphere layers, and the inference fast path of torch's transformer encoders is disabled.

Which module follows which is certain for an `nn.Sequential` and for a `forward` that can be traced symbolically. The
order in which a module registers its children proves nothing: a block that normalizes before its convolutions often
registers the convolutions first.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Collection

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from spherenet.convert.layers import CONVERTIBLE, ancestor_names, consecutive_modules, is_sequential, num_filters
from spherenet.convert.summary import override_attribute, record_reason
from spherenet.layers import SphereLayer

__all__ = ["disable_fast_paths", "disable_inplace", "drop_batch_norms", "find_batch_norms"]

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def find_batch_norms(model: nn.Module, converted: Collection[nn.Module]) -> tuple[dict[str, str], dict[str, str]]:
    """Return which BatchNorm modules certainly follow sphere layers, and why the others are kept.

    Args:
        model: The model before its conversion.
        converted: The layers that will be converted.

    Returns:
        {name of the BatchNorm: name of the layer before it} and {name of the BatchNorm: reason to keep it}.
    """
    drop: dict[str, str] = {}
    keep: dict[str, str] = {}
    names = {module: name for name, module in model.named_modules()}
    spherical = {*converted, *(module for module in names if isinstance(module, SphereLayer))}
    uses = Counter(child for module in names for child in module._modules.values())
    inputs = _Inputs(model, names)
    for module, name in names.items():
        if not isinstance(module, _BatchNorm):
            continue
        sources = inputs.sources_of(module)
        if type(module) not in _BATCH_NORMS:
            keep[name] = f"{type(module).__name__} is a subclass"
        elif uses[module] > 1:
            keep[name] = "it is used in several places"
        elif any(getattr(module, hooks) for hooks in _HOOKS):
            keep[name] = "it has hooks"
        elif sources is None:
            keep[name] = "the order of calls around it cannot be traced"
        elif not sources or any(source not in spherical for source in sources):
            keep[name] = "it does not directly follow a converted layer"
        elif any(num_filters(source) != module.num_features for source in sources):
            keep[name] = "it does not normalize the filters of the layer before it"
        else:
            drop[name] = names[sources[0]]
    return drop, keep


class _Inputs:
    """Lookup of the modules whose output a module takes. Each `forward` is traced at most once."""

    def __init__(self, model: nn.Module, names: dict[nn.Module, str]) -> None:
        self._modules = {name: module for module, name in names.items()}
        self._names = names
        self._in_sequences: dict[nn.Module, list[nn.Module]] = {}
        self._traced: dict[str, dict[nn.Module, list[nn.Module]] | None] = {}
        for first, then in consecutive_modules(model):
            if not isinstance(first, nn.Identity):
                self._in_sequences.setdefault(then, []).append(first)

    def sources_of(self, module: nn.Module) -> list[nn.Module] | None:
        """Return the modules whose output `module` takes, [] if it takes something else, None if that is unknown."""
        containers = (nn.ModuleList, nn.ModuleDict)
        ancestors = ancestor_names(self._names[module])
        name = [name for name in ancestors if not isinstance(self._modules[name], containers)][-1]
        owner = self._modules[name]
        if is_sequential(owner):
            return self._in_sequences.get(module, [])
        if name not in self._traced:
            self._traced[name] = _traced_inputs(owner)
        traced = self._traced[name]
        return _only_layer(owner) if traced is None else traced.get(module, [])


def _only_layer(owner: nn.Module) -> list[nn.Module] | None:
    """Return the layer of a block whose only children with parameters are one layer and then one BatchNorm."""
    children = [child for child in owner.children() if next(child.parameters(), None) is not None]
    is_pair = len(children) == 2 and isinstance(children[0], CONVERTIBLE) and isinstance(children[1], _BatchNorm)
    return children[:1] if is_pair else None


def _traced_inputs(module: nn.Module) -> dict[nn.Module, list[nn.Module]] | None:
    """Return the children called by a module's `forward`, each with the children whose outputs it takes.

    The children themselves are not traced. Any other source, such as an input or a sum, is represented by the module
    itself. The result is None if the `forward` cannot be traced, for example because of data-dependent control flow.
    """
    from torch import fx  # slow to import, and needed only to drop BatchNorm

    class _LeafTracer(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return True

    try:
        # A copy that shares the children, so that attributes written by the traced forward stay on the copy.
        duplicate = copy.deepcopy(module, {id(child): child for child in module.children()})
        arguments = inspect.signature(duplicate.forward).parameters.values()
        defaults = {a.name: a.default for a in arguments if a.default is not a.empty}
        graph = _LeafTracer().trace(duplicate, defaults)
    except Exception:  # any error of a forward that was not written for tracing
        return None
    calls: dict[nn.Module, list[nn.Module]] = {}
    producer: dict[fx.Node, nn.Module] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            child = duplicate.get_submodule(str(node.target))
            source = producer.get(node.args[0], module) if node.args else module
            calls.setdefault(child, []).append(source)
            producer[node] = source if isinstance(child, nn.Identity) else child
    return calls


def drop_batch_norms(model: nn.Module, drop: dict[str, str]) -> None:
    """Replace each BatchNorm in {name: name of the layer before it} by an `nn.Identity`."""
    for name, layer in drop.items():
        batch_norm = model.get_submodule(name)
        identity = nn.Identity().train(batch_norm.training)
        record_reason(identity, f"{type(batch_norm).__name__} dropped after {layer}")
        model.set_submodule(name, identity)


def disable_inplace(model: nn.Module) -> None:
    """Set `inplace=False` on each module of an `nn.Sequential` that overwrites the saved output of a sphere layer.

    Gradients would be correct without this, but the layer would have to convolve again, which costs more than the
    saved memory. With a bias or rescaling the layer does not save its output, so later in-place activations stay.
    """
    for first, then in consecutive_modules(model):
        saves_output = (
            isinstance(first, SphereLayer) and first.rescale is None and first._parameters.get("bias") is None
        )
        if saves_output and getattr(then, "inplace", False) is True:
            override_attribute(then, "inplace", False)
            record_reason(then, "inplace disabled: the sphere layer before it saves its output")


def disable_fast_paths(model: nn.Module) -> None:
    """Disable the inference fast path of torch's transformer encoders that contain sphere layers.

    In eval mode without gradients, `nn.TransformerEncoderLayer` passes the weights of its linear layers to one fused
    function and never calls the layers. The attribute `activation_relu_or_gelu` only serves to select this path.
    """
    changed = set()
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            layers = (module.linear1, module.linear2)
            if any(isinstance(layer, SphereLayer) for layer in layers) and module.activation_relu_or_gelu:
                override_attribute(module, "activation_relu_or_gelu", 0)
                record_reason(module, "inference fast path disabled: it would bypass the sphere layers")
                changed.add(module)
    for module in model.modules():
        is_encoder = isinstance(module, nn.TransformerEncoder) and changed.intersection(module.layers)
        if is_encoder and module.use_nested_tensor:
            override_attribute(module, "use_nested_tensor", False)
            record_reason(module, "nested tensors disabled: they need the inference fast path")
