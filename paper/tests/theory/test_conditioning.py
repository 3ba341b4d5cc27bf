"""Hessians of matrix factorizations: comparison with oracles, zero eigenvalues and fitted exponents."""

import math

import pytest
import torch

from spherenet_paper.theory.conditioning import (
    condition_number,
    factors,
    fitted_exponent,
    hessian_eigenvalues,
    matrix_curves,
    normalized_objective,
    numerical_rank,
    objective,
    unit_rows,
)

SCALES = (1, 2, 4, 8, 16)
TALL = [(5, 4, 3), (6, 5, 2), (8, 6, 4), (4, 3, 3), (10, 8, 3)]  # k < n
SQUARE = [(3, 4, 3), (3, 6, 3), (4, 4, 4)]  # k = n
each_size = pytest.mark.parametrize("sizes", TALL + SQUARE, ids=str)


def at(u, v, c=1.0):
    return torch.cat([(c * u).flatten(), (v / c).flatten()])


def finite_difference_hessian(loss, point, step=1e-5):
    """Compute the Hessian by central differences of the gradient."""
    columns = []
    for index in range(len(point)):
        move = torch.zeros_like(point)
        move[index] = step
        columns.append((torch.func.grad(loss)(point + move) - torch.func.grad(loss)(point - move)) / (2 * step))
    return torch.stack(columns, 1)


@pytest.mark.parametrize("make", [objective, normalized_objective])
@pytest.mark.parametrize("at_optimum", [True, False])
def test_hessians_match_finite_differences(make, at_optimum):
    u, v = factors(4, 3, 2, seed=0)
    target = u @ v.mT if at_optimum else torch.randn(4, 3, dtype=torch.float64)
    loss, point = make(target, 2), at(u, v, 1.7)
    torch.testing.assert_close(
        torch.func.hessian(loss)(point), finite_difference_hessian(loss, point), rtol=1e-6, atol=1e-8
    )


@each_size
@pytest.mark.parametrize("c", [1.0, 3.0, 0.5])
def test_eigenvalues_of_g_are_sums_of_the_factors_eigenvalues(sizes, c):
    n, m, k = sizes
    u, v = factors(n, m, k, seed=1)
    eigenvalues = hessian_eigenvalues(objective(u @ v.mT, k), at(u, v, c))
    nu, mu = torch.linalg.eigvalsh(u @ u.mT), torch.linalg.eigvalsh(v @ v.mT)
    sums = (c**2 * nu[:, None] + mu / c**2).flatten().sort(descending=True).values
    rank = (n + m) * k - k * k
    torch.testing.assert_close(eigenvalues[:rank], sums[:rank], rtol=1e-9, atol=1e-12)
    assert eigenvalues[rank:].abs().max() < 1e-12 * eigenvalues[0]


@each_size
def test_g_has_k_squared_zero_eigenvalues(sizes):
    n, m, k = sizes
    assert matrix_curves(n, m, k, SCALES)[0].zero_eigenvalues == k * k
    assert k * k != k * (k - 1) // 2  # the paper's number


@each_size
@pytest.mark.parametrize("seed", [0, 1])
def test_numerical_rank_matches_the_rank_of_the_jacobian(sizes, seed):
    n, m, k = sizes
    u, v = factors(n, m, k, seed)

    def residual(point):
        return unit_rows(point[: n * k].view(n, k)) @ unit_rows(point[n * k :].view(m, k)).mT

    jacobian = torch.func.jacrev(residual)(at(u, v)).flatten(0, 1)
    eigenvalues = hessian_eigenvalues(normalized_objective(u @ v.mT, k), at(u, v))
    assert numerical_rank(eigenvalues) == torch.linalg.matrix_rank(jacobian)
    flat = n + m + k * (k - 1) // 2  # lengths of rows, and rotations
    assert len(eigenvalues) - numerical_rank(eigenvalues) == max(flat, len(eigenvalues) - n * m)


