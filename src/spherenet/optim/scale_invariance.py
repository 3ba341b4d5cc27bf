"""Which weights a model's output does not feel the length of.

A module says so itself with an attribute `scale_invariant`, on its class or on the instance: a head whose loss
normalises the class weights sets it to True, and so may anybody's own layer. Sphere layers need not say it.
"""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import UninitializedParameter

from spherenet.layers import SphereLayer

__all__ = ["is_scale_invariant", "require_initialised", "scale_invariant_weights"]


def is_scale_invariant(module: nn.Module) -> bool:
    """Return whether the module's output depends on the directions of its kernels only."""
    declared: object = getattr(module, "scale_invariant", None)
    return isinstance(module, SphereLayer) if declared is None else declared is True


def scale_invariant_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the scale-invariant weights of a model under their names, shared ones once.

    The weight of a scale-invariant module holds one kernel an index of its first dimension. Raises ValueError
    for a weight that is still lazy, or that a parametrisation computes: nobody can set the length of that.
    """
    found: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        if not is_scale_invariant(module):
            continue
        name = f"{prefix}.weight" if prefix else "weight"
        weight = module._parameters.get("weight")
        if weight is None and getattr(module, "weight", None) is not None:
            raise ValueError(f"model must own its scale-invariant weights, but a parametrisation computes {name}.")
        if weight is not None and id(weight) not in seen:
            require_initialised(name, weight)
            seen.add(id(weight))
            if weight.dim() >= 2:  # a vector of scales holds no kernels
                found[name] = weight
    return found


def require_initialised(name: str, parameter: nn.Parameter) -> None:
    """Refuse a parameter of a lazy module that has not seen an input yet."""
    if isinstance(parameter, UninitializedParameter):
        raise ValueError(
            f"model must be initialised, but {name} is lazy and has no shape yet: run one batch through it first."
        )
