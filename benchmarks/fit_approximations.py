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


def main() -> None:
    """Print the tables."""
    z = chebyshev_nodes(0.0, 0.25)
    t = np.sqrt(z)
    polynomial("asin(t) = t + t·z·Q(z), z = t² ≤ ¼", z, (np.arcsin(t) - t) / (t * z), 4, t * z / np.arcsin(t))
    z = chebyshev_nodes(0.0, (np.pi / 2) ** 2)
    h = np.sqrt(z)
    polynomial("sin(h) = h + h·z·S(z), z = h² ≤ (π/2)²", z, (np.sin(h) - h) / (h * z), 3, h * z / np.sin(h))


if __name__ == "__main__":
    main()
