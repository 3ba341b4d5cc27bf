"""What a layer is for, judged by names, order and surroundings: classifier, attention projection, shortcut, tied head.

These are guesses, made so that the likelier mistake is the cheaper one: a layer left plain costs little, a classifier
whose scores cannot leave [−1, 1] does not train.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from spherenet.convert.neighbours import next_in_chains
from spherenet.convert.survey import Layer, owners, weight_modules
from spherenet.convert.twins import num_filters

__all__ = ["applied_by_owner", "classifiers", "is_attention_projection", "is_shortcut", "tied_embeddings"]

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
