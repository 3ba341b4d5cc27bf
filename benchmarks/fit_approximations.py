"""Compute the coefficients of the approximations in `spherenet/kernels/csrc/functions.h`.

    python benchmarks/fit_approximations.py

Each function is fitted on Chebyshev nodes in float64 with Lawson's iteration: least squares with weights that grow
with the relative error, which converges to the minimax fit. The printed errors are those of the fit in float64;
`tests/kernels/test_sphere_conv.py` bounds the errors of outputs and gradients in float32.
"""

from __future__ import annotations

import math

import numpy as np

NODES = 4000


def chebyshev_nodes(low: float, high: float) -> np.ndarray:
    """Return points in (low, high) that are denser towards the ends."""
    angle = (np.arange(NODES) + 0.5) * np.pi / NODES
    return (low + high) / 2 - (high - low) / 2 * np.cos(angle)


def lawson(matrix: np.ndarray, target: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, float]:
    """Minimize max |matrix @ c − target| · scale over c."""
    weight = np.ones(len(target))
    best = (np.zeros(matrix.shape[1]), np.inf)
    for _ in range(300):
        root = np.sqrt(weight) * scale
        coefficients = np.linalg.lstsq(matrix * root[:, None], target * root, rcond=None)[0]
        error = np.abs(matrix @ coefficients - target) * scale
        if error.max() < best[1]:
            best = (coefficients, error.max())
        weight *= error / error.max() + 1e-12
        weight /= weight.sum()
    return best


def polynomial(name: str, x: np.ndarray, y: np.ndarray, degree: int, scale: np.ndarray) -> None:
    """Fit y by a polynomial in x of the given degree and print it, lowest power first."""
    coefficients, error = lawson(np.vander(x, degree + 1, increasing=True), y, scale)
    print(f"{name}: relative error {error:.1e}\n  {', '.join(f'{c:.10g}' for c in coefficients)}")


def rational(name: str, x: np.ndarray, y: np.ndarray, degrees: tuple[int, int], scale: np.ndarray) -> None:
    """Fit y by P(x)/Q(x), Q(0) = 1, and print both, lowest power first."""
    powers = [np.vander(x, degree + 1, increasing=True) for degree in degrees]
    matrix = np.hstack([powers[0], -y[:, None] * powers[1][:, 1:]])
    below, best = np.ones_like(x), (np.zeros(matrix.shape[1]), np.inf)
    for _ in range(12):  # the error is linear in the coefficients once the denominator is known
        coefficients, _ = lawson(matrix, y, scale / np.abs(below))
        above, rest = coefficients[: degrees[0] + 1], coefficients[degrees[0] + 1 :]
        below = 1 + powers[1][:, 1:] @ rest
        error = (np.abs(powers[0] @ above / below - y) * scale).max()
        if error < best[1]:
            best = (coefficients, error)
    split = np.split(best[0], [degrees[0] + 1])
    print(f"{name}: relative error {best[1]:.1e}")
    for label, values in zip("PQ", (split[0], [1.0, *split[1]]), strict=True):
        print(f"  {label}: {', '.join(f'{c:.9g}' for c in values)}")


def main() -> None:
    """Print the tables."""
    z = chebyshev_nodes(0.0, 0.25)
    t = np.sqrt(z)
    polynomial("asin(t) = t + t·z·Q(z), z = t² ≤ ¼", z, (np.arcsin(t) - t) / (t * z), 4, t * z / np.arcsin(t))
    z = chebyshev_nodes(0.0, (np.pi / 2) ** 2)
    h = np.sqrt(z)
    polynomial("sin(h) = h + h·z·S(z), z = h² ≤ (π/2)²", z, (np.sin(h) - h) / (h * z), 3, h * z / np.sin(h))
    z = chebyshev_nodes(0.0, 0.201**2)
    t = np.sqrt(z)
    polynomial("atanh(t) = t + t·z·A(z), z = t² ≤ 0.201²", z, (np.arctanh(t) - t) / (t * z), 2, t * z / np.arctanh(t))
    r = chebyshev_nodes(-np.log(2) / 2, np.log(2) / 2)
    polynomial("exp(r) = 1 + r + r²·E(r), |r| ≤ ln2/2", r, (np.exp(r) - 1 - r) / (r * r), 4, r * r / np.exp(r))
    z = chebyshev_nodes(0.0, 0.5)
    y = 2 * np.sqrt(z)
    # sinh y − y by its series, without cancellation.
    decline = sum(y ** (2 * n + 1) / math.factorial(2 * n + 1) for n in range(1, 15)) / np.sinh(y)
    polynomial("1 − 2v/sinh 2v = z·D(z), z = v² ≤ ½", z, decline / z, 5, z / decline)
    v = np.sort(np.concatenate([chebyshev_nodes(1e-3, 9.0), np.linspace(1e-3, 3, 2000)]))
    ratio = np.tanh(v) / v
    rational("tanh(v) = v·P(z)/Q(z), z = v² ≤ 81", v * v, ratio, (4, 4), 1 / ratio)


if __name__ == "__main__":
    main()