def test_raw_hessian_at_a_rescaled_point_is_the_balanced_one_times_inverse_scales():
    n, m, k, c = 5, 4, 3, 3.0
    u, v = factors(n, m, k, seed=0)
    hessian = torch.func.hessian(normalized_objective(u @ v.mT, k))
    inverse = torch.tensor([1 / c] * (n * k) + [c] * (m * k), dtype=torch.float64)
    expected = inverse[:, None] * hessian(at(u, v)) * inverse
    torch.testing.assert_close(hessian(at(u, v, c)), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("sizes", TALL, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_exponents_for_k_below_n(sizes, seed):
    plain, raw, renormalized = matrix_curves(*sizes, SCALES, seed)
    assert plain.exponent == pytest.approx(4, abs=0.1)
    assert raw.exponent == pytest.approx(4, abs=0.15)
    assert renormalized.exponent == pytest.approx(0, abs=1e-6)
    assert plain.kappa[-1] > 16**2 * plain.kappa[0]  # the bound of the lemma holds but is loose
    assert [curve.expected for curve in (plain, raw, renormalized)] == [4, 4, 0]


@pytest.mark.parametrize("sizes", SQUARE, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_kappa_of_g_stays_bounded_for_k_equal_to_n(sizes, seed):
    plain, raw, renormalized = matrix_curves(*sizes, SCALES, seed)
    assert abs(plain.exponent) < 0.3
    assert plain.expected == 0
    # The limit is κ(UUᵀ) for every c, so κ is not Ω(c²).
    eigenvalues = torch.linalg.eigvalsh(factors(*sizes, seed)[0] @ factors(*sizes, seed)[0].mT)
    far = matrix_curves(*sizes, (2, 64), seed)[0].kappa[1]
    assert far == pytest.approx((eigenvalues[-1] / eigenvalues[0]).item(), rel=1e-2)
    assert raw.exponent > 3
    assert renormalized.exponent == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_kappa_decreases_in_the_counterexample(seed):
    kappa = matrix_curves(3, 4, 3, SCALES, seed)[0].kappa
    assert kappa[0] > kappa[1] > kappa[2] > kappa[3] > kappa[4]


@each_size
def test_renormalized_spectrum_is_constant(sizes):
    n, m, k = sizes
    u, v = factors(n, m, k, seed=0)
    loss = normalized_objective(u @ v.mT, k)
    balanced = hessian_eigenvalues(loss, at(u, v))
    for c in (0.1, 2.0, 100.0):
        moved = hessian_eigenvalues(loss, at(unit_rows(c * u), unit_rows(v / c)))
        torch.testing.assert_close(moved, balanced, rtol=1e-6, atol=1e-6 * float(balanced[0]))
    curve = matrix_curves(n, m, k, SCALES)[2]
    assert max(curve.kappa) == pytest.approx(min(curve.kappa), rel=1e-6)


def test_eigenvalues_near_rounding_are_rejected():
    clear = torch.tensor([1.0, 1e-6, 1e-17, -1e-17], dtype=torch.float64)
    assert numerical_rank(clear) == 2
    assert condition_number(clear, 2) == pytest.approx(1e6)
    between = torch.tensor([1.0, 3e-15, 1e-17], dtype=torch.float64)
    with pytest.raises(ValueError, match="cannot be distinguished from zero"):
        numerical_rank(between)
    assert condition_number(between, 2) is None
    with pytest.raises(ValueError, match="cannot be distinguished from zero"):
        numerical_rank(torch.zeros(3, dtype=torch.float64))


def test_unresolved_kappa_is_none_and_ignored_by_the_fit():
    plain, _, _ = matrix_curves(5, 4, 3, [1, 2, 4, 8, 1e4, 1e120])
    assert plain.kappa[-2:] == (None, None)
    assert plain.exponent == pytest.approx(4, abs=0.1)


def test_fitted_exponent_is_the_log_log_slope_for_c_of_at_least_two():
    scales = [1, 2, 4, 8]
    assert fitted_exponent(scales, [1e9, 3 * 2**5, 3 * 4**5, 3 * 8**5]) == pytest.approx(5)
    assert fitted_exponent(scales, [1, 4, None, 64]) == pytest.approx(2)
    assert fitted_exponent(scales, [1, 9, 16, 64], fit_from=4) == pytest.approx(2)
    with pytest.raises(ValueError, match="two different values of at least 2"):
        fitted_exponent([1, 2, 2], [1, 2, 2])


@pytest.mark.parametrize(
    ("sizes", "scales", "message"),
    [
        ((2, 4, 3), SCALES, r"k must be from 2 to min\(n, m\), which is 2, got 3"),
        ((5, 4, 1), SCALES, "k must be from 2"),
        ((200, 200, 3), SCALES, "at most 600 rows"),
        ((5, 4, 3), (2, 0), "c must be finite and greater than 0, got 0"),
        ((5, 4, 3), (2, -4), "got -4"),
        ((5, 4, 3), (2, math.nan), "got nan"),
        ((5, 4, 3), (1, 4), "two different values"),
    ],
)
def test_invalid_sizes_and_scales_raise_value_error(sizes, scales, message):
    with pytest.raises(ValueError, match=message):
        matrix_curves(*sizes, scales)
