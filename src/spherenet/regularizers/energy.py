"""Hyperspherical energy (Eq. 11): kernels as points on the unit sphere that repel each other like charges.

The energy is smallest when the points are spread evenly. Unlike orthogonality, this is possible for layers with more
kernels than fan-in too. (Liu et al., *Learning towards Minimum Hyperspherical Energy*, NeurIPS 2018.)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from spherenet._util.validation import require_integer, require_number, require_one_of
from spherenet.angles import angle_from_cosine
from spherenet.ops.norms import without_autocast
from spherenet.regularizers.kernels import KernelStack, Modules, cosines, kernel_stacks, zero_of

__all__ = ["DISTANCES", "LARGEST_S", "REDUCTIONS", "SOFTENING", "hyperspherical_energy"]

DISTANCES = ("chord", "angle")
REDUCTIONS = ("mean", "sum")

SOFTENING = 1e-4
"""Added to each squared distance, so that two equal kernels have a finite energy and gradient.

A distance of 0.01 is an angle of 0.6°: closer kernels are copies of each other. It is also about 500 times the rounding
error of 2 − 2·cos θ in float32, so that the energy of near copies is not noise. At √2, the usual distance of two
kernels, it changes the energy by a fraction of 5e-5·s/2.
"""

LARGEST_S = 8.0
"""Two equal kernels have the gradient s·SOFTENING^(−s/2−1), which is far below the largest float32 up to this s."""


def hyperspherical_energy(
    model: Modules,
    s: float = 2.0,
    half_space: bool = False,
    *,
    distance: str = "chord",
    include: Collection[str] = ("sphere",),
    hidden_weight: float = 1.0,
    output_weight: float = 10.0,
    reduction: str = "mean",
    compressed_dim: int | None = None,
    projections: int = 1,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return the Riesz s-energy of the unit kernels of hidden layers and of the class weights of heads (Eq. 11).

        E = hidden_weight · mean over hidden layers of E_s + output_weight · mean over heads of E_s
        E_s = mean over i ≠ j of f_s(d_ij),    f_s(d) = d^−s for s > 0,   −log d for s = 0

    Without "head" in `include`, the second term is 0. The published regularizer is the sum over hidden layers with the
    weights 1 and 10: `hyperspherical_energy(model, include=("sphere", "head"), reduction="sum")`.

    d is softened: d² + 1e-4 replaces d². Kernels are paired within their group. Layers without pairs (one kernel per
    group) are left out of the mean. Weights that several layers share count once. Half precision is computed in
    float32, also under autocast. Memory grows with the square of the number of kernels of a layer.

    Args:
        model: A model, a layer, or several of them.
        s: Order of the energy, from 0 to 8.
        half_space: Add the negative of each kernel, E = mean of ½·(f_s(‖ŵ_i − ŵ_j‖) + f_s(‖ŵ_i + ŵ_j‖)), so that
            opposite kernels count as copies. This is the mean over the pairs of all ±ŵ except (ŵ_i, −ŵ_i), which
            are constant.
        distance: "chord" for ‖ŵ_i − ŵ_j‖, or "angle" for the angle between the kernels.
        include: Layers to include, as in `orthogonality`. The class weights of an `AngularHead` ("head") are the output
            layer; all others are hidden layers.
        hidden_weight: Weight of the hidden layers, at least 0.
        output_weight: Weight of the class weights, at least 0.
        reduction: "mean" or "sum" over layers.
        compressed_dim: Number of dimensions to which random projections map the kernels of layers with a larger fan-in
            before distances are computed (compressive MHE; Lin et al., CVPR 2020); None for no projection. Published:
            30.
        projections: Number of random projections per call whose energies are averaged, at least 1.
        generator: Generator of the projections, on the device of the layers.

    Returns:
        A scalar; the constant 0, with a warning, for a model without pairs.

    Raises:
        TypeError: If `model` is not a module.
        ValueError: If an option is out of range, or a lazy layer has no weight yet.
    """
    s = require_number("s", s)
    if not 0 <= s <= LARGEST_S:
        raise ValueError(f"s must be from 0 to {LARGEST_S:g}, got {s!r}.")
    require_one_of("distance", distance, DISTANCES)
    require_one_of("reduction", reduction, REDUCTIONS)
    if compressed_dim is not None:
        compressed_dim = require_integer("compressed_dim", compressed_dim, minimum=1)
    projections = require_integer("projections", projections, minimum=1)
    weights = {False: hidden_weight, True: output_weight}
    for name, weight in (("hidden_weight", hidden_weight), ("output_weight", output_weight)):
        if require_number(name, weight) < 0:
            raise ValueError(f"{name} must be at least 0, got {weight!r}.")
    stacks = [stack for stack in kernel_stacks(model, include) if stack.kernels > 1]
    if reduction == "mean":
        for is_output in weights:
            num_layers = sum(len(stack.matrices) for stack in stacks if stack.is_output == is_output)
            weights[is_output] /= max(1, num_layers)
    total: Tensor | None = None
    for stack in stacks:
        if compressed_dim is None or compressed_dim >= stack.fan_in:
            energies = _energy_of_groups(stack, s, half_space, distance)
        else:
            compressed = [_compressed(stack, compressed_dim, generator) for _ in range(projections)]
            energies = torch.stack([_energy_of_groups(each, s, half_space, distance) for each in compressed]).mean(0)
        groups = [len(matrix) for matrix in stack.matrices]
        if max(groups) > 1:
            energies = torch.stack([of_layer.mean() for of_layer in torch.split(energies, groups)])
        energy = energies.sum() * weights[stack.is_output]
        total = energy if total is None else total + energy.to(total.device)
    return zero_of(model, "pair of kernels to include", include) if total is None else total


def _compressed(stack: KernelStack, dim: int, generator: torch.Generator | None) -> KernelStack:
    """Return the kernels in a random subspace: P·w with normal entries of P, which keeps angles on average."""
    like = stack.matrices[0]
    shape = (stack.fan_in, dim)
    projection = torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device) / dim**0.5
    with without_autocast(like):
        matrices = [matrix @ projection for matrix in stack.matrices]
    return replace(stack, fan_in=dim, matrices=matrices)


def _energy_of_groups(stack: KernelStack, s: float, half_space: bool, distance: str) -> Tensor:
    """Return the mean energy of the pairs of each group, [Σ groups]."""
    cosine = cosines(stack)
    energy = _pair_energy(cosine, s, distance)
    if half_space:
        energy = (energy + _pair_energy(-cosine, s, distance)) / 2
    diagonal = torch.eye(stack.kernels, dtype=torch.bool, device=cosine.device)
    return energy.masked_fill(diagonal, 0).sum((-2, -1)) / (stack.kernels * (stack.kernels - 1))


def _pair_energy(cosine: Tensor, s: float, distance: str) -> Tensor:
    """Return f_s of the softened distance of each pair."""
    squared = 2 - 2 * cosine if distance == "chord" else angle_from_cosine(cosine).square()
    softened = squared + SOFTENING
    return softened.log() / -2 if s == 0 else softened.pow(-s / 2)
