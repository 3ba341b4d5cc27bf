"""Condition numbers of matrix factorizations under rescaling, from exact Hessians (Eq. 12 of docs/concepts.md).

    G(U, V) = ½‖F − UVᵀ‖²        G_S(U, V) = ½‖F − D_U U Vᵀ D_V‖²,  D: inverse norms of the rows

At an optimum F = UVᵀ, moving to (cU, V/c) does not change the function, but it changes the Hessian. Let ν be the
eigenvalues of UUᵀ and μ those of VVᵀ, zeros included. The non-zero eigenvalues of ∇²G are

    c²·ν_i + μ_j/c²,                 and there are k² zeros: one per direction (UA, −VAᵀ) with A of size k × k.

The largest grows as c². The smallest falls as 1/c² when some ν is zero, i.e. for k < n: the exponent is 4, and the
paper's Ω(c²) is a lower bound. For k = n the smallest grows as c² too, and κ stays bounded.

For a product of N matrices, G(W_1, …, W_N) = ½‖F − W_1·W_2·…·W_N‖² and W_i → s_i·W_i with s_1·…·s_N = 1. The derivative
with respect to W_i is divided by s_i, so at the optimum the eigenvalues of the Hessian change by factors between
min 1/s_i² and max 1/s_i². With N − 1 layers scaled by c and the last by c^−(N−1) these are c⁻² and c^(2N−2): κ grows as
c^(2N). With c and 1/c alternating they are c⁻² and c²: κ grows as c⁴ at any depth. The paper's "c^N" is neither.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from spherenet.errors import InvalidArgument

__all__ = [
    "ALTERNATING",
    "LAST",
    "RENORMALIZED",
    "Curve",
    "balanced_layers",
    "condition_number",
    "curve",
    "depth_curves",
    "exponent_text",
    "factors",
    "fitted_exponent",
    "hessian_eigenvalues",
    "matrix_curves",
    "normalized_objective",
    "numerical_rank",
    "objective",
    "require_sizes",
    "spread",
    "unit_layers",
    "unit_rows",
]

LARGEST_HESSIAN = 600
"""Largest number of rows of an exact Hessian; a larger one takes minutes."""

FIT_FROM = 2.0
"""Exponents are fitted over c ≥ 2; below, the terms c²ν and μ/c² are of similar size."""

RESOLVED = 100.0
"""Smallest ratio of a resolved eigenvalue to the rounding error."""


@dataclass(frozen=True)
class Curve:
    """The restricted condition number κ of one case over c, and the fitted exponent.

    Attributes:
        case: Name of the case.
        layers: Number of matrices.
        c: Scales.
        kappa: κ at each scale, or None if float64 cannot resolve it.
        zero_eigenvalues: Number of zero eigenvalues, the same for every c.
        exponent: Slope of log κ over log c.
        paper: The paper's exponent.
        expected: The correct exponent, or None if none is derived.
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
        """Return the curve for JSON."""
        return asdict(self)


def objective(f: Tensor, k: int) -> Callable[[Tensor], Tensor]:
    """Return G as a function of U and V, flattened and concatenated; f [n, m]."""
    return lambda point: 0.5 * (f - torch.mm(*_split(point, f, k))).square().sum()


def normalized_objective(f: Tensor, k: int) -> Callable[[Tensor], Tensor]:
    """Return G_S as a function of raw U and V, flattened and concatenated; f [n, m]."""

    def loss(point: Tensor) -> Tensor:
        u, v_transposed = _split(point, f, k)
        return 0.5 * (f - unit_rows(u) @ unit_rows(v_transposed.mT).mT).square().sum()

    return loss


def _split(point: Tensor, f: Tensor, k: int) -> tuple[Tensor, Tensor]:
    n, m = f.shape
    return point[: n * k].view(n, k), point[n * k :].view(m, k).mT


def unit_rows(matrix: Tensor) -> Tensor:
    """Return a matrix [n, k] with rows scaled to unit length."""
    lengths: Tensor = torch.linalg.vector_norm(matrix, dim=1, keepdim=True)
    return matrix / lengths


