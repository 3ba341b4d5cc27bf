"""Find the layers of a model and guess what each one is for.

`find_layers` lists the convolutions and linear layers that a conversion must decide about. The functions below it
recognize classifiers, attention projections and shortcuts by names, types and order. These are heuristics, chosen so
that the more likely mistake is the cheaper one: a feature layer that stays plain costs little, but a classifier whose
scores are limited to [−1, 1] does not train.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from spherenet.angles import AngleFunction
from spherenet.layers import SphereLayer

__all__ = [
    "ATTENTION",
    "CONVERTIBLE",
    "TRANSPOSED",
    "Layer",
    "ancestor_names",
    "called_children",
    "consecutive_modules",
    "find_classifiers",
    "find_embeddings",
    "find_layers",
    "is_attention_projection",
    "is_sequential",
    "is_shortcut",
    "num_filters",
    "owner_applying_weight",
    "sealed_reason",
    "weight_modules",
]

ATTENTION = nn.MultiheadAttention
"""Layer that is converted on request only, as a whole: to `SphereMultiheadAttention`."""

CONVERTIBLE = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
"""Layers that are converted on request only."""

_WRAPPERS = {
    "DistributedDataParallel": "wrapped by DistributedDataParallel: convert it before wrapping",
    "FullyShardedDataParallel": "wrapped by FullyShardedDataParallel: convert it before wrapping",
    "FSDPModule": "sharded by fully_shard: convert it before sharding",
}
"""Wrappers that do not notice changed layers, by class name, since importing all of them takes a second."""


@dataclass
class Layer:
    """A module that a conversion must decide about.

    Args:
        module: The layer.
        names: All its dotted names; "" for the model itself.
        ancestors: The modules that contain it, by name.
    """

    module: nn.Module
    names: list[str]
    ancestors: dict[str, nn.Module] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]


def find_layers(model: nn.Module) -> list[Layer]:
    """Return the convolutions, linear and attention layers of a model in order of definition, also quantized ones.

    A submodule that cannot be edited (`sealed_reason`) counts as one layer. Modules inside a sphere layer (its angle
    function) or inside a parametrization are not layers of the model.
    """
    layers: dict[int, Layer] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    opaque: set[str] = set()
    for name, module in modules.items():
        ancestors = ancestor_names(name)
        if opaque.intersection(ancestors):
            continue
        sealed = sealed_reason(module) is not None
        if sealed or _is_opaque(module):
            opaque.add(name)
        if sealed or isinstance(module, (*CONVERTIBLE, *TRANSPOSED, ATTENTION)) or _is_quantized_layer(module):
            layer = layers.setdefault(id(module), Layer(module, []))
            layer.names.append(name)
            layer.ancestors |= {ancestor: modules[ancestor] for ancestor in ancestors}
    return list(layers.values())


def num_filters(layer: Any) -> int:
    """Return the number of output channels or features."""
    return int(layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels)


def ancestor_names(name: str) -> list[str]:
    """Return the names of the modules that contain the named module, starting with the model ("")."""
    components = name.split(".") if name else []
    return [".".join(components[:depth]) for depth in range(len(components))]


def weight_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module with a weight of two or more dimensions and its first name, in order of definition.

    This includes transposed convolutions, embeddings, recurrent layers and angular heads.
    """
    opaque: set[str] = set()
    for name, module in model.named_modules():
        if opaque.intersection(ancestor_names(name)):
            continue
        if _is_opaque(module):
            opaque.add(name)
        if isinstance(module, (_ConvNd, nn.Linear)) or _is_quantized_layer(module) or _owns_weight(module):
            yield name, module


def sealed_reason(module: nn.Module) -> str | None:
    """Return why a scripted, compiled or wrapped module cannot be edited, or None if it can."""
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
    # A module without weights, such as a scripted activation, has nothing to convert.
    return reason if any(_is_matrix(parameter) for parameter in module.parameters()) else None


def _owns_weight(module: nn.Module) -> bool:
    return any("weight" in name and _is_matrix(p) for name, p in module.named_parameters(recurse=False))


