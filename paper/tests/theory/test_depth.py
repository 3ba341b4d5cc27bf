"""Products of N matrices: the exponents depend on the distribution of the scales."""

import math

import pytest
import torch

from spherenet_paper.theory.conditioning import (
    ALTERNATING,
    LAST,
    RENORMALIZED,
    balanced_layers,
    depth_curves,
    fitted_exponent,
    matrix_curves,
    spread,
)

SCALES = (1, 2, 4, 8, 16, 32)


@pytest.mark.parametrize("distribution", [LAST, ALTERNATING])
@pytest.mark.parametrize("layers", [2, 3, 4, 5, 6])
def test_scales_multiply_to_one(distribution, layers):
    scales = spread(distribution, layers, 3.0)
    assert len(scales) == layers
    assert math.prod(scales) == pytest.approx(1)


@pytest.mark.parametrize("sizes", [(5, 4, 3), (6, 5, 2)], ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_exponents_for_several_depths(sizes, seed):
    curves = {(curve.layers, curve.case): curve for curve in depth_curves(*sizes, [2, 3, 4, 5], SCALES, seed)}
    assert len(curves) == 12
    for layers in (2, 3, 4, 5):
        assert curves[layers, LAST].exponent == pytest.approx(2 * layers, abs=0.15)
        alternating = curves[layers, ALTERNATING]
        assert alternating.exponent == pytest.approx(4, abs=0.25)  # an odd number of layers delays the growth
        assert fitted_exponent(alternating.c, alternating.kappa, fit_from=8) == pytest.approx(4, abs=0.1)
        assert curves[layers, RENORMALIZED].exponent == pytest.approx(0, abs=1e-6)
        assert curves[layers, LAST].expected == 2 * layers
        assert curves[layers, LAST].zero_eigenvalues == (layers - 1) * sizes[2] ** 2
    assert curves[5, LAST].exponent > 5.5  # larger than the paper's c^N


def test_two_layers_match_the_matrix_curves():
    last, alternating, renormalized = depth_curves(5, 4, 3, [2], SCALES)
    assert last.kappa == pytest.approx(alternating.kappa)
    matrices = matrix_curves(5, 4, 3, SCALES)
    assert [last.zero_eigenvalues, renormalized.zero_eigenvalues] == [
        matrices[0].zero_eigenvalues,
        matrices[2].zero_eigenvalues,
    ]


def test_no_exponent_is_expected_for_k_equal_to_n():
    assert [curve.expected for curve in depth_curves(3, 4, 3, [3], SCALES)] == [None, None, 0]


def test_balanced_layers_have_unit_or_orthogonal_kernels():
    first, inner, last = balanced_layers(5, 4, 3, 3, seed=0)
    torch.testing.assert_close(first.norm(dim=1), torch.ones(5).double())
    torch.testing.assert_close(inner @ inner.mT, torch.eye(3).double())
    torch.testing.assert_close(last.norm(dim=0), torch.ones(4).double())


@pytest.mark.parametrize(
    ("depths", "message"), [([1], "depths must be at least 2, got 1"), ([2, 90], "at most 600 rows")]
)
def test_invalid_depths_raise_value_error(depths, message):
    with pytest.raises(ValueError, match=message):
        depth_curves(5, 4, 3, depths, SCALES)
