"""Orthogonality of the kernels of a model's sphere layers (SPEC 1 (3)).

What the term can reach. n kernels of fan-in d cannot be orthogonal when n > d: WᵀW has rank d at most.
The least values then are

    raw           n − d          d eigenvalues of WᵀW are 1, the rest 0
    normalized    n·(n − d)/d    trace n spread evenly over d eigenvalues: a tight frame of unit vectors

and `orthogonality_minimum` returns their sum over a model. It is a constant: it moves the value, never the
gradient, and pulls such a layer towards the tight frame.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spherenet.ops.arguments import require_one_of
from spherenet.regularizers.gram import KernelStack, cosines, gram, kernel_stacks, unit_kernels
from spherenet.regularizers.sphere_layers import Modules, kernel_matrix, sphere_layers, zero_of

__all__ = ["FORMS", "orthogonality", "orthogonality_minimum"]

FORMS = ("raw", "normalized")


def orthogonality(model: Modules, form: str = "raw") -> Tensor:
    """Return Σ over sphere layers of ‖WᵀW − I‖_F², the columns of W the flattened kernels (SPEC 1 (3)).

    model: a model, a layer, or several of either; each weight counts once however many layers share it.
    form: "raw" takes the weights as they are (the authors' code), which also pulls their norms to 1;
        "normalized" takes unit kernels w/‖w‖ and leaves norms alone (shorter ones than the root of the layer's
        eps, 0.01 by default, are divided by that).

    A grouped convolution counts each group's kernels by themselves, for they look at different channels.
    Half-precision weights are computed in float32, under autocast too. Layers may live on several devices:
    the sum is on the first one's. A model without sphere layers gives 0, a constant on its own device, so
    that a CNN twin trains in the same loop. The raw value is inf once ‖w‖ exceeds about 1e9 in float32.

    Raises ValueError for an unknown form or a lazy layer without a weight, TypeError for no module.
    """
    require_one_of("form", form, FORMS)
    layers = sphere_layers(model)
    if not layers:
        return zero_of(model)
    values = [_of_stack(stack, form) for stack in kernel_stacks(layers.values())]
    total = values[0]
    for value in values[1:]:
        total = total + value.to(total.device)
    return total


def orthogonality_minimum(model: Modules, form: str = "raw") -> float:
    """Return the least value that `orthogonality` can take: 0 unless a layer has more kernels than fan-in.

    Σ over layers and groups of n − d (raw) or n·(n − d)/d (normalized) where n > d.
    """
    require_one_of("form", form, FORMS)
    total = 0.0
    for layer in sphere_layers(model).values():
        groups, kernels, fan_in = kernel_matrix(layer).shape
        excess = max(kernels - fan_in, 0)
        total += groups * excess * (1 if form == "raw" or fan_in == 0 else kernels / fan_in)
    return total


def _of_stack(stack: KernelStack, form: str) -> Tensor:
    if stack.kernels <= stack.fan_in:
        return _squared_distance_to_identity(gram(stack.matrices) if form == "raw" else cosines(stack))
    # ‖WᵀW − I_n‖² = ‖WWᵀ − I_d‖² + n − d: the smaller of the two Gram matrices, and a sum without cancellation.
    matrices = stack.matrices if form == "raw" else unit_kernels(stack)
    smaller = gram([matrix.mT for matrix in matrices])
    return _squared_distance_to_identity(smaller) + sum(stack.groups) * (stack.kernels - stack.fan_in)


def _squared_distance_to_identity(products: Tensor) -> Tensor:
    identity = torch.eye(products.shape[-1], dtype=products.dtype, device=products.device)
    return (products - identity).square().sum()
