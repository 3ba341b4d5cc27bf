"""The paper's two lemmas, with exact Hessians: how the scale of two factors conditions ½‖F − UVᵀ‖² (SPEC 1 (8)).

    G(U, V) = ½‖F − UVᵀ‖²        G_S(U, V) = ½‖F − D_U U Vᵀ D_V‖²,  D: one over the norms of the rows

At an optimum F = UVᵀ, the function does not notice a move to (cU, V/c); its Hessian does. With ν the eigenvalues of
UUᵀ and μ those of VVᵀ, zeros included, the eigenvalues of ∇²G there that are not zero are

    c²·ν_i + μ_j/c²,                 and k² zeros: one for every direction (UA, −VAᵀ) of the invertible k × k.

So the largest grows as c². The smallest falls as 1/c² when some ν is zero, that is for k < n: the exponent is 4, the
paper's Ω(c²) is a lower bound. For k = n the smallest grows as c² too, and κ stays bounded.

How conditioning worsens with depth: products of N matrices whose scales are spread in two ways (SPEC 2).

    G(W_1, …, W_N) = ½‖F − W_1·W_2·…·W_N‖²,   W_i → s_i·W_i with s_1·…·s_N = 1

The derivative by W_i is divided by s_i, so at the optimum the eigenvalues of the Hessian lie between min 1/s_i² and
max 1/s_i², times what they were. With N − 1 layers at c and the last at c^−(N−1) that is c⁻² and c^(2N−2): κ grows as
c^(2N). With c and 1/c in turn it is c⁻² and c²: κ grows as c⁴ whatever the depth. The paper's "c^N" is neither.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "ALTERNATING",
    "LAST",
    "RENORMALISED",
    "Curve",
    "balanced_layers",
    "condition_number",
    "curve",
    "depth_curves",
    "factors",
    "fitted_exponent",
    "hessian_eigenvalues",
    "matrix_curves",
    "normalised_objective",
    "numerical_rank",
    "objective",
    "require_sizes",
    "spread",
    "unit_layers",
    "unit_rows",
]

LARGEST_HESSIAN = 600
"""Rows of a Hessian that is computed whole: beyond, it takes minutes and says nothing new."""

FIT_FROM = 2.0
"""Exponents are fitted over c ≥ 2: below, the terms c²ν and μ/c² have not parted yet."""

RESOLVED = 100.0
"""How far above rounding an eigenvalue must stand to be believed."""


@dataclass(frozen=True)
class Curve:
    """The restricted condition number κ of one case over c, and the exponent fitted to it.

    kappa: None where float64 cannot resolve it. zero_eigenvalues: the same for every c. paper: what is printed there.
    expected: the exponent that SPEC 2 corrects it to; None where it names none.
    """

    case: str
    layers: int
    c: tuple[float, ...]
    kappa: tuple[float | None, ...]
    zero_eigenvalues: int
    exponent: float
    paper: str
    expected: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON takes."""
        return asdict(self)


def objective(f: Tensor, k: int) -> Callable[[Tensor], Tensor]:
    """G as a function of U and V, flattened and joined; f [n, m]."""
    return lambda point: 0.5 * (f - torch.mm(*_parted(point, f, k))).square().sum()


def normalised_objective(f: Tensor, k: int) -> Callable[[Tensor], Tensor]:
    """G_S as a function of raw U and V, flattened and joined; f [n, m]."""

    def loss(point: Tensor) -> Tensor:
        u, v_transposed = _parted(point, f, k)
        return 0.5 * (f - unit_rows(u) @ unit_rows(v_transposed.mT).mT).square().sum()

    return loss


def _parted(point: Tensor, f: Tensor, k: int) -> tuple[Tensor, Tensor]:
    n, m = f.shape
    return point[: n * k].view(n, k), point[n * k :].view(m, k).mT


def unit_rows(matrix: Tensor) -> Tensor:
    """The rows of a matrix [n, k] brought to unit length."""
    lengths: Tensor = torch.linalg.vector_norm(matrix, dim=1, keepdim=True)
    return matrix / lengths


def factors(n: int, m: int, k: int, seed: int) -> tuple[Tensor, Tensor]:
    """U [n, k] and V [m, k] with random rows of unit length, as the paper assumes them, in float64."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn(n, k, generator=generator, dtype=torch.float64)
    return unit_rows(u), unit_rows(torch.randn(m, k, generator=generator, dtype=torch.float64))


def hessian_eigenvalues(loss: Callable[[Tensor], Tensor], point: Tensor) -> Tensor:
    """All eigenvalues of the exact Hessian at a point [p], largest first; NaN where it overflows."""
    hessian: Tensor = torch.func.hessian(loss)(point)
    if not bool(hessian.isfinite().all()):
        return torch.full_like(point, math.nan)
    eigenvalues: Tensor = torch.linalg.eigvalsh((hessian + hessian.mT) / 2)
    return eigenvalues.flip(0)


def _rounding(eigenvalues: Tensor) -> float:
    """What LAPACK's eigenvalues of a p × p matrix are off by at worst, to a small factor: p·ε·λ_max."""
    return len(eigenvalues) * torch.finfo(eigenvalues.dtype).eps * float(eigenvalues[0])


