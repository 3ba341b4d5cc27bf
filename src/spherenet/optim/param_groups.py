"""Parameter groups for torch's optimisers: weight decay on plain weights only (SPEC 4).

Decay of a scale-invariant weight regularises nothing, it only raises the effective learning rate; decay of the
parameter behind k pulls every k towards 0.7 (softplus of 0), and decay of a scale fights what the scale is for.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from spherenet.ops.angle_functions import AngleFunction
from spherenet.ops.arguments import require_number
from spherenet.optim.scale_invariance import is_scale_invariant, require_initialised

__all__ = ["param_groups"]

_NEVER_DECAYED = (
    AngleFunction,  # k
    _NormBase,  # BatchNorm, InstanceNorm and their kin
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.Embedding,  # looked up, not multiplied: decay would shrink rows that no batch has seen
    nn.EmbeddingBag,
)


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the groups "decay" and "no_decay" that hold every trainable parameter of a model once.

        torch.optim.Adam(sn.param_groups(model, 5e-4), lr=1e-3)

    Decayed: weights of two dimensions or more, that is of plain convolutions and linear layers (attention,
    recurrent and hand-written ones, and an `AngularHead` under plain softmax, included).
    Not decayed: everything in a sphere layer (its weight, k, β, γ, bias) or in a module with
    `scale_invariant = True`; any angle function's k; normalisation layers; embeddings; and whatever has fewer
    than two dimensions: biases, scales, single numbers.
    A parameter shared by several modules is decayed only if each of them would decay it.

    Both groups are always there, an empty one included, so that an optimiser's saved state fits whatever is
    frozen. Frozen parameters (`requires_grad=False`) are left out: freeze before, not after.

    weight_decay: a finite number of at least 0.
    Raises ValueError for a wrong weight_decay or a lazy parameter without a shape, TypeError for no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {model!r} of type {type(model).__name__}.")
    weight_decay = require_number("weight_decay", weight_decay)
    if weight_decay < 0:
        raise ValueError(f"weight_decay must be at least 0, got {weight_decay!r}.")
    decayed: dict[nn.Parameter, bool] = {}
    _judge(model, "", False, decayed)
    return [
        {"name": "decay", "params": [p for p, yes in decayed.items() if yes], "weight_decay": weight_decay},
        {"name": "no_decay", "params": [p for p, yes in decayed.items() if not yes], "weight_decay": 0.0},
    ]


def _judge(module: nn.Module, prefix: str, spared: bool, decayed: dict[nn.Parameter, bool]) -> None:
    """Note for each trainable parameter under `module` whether it is decayed; a spared module spares its parts.

    The parts matter: a learned k belongs to the layer's angle, a parametrised weight to a list in the layer.
    """
    spared = spared or isinstance(module, _NEVER_DECAYED) or is_scale_invariant(module)
    for name, parameter in module.named_parameters(prefix, recurse=False):
        if parameter.requires_grad:
            require_initialised(name, parameter)
            decayed[parameter] = not spared and parameter.dim() >= 2 and decayed.get(parameter, True)
    for name, child in module.named_children():
        _judge(child, f"{prefix}.{name}" if prefix else name, spared, decayed)
