"""The layers of a model: each once, with all its names and the modules it stands in.

Which module directly follows which, where that is certain.

Certain are the order of an `nn.Sequential` and what symbolic tracing sees of a module's own forward. The order in which
a module registers its parts is not: a block that normalises before its convolutions often registers them first.

What a layer is for, judged by names, order and surroundings: classifier, attention projection, shortcut, tied head.

These are guesses, made so that the likelier mistake is the cheaper one: a layer left plain costs little, a classifier
whose scores cannot leave [−1, 1] does not train.
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
    "CONVERTIBLE",
    "Layer",
    "applied_by_owner",
    "classifiers",
    "find_layers",
    "is_attention_projection",
    "is_chain",
    "is_sealed",
    "is_shortcut",
    "next_in_chains",
    "num_filters",
    "owners",
    "tied_embeddings",
    "traced_inputs",
    "weight_modules",
]

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


def num_filters(layer: Any) -> int:
    """Return the number of output channels or features."""
    return int(layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels)


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


def is_chain(module: nn.Module) -> bool:
    """Return whether a module runs its children one after the other, as `nn.Sequential` does."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def next_in_chains(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield each pair of modules of which the second gets what the first returns, by the order of chains.

    Chains within chains are one chain. `nn.Identity` passes its input on: a module before it is followed by the one
    after it too.
    """
    inner = {id(child) for module in model.modules() if is_chain(module) for child in module.children()}
    for module in model.modules():
        if is_chain(module) and id(module) not in inner:
            before: list[nn.Module] = []
            for link in _links(module):
                for earlier in before:
                    yield earlier, link
                before = [*before, link] if isinstance(link, nn.Identity) else [link]


def _links(chain: nn.Module) -> Iterator[nn.Module]:
    for child in chain._modules.values():  # not children(): a module may occur twice
        if child is not None:
            yield from _links(child) if is_chain(child) else [child]


def traced_inputs(module: nn.Module) -> dict[nn.Module, list[nn.Module]] | None:
    """Return, for each part that a module's forward calls, the parts whose output it was called on.

    By symbolic tracing with the parts unopened; anything but a part (an input, a sum) stands as the module itself.
    Returns None where the forward cannot be traced (control flow that depends on data).
    """
    from torch import fx  # heavy, and only asked for where BatchNorm is dropped

    class _PartsUnopened(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return True

    try:
        # A copy that shares the parts: whatever the forward writes on its module while traced stays on the copy.
        twin = copy.deepcopy(module, {id(child): child for child in module.children()})
        arguments = inspect.signature(twin.forward).parameters.values()
        defaults = {a.name: a.default for a in arguments if a.default is not a.empty}
        graph = _PartsUnopened().trace(twin, defaults)
    except Exception:  # whatever a forward raises that was not written for tracing
        return None
    calls: dict[nn.Module, list[nn.Module]] = {}
    made_by: dict[fx.Node, nn.Module] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            part = twin.get_submodule(str(node.target))
            source = made_by.get(node.args[0], module) if node.args else module
            calls.setdefault(part, []).append(source)
            made_by[node] = source if isinstance(part, nn.Identity) else part
    return calls


_HEAD = re.compile(r"fc|aux.*|(.*_)?(classifiers?|heads?|score|scores|logits|predictor)")
_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
_UNMISTAKABLE = {"qkv", "to_qkv", "query_key_value", "q_proj", "k_proj", "v_proj", "to_q", "to_k", "to_v", "q_lin"}
_PROJECTIONS = _UNMISTAKABLE | {
    *("q", "k", "v", "kv", "wq", "wk", "wv", "wo", "query", "key", "value", "q_linear", "k_linear", "v_linear"),
    *("in_proj", "out_proj", "o_proj", "proj", "projection", "to_kv", "to_out", "c_attn", "c_proj"),
    *("k_lin", "v_lin", "out_lin", "out", "output", "dense"),
}
_SHORTCUT = re.compile(r".*(shortcut|downsample|skip|residual).*|(.*_)?proj(ection)?")
_MANY = re.compile(r"block|layer|stage|unit")

_RECTIFIERS = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Hardswish, nn.Hardtanh, nn.Softplus),
)

_APPLY_WEIGHTS_THEMSELVES = {"MultiheadAttention", "LinearCrossEntropyLoss"}
"""Modules of torch that never call the layer they own, by name: not every version of torch has them all."""


def classifiers(model: nn.Module) -> dict[int, str]:
    """Return the layers that make the model's output, by id, with the reason.

    By name: a module called fc, classifier, head, score, logits, aux… or …_head, not inside numbered blocks; if it is a
    container, the last layer in it (of a list of heads, the last of each). By position: the last layer in the order of
    definition (a convolution too, as in a UNet), unless it is the only one, is normalised after, or is rectified in its
    chain: then it makes features. An `AngularHead` there leaves nothing to find.
    """
    layers = list(weight_modules(model))
    found = {}
    for name, module in model.named_modules():
        parts = name.split(".")
        if _HEAD.fullmatch(parts[-1].lower()) and not any(part.isdigit() for part in parts[:-1]):
            for head in _heads(module):
                found[id(head)] = f"classifier (named {parts[-1]!r})"
    if len(layers) > 1 and _makes_output(model, layers[-1][1]):
        found.setdefault(id(layers[-1][1]), "classifier (last layer of the model)")
    return found


def _heads(module: nn.Module) -> Iterator[nn.Module]:
    several = module.children() if isinstance(module, (nn.ModuleList, nn.ModuleDict)) else [module]
    for part in several:
        layers = list(weight_modules(part))
        if layers:
            yield layers[-1][1]


def _makes_output(model: nn.Module, layer: nn.Module) -> bool:
    if not isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return False
    modules = list(model.modules())
    after = modules[modules.index(layer) + 1 :]
    if any(_normalised_width(module) == num_filters(layer) for module in after):
        return False
    return not any(first is layer and isinstance(then, _RECTIFIERS) for first, then in next_in_chains(model))


def _normalised_width(module: nn.Module) -> int | None:
    if "norm" not in type(module).__name__.lower():
        return None
    width = getattr(module, "num_features", None) or getattr(module, "num_channels", None)
    weight = module._parameters.get("weight")
    return width if isinstance(width, int) else None if weight is None else weight.numel()


def tied_embeddings(model: nn.Module) -> dict[int, str]:
    """Return the names of the embeddings by the id of their weight."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {id(module.weight): name for name, module in model.named_modules() if isinstance(module, kinds)}