def _is_matrix(parameter: nn.Parameter) -> bool:
    return not is_lazy(parameter) and parameter.dim() >= 2


def _is_opaque(module: nn.Module) -> bool:
    return isinstance(module, (SphereLayer, AngleFunction, ParametrizationList))


def _is_quantized_layer(module: nn.Module) -> bool:
    cls = type(module)
    quantized = cls.__module__.startswith("torch.ao.nn.") and ("quantized" in cls.__module__ or "qat" in cls.__module__)
    return quantized and cls.__name__.startswith(("Conv", "Linear")) and not cls.__name__.endswith("PackedParams")


def is_sequential(module: nn.Module) -> bool:
    """Return whether a module runs its children one after another with the `forward` of `nn.Sequential`."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def called_children(module: nn.Module) -> dict[nn.Module, list[nn.Module]] | None:
    """Return the children called by a module's `forward`, each with the children whose outputs it takes.

    The children themselves are not traced. Any other source, such as an input or a sum, is represented by the module
    itself. The result is None if the `forward` cannot be traced, for example because of data-dependent control flow.
    """
    from torch import fx  # slow to import, and needed only for BatchNorm

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


def consecutive_modules(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield each pair of modules inside an `nn.Sequential` of which the second takes the output of the first.

    Nested `nn.Sequential` modules count as one sequence. Since `nn.Identity` returns its input, the module before it is
    paired with the module after it too.
    """
    nested = {id(child) for module in model.modules() if is_sequential(module) for child in module.children()}
    for module in model.modules():
        if is_sequential(module) and id(module) not in nested:
            previous: list[nn.Module] = []
            for current in _flattened(module):
                for earlier in previous:
                    yield earlier, current
                previous = [*previous, current] if isinstance(current, nn.Identity) else [current]


