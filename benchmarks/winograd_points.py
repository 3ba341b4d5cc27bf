"""Errors of Winograd's F(4×4, 3×3) with several interpolation points, in float32 against float64.

    python benchmarks/winograd_points.py

Random tiles and weights, summed over 64 channels, 16 filters and 64 tiles. Errors are relative to the largest value.
docs/performance.md has the table.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

POINTS = {
    "0, ±1, ±2, ∞": (1, 2),
    "0, ±1/2, ±1, ∞": (1 / 2, 1),
    "0, ±1/2, ±2, ∞": (1 / 2, 2),
    "0, ±1/2, ±3/2, ∞": (1 / 2, 3 / 2),
    "0, ±3/4, ±3/2, ∞": (3 / 4, 3 / 2),
    "0, ±5/8, ±3/2, ∞": (5 / 8, 3 / 2),
    "0, ±1/√2, ±√2, ∞": (0.5**0.5, 2**0.5),
    "0, ±3/5, ±5/3, ∞": (3 / 5, 5 / 3),
    "0, ±3/4, ±4/3, ∞": (3 / 4, 4 / 3),
    "0, ±2/3, ±3/2, ∞": (2 / 3, 3 / 2),
}
CHANNELS, FILTERS, TILES = 64, 16, 64

Array = NDArray[np.floating]


def matrices(a: float, b: float) -> tuple[Array, Array, Array]:
    """Return Aᵀ [4, 6], G [6, 3] and Bᵀ [6, 6] for the points 0, ±a, ±b and ∞."""
    points = [0, a, -a, b, -b]
    others = [[q for q in points if q != p] for p in points]
    output = np.array([[p**i for p in points] + [float(i == 3)] for i in range(4)])
    weight = [[p**i / np.prod([p - q for q in rest]) for i in range(3)] for p, rest in zip(points, others, strict=True)]
    inputs = [[*np.poly(rest)[::-1], 0] for rest in others] + [np.poly(points)[::-1]]
    return output, np.array([*weight, [0, 0, 1]]), np.array(inputs)


def apply(matrix: Array, values: Array) -> Array:
    """Return M·v·Mᵀ over the first two axes, one float32 operation after another."""
    for axis in (0, 1):
        moved = np.moveaxis(values, axis, 0)
        result = np.zeros((len(matrix), *moved.shape[1:]), np.float32)
        for row, coefficients in zip(result, matrix.astype(np.float32), strict=True):
            for coefficient, value in zip(coefficients, moved, strict=True):
                row += coefficient * value
        values = np.moveaxis(result, 0, axis)
    return values


def add_up(left: Array, right: Array, subscripts: str, steps: int, axes: tuple[int, int]) -> Array:
    """Return a sum of products over one axis of each factor, added up in float32 in its order."""
    total: Array = np.zeros((), np.float32)
    for step in range(steps):
        total = total + np.einsum(subscripts, left.take(step, axes[0]), right.take(step, axes[1]))
    return total


def error(result: Array, expected: Array) -> float:
    """Return the largest error relative to the largest value."""
    return float(np.abs(result - expected).max() / np.abs(expected).max())


def errors(a: float, b: float) -> tuple[float, float, float]:
    """Return the errors of the output, the gradient of the input and that of the weight."""
    random = np.random.default_rng(0)
    at, g, bt = matrices(a, b)
    x = random.standard_normal((6, 6, TILES, CHANNELS)).astype(np.float32)
    w = (random.standard_normal((3, 3, FILTERS, CHANNELS)) / np.sqrt(9 * CHANNELS)).astype(np.float32)
    d = random.standard_normal((4, 4, TILES, FILTERS)).astype(np.float32)
    expected = np.zeros((4, 4, TILES, FILTERS))
    of_x, of_w = np.zeros(x.shape), np.zeros(w.shape)
    for i in range(3):
        for j in range(3):
            seen = x[i : i + 4, j : j + 4].astype(float)
            expected += seen @ w[i, j].astype(float).T
            of_x[i : i + 4, j : j + 4] += d.astype(float) @ w[i, j].astype(float)
            of_w[i, j] = np.einsum("ijtk,ijtc->kc", d.astype(float), seen)
    u = np.einsum("ai,ijkc,bj->abkc", g, w.astype(float), g).astype(np.float32)
    v, p = apply(bt, x), apply(at.T, d)
    out = apply(at, add_up(v, u, "abt,abk->abtk", CHANNELS, (3, 3)))
    grad_x = apply(bt.T, add_up(p, u, "abt,abc->abtc", FILTERS, (3, 2)))
    grad_u = add_up(p, v, "abk,abc->abkc", TILES, (2, 2))
    grad_w = np.einsum("ai,abkc,bj->ijkc", g, grad_u, g)
    return error(out, expected), error(grad_x, of_x), error(grad_w, of_w)


if __name__ == "__main__":
    print("| points | output | gradient of the input | gradient of the weight |\n|---|---|---|---|")
    for name, (a, b) in POINTS.items():
        print(f"| {name} | " + " | ".join(f"{value:.1e}" for value in errors(a, b)) + " |")