def applied_by_owner(layer: Layer) -> str | None:
    """Return the class that uses the layer's weight without calling the layer, None where there is none."""
    for name in layer.names:
        around = owners(name)
        owner = layer.around[around[-1]] if around else None
        for cls in type(owner).__mro__:
            if cls.__module__.startswith("torch.") and cls.__name__ in _APPLY_WEIGHTS_THEMSELVES:
                return cls.__name__
    return None


def is_attention_projection(layer: Layer) -> bool:
    """Return whether a layer projects to or from queries, keys and values.

    Its name says so (q_proj, query, qkv, to_out, dense, …), and one of the three modules around it is called an
    attention by its class or has parts with names that nothing else has (qkv, q_proj, to_q).
    """
    for name in layer.names:
        parts = [part for part in name.split(".") if not part.isdigit()]
        if parts and parts[-1] in _PROJECTIONS:
            around = [layer.around[owner] for owner in owners(name)[-3:]]
            if any(_ATTENTION.search(type(m).__name__) or not _UNMISTAKABLE.isdisjoint(m._modules) for m in around):
                return True
    return False


def is_shortcut(layer: Layer) -> bool:
    """Return whether a layer is a 1×1 convolution beside a residual branch.

    That is: its own name or one of the two before it contains shortcut, downsample, skip or residual, or is proj; names
    of many (residual_blocks) do not count.
    """
    kernel = getattr(layer.module, "kernel_size", None)
    if not isinstance(kernel, tuple) or any(size != 1 for size in kernel):
        return False
    parts = [part.lower() for name in layer.names for part in name.split(".")[-3:]]
    return any(_SHORTCUT.fullmatch(part) and not _MANY.search(part) for part in parts)
