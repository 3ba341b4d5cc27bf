"""Find the polynomial coefficients in `spherenet/kernels/approximations.py`.

    python benchmarks/fit_approximations.py

Each function is fitted on Chebyshev nodes in float64 by Lawson's iteration: least squares whose weights grow where
the relative error is large, which tends to the minimax fit. The printed errors are those of the fit itself; rounding
in float32 adds to them, and `tests/kernels/test_approximations.py` bounds the sum.
"""

from __future__ import annotations

import numpy as np

NODES = 4000


def chebyshev_nodes(low: float, high: float) -> np.ndarray:
    """Return points in (low, high) that crowd towards the ends."""
    angle = (np.arange(NODES) + 0.5) * np.pi / NODES
    return (low + high) / 2 - (high - low) / 2 * np.cos(angle)


def lawson(matrix: np.ndarray, target: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, float]:
    """Minimise max |matrix @ c − target| · scale over c."""
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


def tanh_rational(limit: float, above: int, below: int) -> None:
    """Fit tanh(v)/v = N(v²)/M(v²), M(0) = 1, by linearising N − y·(M − 1) = y with the last M as weight."""
    v = chebyshev_nodes(1e-3, limit)
    z, y = v * v, np.tanh(v) / v
    unit = z / limit**2  # columns of like size
    matrix = np.hstack(
        [np.vander(unit, above + 1, increasing=True), -y[:, None] * np.vander(unit, below + 1, increasing=True)[:, 1:]]
    )
    denominator = np.ones_like(y)
    for _ in range(30):
        coefficients, _ = lawson(matrix, y, 1 / (y * denominator))
        bottom = np.concatenate([[1], coefficients[above + 1 :]])
        denominator = np.vander(unit, below + 1, increasing=True) @ bottom
    top = coefficients[: above + 1]
    error = np.abs(np.vander(unit, above + 1, increasing=True) @ top / denominator / y - 1).max()
    powers = limit ** (-2.0 * np.arange(max(above, below) + 1))
    print(f"tanh on [0, {limit}]: relative error {error:.1e}")
    print("  N", ", ".join(f"{c:.10g}" for c in top * powers[: above + 1]))
    print("  M", ", ".join(f"{c:.10g}" for c in bottom * powers[: below + 1]))


def main() -> None:
    """Print every table."""
    z = chebyshev_nodes(0.0, 0.25)
    t = np.sqrt(z)
    polynomial("asin(t) = t + t·z·Q(z), z = t² ≤ ¼", z, (np.arcsin(t) - t) / (t * z), 4, t * z / np.arcsin(t))
    z = chebyshev_nodes(0.0, (np.pi / 2) ** 2)
    h = np.sqrt(z)
    polynomial("sin(h) = h + h·z·S(z), z = h² ≤ (π/2)²", z, (np.sin(h) - h) / (h * z), 3, h * z / np.sin(h))
    tanh_rational(9.0, 6, 3)


if __name__ == "__main__":
    main()