def factors(n: int, m: int, k: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return U [n, k] and V [m, k] with random rows of unit length, as the paper assumes, in float64."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn(n, k, generator=generator, dtype=torch.float64)
    return unit_rows(u), unit_rows(torch.randn(m, k, generator=generator, dtype=torch.float64))


def hessian_eigenvalues(loss: Callable[[Tensor], Tensor], point: Tensor) -> Tensor:
    """Return all eigenvalues of the exact Hessian at a point [p], largest first; NaN if it overflows."""
    hessian: Tensor = torch.func.hessian(loss)(point)
    if not bool(hessian.isfinite().all()):
        return torch.full_like(point, math.nan)
    eigenvalues: Tensor = torch.linalg.eigvalsh((hessian + hessian.mT) / 2)
    return eigenvalues.flip(0)


def _rounding(eigenvalues: Tensor) -> float:
    """Return the error bound p·ε·λ_max of LAPACK's eigenvalues of a p × p matrix, up to a small factor."""
    return len(eigenvalues) * torch.finfo(eigenvalues.dtype).eps * float(eigenvalues[0])


def numerical_rank(eigenvalues: Tensor) -> int:
    """Return the number of non-zero eigenvalues, given largest first.

    An eigenvalue within the rounding error p·ε·λ_max counts as zero; the others must exceed it a hundredfold.

    Raises:
        ValueError: An eigenvalue lies in between, so that it cannot be distinguished from zero, or all are zero.
    """
    rounding = _rounding(eigenvalues)
    rank = int((eigenvalues.abs() > rounding).sum())
    if rank == 0 or eigenvalues[rank - 1] <= RESOLVED * rounding:
        raise InvalidArgument(
            "the Hessian", "has eigenvalues that cannot be distinguished from zero in float64; try another seed."
        )
    return rank


def condition_number(eigenvalues: Tensor, rank: int) -> float | None:
    """Return κ = λ_max/λ_min over the `rank` largest eigenvalues, or None if rounding hides the smallest."""
    smallest = float(eigenvalues[rank - 1])
    return float(eigenvalues[0]) / smallest if smallest > RESOLVED * _rounding(eigenvalues) else None


def curve(
    case: str,
    loss: Callable[[Tensor], Tensor],
    point_at: Callable[[float], Tensor],
    scales: Sequence[float],
    *,
    layers: int = 2,
    paper: str,
    expected: float | None,
) -> Curve:
    """Compute κ of the Hessian of `loss` at `point_at(c)` for every c.

    The move by c is an invertible linear map T that does not change the loss, so the Hessian there is T⁻ᵀ∇²T⁻¹. By
    Sylvester's law of inertia it has as many zero eigenvalues as at c = 1. They are counted at c = 1, where no other
    eigenvalue is small.
    """
    balanced = hessian_eigenvalues(loss, point_at(1.0))
    rank = numerical_rank(balanced)
    kappa = tuple(condition_number(hessian_eigenvalues(loss, point_at(c)), rank) for c in scales)
    exponent = fitted_exponent(scales, kappa)
    return Curve(case, layers, tuple(scales), kappa, len(balanced) - rank, exponent, paper, expected)


def fitted_exponent(scales: Sequence[float], values: Sequence[float | None], fit_from: float = FIT_FROM) -> float:
    """Return the least-squares slope of log(value) over log c for c ≥ fit_from, ignoring values of None.

    Raises:
        ValueError: Fewer than two different c remain.
    """
    pairs = [(math.log(c), math.log(v)) for c, v in zip(scales, values, strict=True) if c >= fit_from and v is not None]
    if len({x for x, _ in pairs}) < 2:
        raise InvalidArgument(
            "c",
            f"must have two different values of at least {fit_from:g} whose κ float64 resolves, to fit an "
            f"exponent, got {', '.join(f'{c:g}' for c in scales)}.",
        )
    mean_x, mean_y = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
    exponent: float = sum((x - mean_x) * (y - mean_y) for x, y in pairs) / sum((x - mean_x) ** 2 for x, _ in pairs)
    return exponent


def exponent_text(exponent: float) -> str:
    """Return an exponent with two digits, without a negative zero."""
    return f"{exponent:.2f}" if abs(exponent) >= 0.005 else "0.00"


def matrix_curves(n: int, m: int, k: int, scales: Sequence[float], seed: int = 0) -> list[Curve]:
    """Compute κ at (cU, V/c) for three cases: G, G_S of the raw factors, and G_S with rows renormalized.

    Args:
        n: Rows of U.
        m: Rows of V.
        k: Columns of both.
        scales: Values of c.
        seed: Seed of the matrices.

    Raises:
        ValueError: k < 2 (rows of length one have no angle), k > min(n, m), c ≤ 0, or a Hessian of more than 600 rows.
    """
    require_sizes(n, m, k, scales)
    u, v = factors(n, m, k, seed)
    f = u @ v.mT
    raw = normalized_objective(f, k)

    def moved(c: float) -> Tensor:
        return torch.cat([(c * u).flatten(), (v / c).flatten()])

    def renormalized(c: float) -> Tensor:
        return torch.cat([unit_rows(c * u).flatten(), unit_rows(v / c).flatten()])

    return [
        curve("G", objective(f, k), moved, scales, paper="≥ 2", expected=4.0 if k < n else 0.0),
        curve("G_S, raw", raw, moved, scales, paper="0", expected=4.0),
        curve("G_S, renormalized", raw, renormalized, scales, paper="0", expected=0.0),
    ]


def require_sizes(n: int, m: int, k: int, scales: Sequence[float], layers: int = 2) -> None:
    """Raise ValueError for sizes and scales that `curve` does not support."""
    if not 2 <= k <= min(n, m):
        raise InvalidArgument("k", f"must be from 2 to min(n, m), which is {min(n, m)}, got {k}.")
    rows = (n + m) * k + (layers - 2) * k * k
    if rows > LARGEST_HESSIAN:
        raise InvalidArgument(
            "n, m and k",
            f"must give a Hessian of at most {LARGEST_HESSIAN} rows, got {n}, {m} and {k} with {layers} "
            f"layers ({rows} rows).",
        )
    for c in scales:
        if not (math.isfinite(c) and c > 0):
            raise InvalidArgument("c", f"must be finite and greater than 0, got {c:g}.")


LAST = "last c^−(N−1)"
ALTERNATING = "c, 1/c, c, …"
RENORMALIZED = "renormalized"


def spread(distribution: str, layers: int, c: float) -> list[float]:
    """Return one factor per layer with product 1 for `LAST` or `ALTERNATING` (an odd last layer keeps 1)."""
    if distribution == LAST:
        return [c] * (layers - 1) + [c ** -(layers - 1)]
    pairs = [c, 1 / c] * (layers // 2)
    return pairs + [1.0] * (layers % 2)


def balanced_layers(n: int, m: int, k: int, layers: int, seed: int) -> list[Tensor]:
    """Return W_1 [n, k] with unit rows, orthogonal [k, k] layers, and W_N [k, m] with unit columns, in float64.

    Orthogonal layers do not change κ, so that only the scales matter.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator, dtype=torch.float64)

    inner = [torch.linalg.qr(random(k, k))[0] for _ in range(layers - 2)]
    return unit_layers([random(n, k), *inner, random(k, m)])


def unit_layers(weights: Sequence[Tensor]) -> list[Tensor]:
    """Scale every kernel to unit length: the rows of all layers but the last, and the columns of the last."""
    return [*(unit_rows(weight) for weight in weights[:-1]), unit_rows(weights[-1].mT).mT]


def depth_curves(n: int, m: int, k: int, depths: Sequence[int], scales: Sequence[float], seed: int = 0) -> list[Curve]:
    """Compute κ over c for products of each depth: both distributions of scales, and the first one renormalized.

    Raises:
        ValueError: A depth is below 2, or an argument is not supported by `matrix_curves`.
    """
    curves = []
    for layers in depths:
        if layers < 2:
            raise InvalidArgument("depths", f"must be at least 2, got {layers}.")
        require_sizes(n, m, k, scales, layers)
        curves += _curves_of(balanced_layers(n, m, k, layers, seed), scales)
    return curves


def _curves_of(weights: Sequence[Tensor], scales: Sequence[float]) -> list[Curve]:
    layers, shapes = len(weights), [weight.shape for weight in weights]
    f = _product(weights)

    def layers_of(point: Tensor) -> list[Tensor]:
        segments = torch.split(point, [shape.numel() for shape in shapes])
        return [segment.view(shape) for segment, shape in zip(segments, shapes, strict=True)]

    def plain(point: Tensor) -> Tensor:
        return 0.5 * (f - _product(layers_of(point))).square().sum()

    def normalized(point: Tensor) -> Tensor:
        return 0.5 * (f - _product(unit_layers(layers_of(point)))).square().sum()

    def moved(distribution: str, c: float) -> Tensor:
        return _flat(_scaled(weights, distribution, c))

    def renormalized(c: float) -> Tensor:
        return _flat(unit_layers(_scaled(weights, LAST, c)))

    # The exponents hold for k < n; for k = n the kernels of the first layer span the space and κ may stay bounded.
    grows = weights[0].shape[0] > weights[0].shape[1]
    exponents = {LAST: 2.0 * layers, ALTERNATING: 4.0}
    curves = [
        curve(
            distribution,
            plain,
            partial(moved, distribution),
            scales,
            layers=layers,
            paper=f"{layers}",
            expected=exponent if grows else None,
        )
        for distribution, exponent in exponents.items()
    ]
    return [*curves, curve(RENORMALIZED, normalized, renormalized, scales, layers=layers, paper="0", expected=0.0)]


def _scaled(weights: Sequence[Tensor], distribution: str, c: float) -> list[Tensor]:
    return [scale * weight for scale, weight in zip(spread(distribution, len(weights), c), weights, strict=True)]


def _product(weights: Sequence[Tensor]) -> Tensor:
    return reduce(torch.mm, weights)


def _flat(weights: Sequence[Tensor]) -> Tensor:
    return torch.cat([weight.flatten() for weight in weights])
