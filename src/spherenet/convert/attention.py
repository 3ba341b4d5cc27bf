"""Change `nn.MultiheadAttention` into `SphereMultiheadAttention` and back, in place.

Both have the same parameters, apart from the temperature of each head, which is new and is dropped on the way back. The
module remains the same object, as other converted layers do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from spherenet.layers import SphereMultiheadAttention

__all__ = [
    "attention_options",
    "attention_problem",
    "is_attention_output",
    "make_attention_plain",
    "make_attention_spherical",
]

OPTIONS = {"scale": 10.0, "max_scale": 100.0}
"""Initial scale and bound of converted layers: the defaults of the layer."""


def attention_problem(module: nn.Module) -> str | None:
    """Return why an `nn.MultiheadAttention` cannot be converted, or None if it can."""
    name = type(module).__name__
    if "forward" in vars(module):  # set on the object, e.g. by a tool that offloads weights
        return f"{name} overrides forward"
    if is_parametrized(module) or is_parametrized(module.out_proj):  # type: ignore[arg-type]
        return f"{name} is parametrized: call torch.nn.utils.parametrize.remove_parametrizations first"
    if type(module) is not nn.MultiheadAttention:
        return f"{name} is a subclass of MultiheadAttention"
    if module.bias_k is not None:
        return "add_bias_kv is set, which SphereMultiheadAttention does not support"
    if module.add_zero_attn:
        return "add_zero_attn is set, which SphereMultiheadAttention does not support"
    weight = _first_weight(module)
    if not weight.is_floating_point() or type(weight).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"{name} has weights of type {weight.dtype} in a {type(weight).__name__}"
    return None


def make_attention_spherical(
    module: Any, eps: float, scale: float | None = None, max_scale: float | None = None
) -> None:
    """Change an attention layer of torch into one that compares by cosines; `attention_problem` must be None."""
    scale, max_scale = scale or OPTIONS["scale"], max_scale or OPTIONS["max_scale"]
    weight = _first_weight(module)
    # On meta: it checks the options and computes nothing, in particular no random numbers.
    like = SphereMultiheadAttention(
        module.embed_dim, module.num_heads, scale=scale, max_scale=max_scale, eps=eps, device="meta"
    )
    for name in ("_qkv_same_embed_dim", "bias_k", "bias_v", "add_zero_attn"):
        module.__dict__.pop(name, None)
    module.__class__ = SphereMultiheadAttention
    module.scale, module.max_scale, module.eps = like.scale, like.max_scale, like.eps
    module.temperature = nn.Parameter(torch.empty(module.num_heads, device=weight.device, dtype=weight.dtype))
    module.reset_temperature()
    module.temperature.requires_grad_(weight.requires_grad)


def make_attention_plain(module: Any) -> None:
    """Change a `SphereMultiheadAttention` into torch's layer, with the same projections."""
    del module.temperature, module.scale, module.max_scale, module.eps
    module.__class__ = nn.MultiheadAttention
    module._qkv_same_embed_dim = module.in_proj_weight is not None
    module.bias_k = module.bias_v = None
    module.add_zero_attn = False
    if type(module.out_proj) is nn.Linear:
        module.out_proj.__class__ = NonDynamicallyQuantizableLinear


def attention_options(module: Any) -> dict[str, float]:
    """Return the options of a `SphereMultiheadAttention` that its parameters do not show."""
    return {"scale": module.scale, "max_scale": module.max_scale, "eps": module.eps}


def is_attention_output(module: nn.Module, parent: nn.Module | None) -> bool:
    """Return whether a module is the output projection of a `SphereMultiheadAttention`."""
    return isinstance(parent, SphereMultiheadAttention) and module is parent.out_proj


def _first_weight(module: Any) -> nn.Parameter:
    weight: nn.Parameter = module.q_proj_weight if module.in_proj_weight is None else module.in_proj_weight
    return weight
