"""Hyperspherical energy: how evenly kernels spread over the sphere, a gentler pull than orthogonality.

Kernels as points on the unit sphere repel each other like charges; the energy is least when they are spread
evenly, and unlike orthogonality it asks nothing impossible of a layer with more kernels than fan-in.
(Liu et al., *Learning towards Minimum Hyperspherical Energy*, NeurIPS 2018.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from spherenet.ops.angles import angle_from_cosine
from spherenet.ops.arguments import require_number, require_one_of
from spherenet.regularizers.gram import KernelStack, cosines, kernel_stacks
from spherenet.regularizers.sphere_layers import Modules, sphere_layers, zero_of

__all__ = ["DISTANCES", "LARGEST_S", "SOFTENING", "hyperspherical_energy"]

DISTANCES = ("chord", "angle")

SOFTENING = 1e-4
"""Added to each squared distance, so that two kernels that coincide have a finite energy and gradient.

A distance of 0.01 is an angle of 0.6°: closer kernels are copies of each other. It is also some 500 times
the rounding error of 2 − 2·cos θ in float32, so the energy of near copies is not made of noise. At the usual
distance of two kernels, √2, it changes the energy by 5e-5·s/2 of its value.
"""

LARGEST_S = 8.0
"""Two equal kernels have the gradient s·SOFTENING^(−s/2−1): far inside float32 up to here, inf from 17 on."""


def hyperspherical_energy(
    model: Modules, s: float = 2.0, half_space: bool = False, *, distance: str = "chord"
) -> Tensor:
    """Return the mean Riesz s-energy of pairs of unit kernels: over the pairs of a layer, then over layers.

        E_s = mean over i ≠ j of f_s(d_ij),    f_s(d) = d^−s for s > 0,   −log d for s = 0

    d is ‖ŵ_i − ŵ_j‖, or the angle between the two for distance="angle", softened: d² + 1e-4 stands for d².
    half_space: add each kernel's negative, E = mean of ½·(f_s(‖ŵ_i − ŵ_j‖) + f_s(‖ŵ_i + ŵ_j‖)): kernels that
        point opposite ways then count as copies. This is the energy of all ±ŵ, averaged over its pairs except
        (ŵ_i, −ŵ_i), which never change.
    s: from 0 to 8.

    Of a grouped convolution only kernels of the same group are paired. A layer that has no pairs (one kernel
    a group) is left out of the mean; a model without pairs gives 0, a constant. Weights shared by several
    layers count once; half precision is computed in float32, under autocast too. Memory: all pairs of a layer's
    kernels at once, for kernels² numbers a layer.

    Raises ValueError for a wrong s or distance or a lazy layer without a weight, TypeError for no module.
    """
    s = require_number("s", s)
    if not 0 <= s <= LARGEST_S:
        raise ValueError(f"s must be from 0 to {LARGEST_S:g}, got {s!r}.")
    require_one_of("distance", distance, DISTANCES)
    stacks = [stack for stack in kernel_stacks(sphere_layers(model).values()) if stack.kernels > 1]
    if not stacks:
        return zero_of(model)
    num_layers = sum(len(stack.matrices) for stack in stacks)
    total: Tensor | None = None
    for stack in stacks:
        energy = _sum_over_layers(_energy_of_groups(stack, s, half_space, distance), stack.groups) / num_layers
        total = energy if total is None else total + energy.to(total.device)
    assert total is not None
    return total


def _energy_of_groups(stack: KernelStack, s: float, half_space: bool, distance: str) -> Tensor:
    """The mean energy of the pairs of each group, [Σ groups]."""
    cosine = cosines(stack)
    energy = _pair_energy(cosine, s, distance)
    if half_space:
        energy = (energy + _pair_energy(-cosine, s, distance)) / 2
    itself = torch.eye(stack.kernels, dtype=torch.bool, device=cosine.device)
    return energy.masked_fill(itself, 0).sum((-2, -1)) / (stack.kernels * (stack.kernels - 1))


def _pair_energy(cosine: Tensor, s: float, distance: str) -> Tensor:
    squared = 2 - 2 * cosine if distance == "chord" else angle_from_cosine(cosine).square()
    softened = squared + SOFTENING
    return softened.log() / -2 if s == 0 else softened.pow(-s / 2)


def _sum_over_layers(energy_of_groups: Tensor, groups: list[int]) -> Tensor:
    """The sum over layers of each layer's mean over its groups."""
    if max(groups) == 1:
        return energy_of_groups.sum()
    return torch.stack([energies.mean() for energies in torch.split(energy_of_groups, groups)]).sum()
