"""How conditioning worsens with depth: products of N matrices whose scales are spread in two ways (SPEC 2).

    G(W_1, …, W_N) = ½‖F − W_1·W_2·…·W_N‖²,   W_i → s_i·W_i with s_1·…·s_N = 1

The derivative by W_i is divided by s_i, so at the optimum the eigenvalues of the Hessian lie between min 1/s_i² and
max 1/s_i², times what they were. With N − 1 layers at c and the last at c^−(N−1) that is c⁻² and c^(2N−2): κ grows as
c^(2N). With c and 1/c in turn it is c⁻² and c²: κ grows as c⁴ whatever the depth. The paper's "c^N" is neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce

import torch
from torch import Tensor

from spherenet.theory.conditioning import Curve, curve, require_sizes, unit_rows

__all__ = ["ALTERNATING", "LAST", "RENORMALISED", "balanced_layers", "depth_curves", "spread", "unit_layers"]

LAST = "last c^−(N−1)"
ALTERNATING = "c, 1/c in turn"
RENORMALISED = "renormalised"


def spread(way: str, layers: int, c: float) -> list[float]:
    """One factor a layer, their product 1: `LAST` or `ALTERNATING` (of an odd number the last layer is left at 1)."""
    if way == LAST:
        return [c] * (layers - 1) + [c ** -(layers - 1)]
    pairs = [c, 1 / c] * (layers // 2)
    return pairs + [1.0] * (layers % 2)


def balanced_layers(n: int, m: int, k: int, layers: int, seed: int) -> list[Tensor]:
    """W_1 [n, k] with unit rows, orthogonal [k, k] in between, W_N [k, m] with unit columns; float64.

    Orthogonal layers add nothing of their own to κ, so that what is seen is the scales.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator, dtype=torch.float64)

    inner = [torch.linalg.qr(random(k, k))[0] for _ in range(layers - 2)]
    return unit_layers([random(n, k), *inner, random(k, m)])


def unit_layers(weights: Sequence[Tensor]) -> list[Tensor]:
    """Every kernel at unit length: rows of all layers but the last, whose columns are the inputs."""
    return [*(unit_rows(weight) for weight in weights[:-1]), unit_rows(weights[-1].mT).mT]


def depth_curves(n: int, m: int, k: int, depths: Sequence[int], scales: Sequence[float], seed: int = 0) -> list[Curve]:
    """κ over c for products of each depth: both ways of spreading, and the first with all layers renormalised.

    ValueError for a depth below 2 and for what `matrix_curves` refuses.
    """
    curves = []
    for layers in depths:
        if layers < 2:
            raise ValueError(f"depths must be at least 2, got {layers}.")
        require_sizes(n, m, k, scales, layers)
        curves += _curves_of(balanced_layers(n, m, k, layers, seed), scales)
    return curves


def _curves_of(weights: Sequence[Tensor], scales: Sequence[float]) -> list[Curve]:
    layers, shapes = len(weights), [weight.shape for weight in weights]
    f = _product(weights)

    def parted(point: Tensor) -> list[Tensor]:
        parts = torch.split(point, [shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def plain(point: Tensor) -> Tensor:
        return 0.5 * (f - _product(parted(point))).square().sum()

    def normalised(point: Tensor) -> Tensor:
        return 0.5 * (f - _product(unit_layers(parted(point)))).square().sum()

    def moved(way: str, c: float) -> Tensor:
        return _flat(_scaled(weights, way, c))

    def renormalised(c: float) -> Tensor:
        return _flat(unit_layers(_scaled(weights, LAST, c)))

    # SPEC's exponents are those of k < n; for k = n the first layer's kernels span everything and κ may stay bounded.
    grows = weights[0].shape[0] > weights[0].shape[1]
    exponents = {LAST: 2.0 * layers, ALTERNATING: 4.0}
    curves = [
        curve(
            way,
            plain,
            partial(moved, way),
            scales,
            layers=layers,
            paper=f"{layers}",
            expected=exponent if grows else None,
        )
        for way, exponent in exponents.items()
    ]
    return [*curves, curve(RENORMALISED, normalised, renormalised, scales, layers=layers, paper="0", expected=0.0)]


def _scaled(weights: Sequence[Tensor], way: str, c: float) -> list[Tensor]:
    return [scale * weight for scale, weight in zip(spread(way, len(weights), c), weights, strict=True)]


def _product(weights: Sequence[Tensor]) -> Tensor:
    return reduce(torch.mm, weights)


def _flat(weights: Sequence[Tensor]) -> Tensor:
    return torch.cat([weight.flatten() for weight in weights])