def _flattened(sequence: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a sequence, with nested sequences opened."""
    for child in sequence._modules.values():  # not children(), which yields a repeated module once
        if child is not None:
            yield from _flattened(child) if is_sequential(child) else [child]


# --- Heuristics --------------------------------------------------------------------------------------------------

_CLASSIFIER_NAME = re.compile(r"fc|aux.*|(.*_)?(classifiers?|heads?|score|scores|logits|predictor)")
_ATTENTION_CLASS = re.compile(r"attention|attn", re.IGNORECASE)
_ATTENTION_ONLY = {"qkv", "to_qkv", "query_key_value", "q_proj", "k_proj", "v_proj", "to_q", "to_k", "to_v", "q_lin"}
"""Names that only attention modules give to their projections."""
_PROJECTIONS = _ATTENTION_ONLY | {
    *("q", "k", "v", "kv", "wq", "wk", "wv", "wo", "query", "key", "value", "q_linear", "k_linear", "v_linear"),
    *("in_proj", "out_proj", "o_proj", "proj", "projection", "to_kv", "to_out", "c_attn", "c_proj"),
    *("k_lin", "v_lin", "out_lin", "out", "output", "dense"),
}
_SHORTCUT_NAME = re.compile(r".*(shortcut|downsample|skip|residual).*|(.*_)?proj(ection)?")
_GROUP_NAME = re.compile(r"block|layer|stage|unit")

_RECTIFIERS = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Hardswish, nn.Hardtanh, nn.Softplus),
)

_APPLY_CHILD_WEIGHTS = {"MultiheadAttention", "LinearCrossEntropyLoss"}
"""torch modules that use the weight of a child layer without calling it, by name: older versions lack some of them."""


def find_classifiers(model: nn.Module) -> dict[int, str]:
    """Return the layers that compute the model's output, as {id: reason}.

    By name: a module called fc, classifier, head, score, logits, aux… or …_head that is not inside numbered blocks. If
    it is a container, the last layer in it counts; in a list of heads, the last layer of each head.

    By position: the last layer in order of definition, which may be a convolution as in a UNet. It does not count if
    it is the only layer, or if a normalization or a rectifier follows it, because then it computes features. If an
    `AngularHead` comes last, there is no such layer.

    By type: all layers of an `nn.AdaptiveLogSoftmaxWithLoss`, which compute logits of classes and clusters.
    """
    layers = list(weight_modules(model))
    reasons: dict[int, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.AdaptiveLogSoftmaxWithLoss):
            reasons |= {id(layer): "classifier (AdaptiveLogSoftmaxWithLoss)" for _, layer in weight_modules(module)}
        *ancestors, last = name.split(".")
        if _CLASSIFIER_NAME.fullmatch(last.lower()) and not any(ancestor.isdigit() for ancestor in ancestors):
            heads = module.children() if isinstance(module, (nn.ModuleList, nn.ModuleDict)) else [module]
            for head in heads:
                head_layers = list(weight_modules(head))
                if head_layers:
                    reasons[id(head_layers[-1][1])] = f"classifier (named {last!r})"
    if len(layers) > 1 and _computes_output(model, layers[-1][1]):
        reasons.setdefault(id(layers[-1][1]), "classifier (last layer of the model)")
    return reasons


def _computes_output(model: nn.Module, layer: nn.Module) -> bool:
    """Return whether the last layer of a model is neither normalized nor rectified."""
    if not isinstance(layer, (*CONVERTIBLE, *TRANSPOSED)):
        return False
    modules = list(model.modules())
    later = modules[modules.index(layer) + 1 :]
    if any(_normalized_width(module) == num_filters(layer) for module in later):
        return False
    return not any(first is layer and isinstance(then, _RECTIFIERS) for first, then in consecutive_modules(model))


def _normalized_width(module: nn.Module) -> int | None:
    """Return the number of channels that a normalization module normalizes, None for other modules."""
    if "norm" not in type(module).__name__.lower():
        return None
    width = getattr(module, "num_features", None) or getattr(module, "num_channels", None)
    weight = module._parameters.get("weight")
    return width if isinstance(width, int) else None if weight is None else weight.numel()


def find_embeddings(model: nn.Module) -> dict[int, str]:
    """Return the embeddings of a model as {id of the weight: name}."""
    embeddings = (nn.Embedding, nn.EmbeddingBag)
    return {id(module.weight): name for name, module in model.named_modules() if isinstance(module, embeddings)}


def owner_applying_weight(layer: Layer) -> str | None:
    """Return the name of a parent class that uses the layer's weight without calling the layer, if there is one."""
    for name in layer.names:
        ancestors = ancestor_names(name)
        parent = layer.ancestors[ancestors[-1]] if ancestors else None
        for cls in type(parent).__mro__:
            if cls.__module__.startswith("torch.") and cls.__name__ in _APPLY_CHILD_WEIGHTS:
                return cls.__name__
    return None


def is_attention_projection(layer: Layer) -> bool:
    """Return whether a layer projects to or from queries, keys and values.

    Its name must be that of a projection (q_proj, query, qkv, to_out, dense, …). In addition, one of its three nearest
    ancestors must be an attention by its class name or have a child with an unambiguous name (qkv, q_proj, to_q, …).
    """
    for name in layer.names:
        components = [component for component in name.split(".") if not component.isdigit()]
        if components and components[-1] in _PROJECTIONS:
            ancestors = [layer.ancestors[ancestor] for ancestor in ancestor_names(name)[-3:]]
            for module in ancestors:
                if _ATTENTION_CLASS.search(type(module).__name__) or not _ATTENTION_ONLY.isdisjoint(module._modules):
                    return True
    return False


def is_shortcut(layer: Layer) -> bool:
    """Return whether a layer is a 1×1 convolution on a shortcut.

    One of the last three components of its name must contain shortcut, downsample, skip or residual, or be proj. Names
    of groups such as residual_blocks do not count.
    """
    kernel = getattr(layer.module, "kernel_size", None)
    if not isinstance(kernel, tuple) or any(size != 1 for size in kernel):
        return False
    components = [component.lower() for name in layer.names for component in name.split(".")[-3:]]
    return any(_SHORTCUT_NAME.fullmatch(component) and not _GROUP_NAME.search(component) for component in components)