def numerical_rank(eigenvalues: Tensor) -> int:
    """How many eigenvalues, largest first, are not zero.

    Zero is what rounding explains, p·ε·λ_max; the others must stand a hundredfold above it. ValueError for one that
    lies between, which cannot be told from zero, and for a matrix of zeros.
    """
    rounding = _rounding(eigenvalues)
    rank = int((eigenvalues.abs() > rounding).sum())
    if rank == 0 or eigenvalues[rank - 1] <= RESOLVED * rounding:
        raise ValueError("the Hessian has eigenvalues that cannot be told from zero in float64; try another seed.")
    return rank


def condition_number(eigenvalues: Tensor, rank: int) -> float | None:
    """κ = λ_max/λ_min over the `rank` largest eigenvalues; None where the smallest is lost in rounding."""
    smallest = float(eigenvalues[rank - 1])
    return float(eigenvalues[0]) / smallest if smallest > RESOLVED * _rounding(eigenvalues) else None


def curve(
    case: str,
    loss: Callable[[Tensor], Tensor],
    place: Callable[[float], Tensor],
    scales: Sequence[float],
    *,
    layers: int = 2,
    paper: str,
    expected: float | None,
) -> Curve:
    """κ of the Hessian of `loss` at `place(c)` for every c.

    The move by c is invertible and linear, T, and leaves the loss as it is, so the Hessian there is T⁻ᵀ∇²T⁻¹: by
    Sylvester's law of inertia it has as many zero eigenvalues as at c = 1. They are counted there, where none of the
    others is small, and never again.
    """
    balanced = hessian_eigenvalues(loss, place(1.0))
    rank = numerical_rank(balanced)
    kappa = tuple(condition_number(hessian_eigenvalues(loss, place(c)), rank) for c in scales)
    exponent = fitted_exponent(scales, kappa)
    return Curve(case, layers, tuple(scales), kappa, len(balanced) - rank, exponent, paper, expected)


def fitted_exponent(scales: Sequence[float], values: Sequence[float | None], fit_from: float = FIT_FROM) -> float:
    """The slope of log(value) over log c by least squares, over c ≥ fit_from; values of None are left out.

    ValueError unless two different c are left.
    """
    pairs = [(math.log(c), math.log(v)) for c, v in zip(scales, values, strict=True) if c >= fit_from and v is not None]
    if len({x for x, _ in pairs}) < 2:
        raise ValueError(
            f"c must have two different values of at least {fit_from:g} whose κ float64 resolves, to fit an exponent "
            f"to; got {', '.join(f'{c:g}' for c in scales)}."
        )
    mean_x, mean_y = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
    exponent: float = sum((x - mean_x) * (y - mean_y) for x, y in pairs) / sum((x - mean_x) ** 2 for x, _ in pairs)
    return exponent


def matrix_curves(n: int, m: int, k: int, scales: Sequence[float], seed: int = 0) -> list[Curve]:
    """The three cases of SPEC 2 at (cU, V/c): G, G_S of the raw factors, G_S with rows renormalised.

    n, m, k: U is [n, k], V is [m, k]. ValueError for k < 2 (rows of one number have no angle), k > min(n, m), c ≤ 0,
    or a Hessian of more than 600 rows.
    """
    require_sizes(n, m, k, scales)
    u, v = factors(n, m, k, seed)
    f = u @ v.mT
    raw = normalised_objective(f, k)

    def moved(c: float) -> Tensor:
        return torch.cat([(c * u).flatten(), (v / c).flatten()])

    def renormalised(c: float) -> Tensor:
        return torch.cat([unit_rows(c * u).flatten(), unit_rows(v / c).flatten()])

    return [
        curve("G", objective(f, k), moved, scales, paper="≥ 2", expected=4.0 if k < n else 0.0),
        curve("G_S, raw", raw, moved, scales, paper="0", expected=4.0),
        curve("G_S, renormalised", raw, renormalised, scales, paper="0", expected=0.0),
    ]


def require_sizes(n: int, m: int, k: int, scales: Sequence[float], layers: int = 2) -> None:
    """Refuse sizes and scales that no curve can be made of, in one sentence."""
    if not 2 <= k <= min(n, m):
        raise ValueError(f"k must be from 2 to min(n, m), which is {min(n, m)}, got {k}.")
    rows = (n + m) * k + (layers - 2) * k * k
    if rows > LARGEST_HESSIAN:
        raise ValueError(
            f"n, m and k must leave a Hessian of at most {LARGEST_HESSIAN} rows; {n}, {m} and {k} with {layers} layers "
            f"make {rows}."
        )
    for c in scales:
        if not (math.isfinite(c) and c > 0):
            raise ValueError(f"c must be finite and greater than 0, got {c:g}.")


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
