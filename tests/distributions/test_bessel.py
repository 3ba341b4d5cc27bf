"""Bessel functions against mpmath with 50 digits."""

import functools

import mpmath
import pytest
import torch

from spherenet.distributions import bessel

DIMENSIONS = [2, 3, 4, 7, 32, 65, 66, 67, 129, 512, 2049, 4096]
CONCENTRATIONS = [1e-8, 1e-3, 0.5, 1.0, 10.0, 33.0, 200.0, 4096.0, 1e5, 1e6]
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-6}
FUNCTIONS = [
    bessel.log_generating_function,
    bessel.log_mode_ratio,
    bessel.resultant_deficit,
    bessel.resultant_length,
    bessel.resultant_slope,
]


@functools.cache
def generating_function(dimension, kappa):
    """Return E exp(κ μ·x) from its series, or from the Bessel function where the series is long."""
    with mpmath.workdps(50):
        order, x = mpmath.mpf(dimension) / 2 - 1, mpmath.mpf(kappa)
        if kappa < 300:
            return mpmath.hyp0f1(order + 1, x * x / 4)
        return mpmath.gamma(order + 1) * (2 / x) ** order * mpmath.besseli(order, x)


@functools.cache
def exact(dimension, kappa):
    """Return log M, κ − log M, 1 − A, A and A'."""
    with mpmath.workdps(50):
        x = mpmath.mpf(kappa)
        value = generating_function(dimension, kappa)
        length = generating_function(dimension + 2, kappa) / value * x / dimension
        slope = 1 - length**2 - (dimension - 1) * length / x
        return mpmath.log(value), x - mpmath.log(value), 1 - length, length, slope


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_relative_error_is_below_the_stated_bound(dimension, dtype):
    kappas = torch.tensor(CONCENTRATIONS, dtype=dtype)
    results = [function(dimension, kappas) for function in FUNCTIONS]
    assert {result.dtype for result in results} == {dtype}
    for index, kappa in enumerate(kappas.tolist()):
        for function, result, expected in zip(FUNCTIONS, results, exact(dimension, kappa), strict=True):
            error = abs(mpmath.mpf(result[index].item()) / expected - 1)
            assert error < BOUNDS[dtype], (function.__name__, kappa)


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_zero_is_exact(dimension):
    zero = torch.zeros((), dtype=torch.float64)
    results = [float(function(dimension, zero)) for function in FUNCTIONS]
    assert results == pytest.approx([0, 0, 1, 0, 1 / dimension], rel=1e-12)


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_values_far_beyond_the_range_are_finite(dimension):
    kappa = torch.tensor([1e12, 1e30], dtype=torch.float64)
    assert all(bool(function(dimension, kappa).isfinite().all()) for function in FUNCTIONS)
    assert float(bessel.resultant_deficit(dimension, kappa)[1]) == pytest.approx((dimension - 1) / 2e30)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("order", [0, 0.5, 1, 15.5, 31, 31.5, 32, 255, 2047])
def test_log_bessel_i(order, dtype):
    kappas = torch.tensor(CONCENTRATIONS, dtype=dtype)
    for kappa, result in zip(kappas.tolist(), bessel.log_bessel_i(order, kappas).tolist(), strict=True):
        with mpmath.workdps(50):
            x = mpmath.mpf(kappa)
            power, constant = order * mpmath.log(x / 2), mpmath.loggamma(order + 1)
            expected = mpmath.log(generating_function(round(2 * order) + 2, kappa)) + power - constant
            scale = max(abs(expected), abs(power), constant, 1)
        assert abs(result - expected) < BOUNDS[dtype] * scale, kappa


def test_log_bessel_i_at_zero_and_its_gradient():
    zero = torch.zeros((), dtype=torch.float64)
    assert float(bessel.log_bessel_i(0, zero)) == 0
    assert float(bessel.log_bessel_i(2, zero)) == float("-inf")
    x = torch.tensor([0.1, 2.0, 70.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: bessel.log_bessel_i(3.5, x), x)


@pytest.mark.parametrize("order", [-1, 0.25, float("inf"), float("nan")])
def test_other_orders_are_refused(order):
    with pytest.raises(ValueError, match=r"^order must be a multiple of 1/2 and not negative, got "):
        bessel.log_bessel_i(order, torch.ones(1))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dimension", [2, 5, 70, 300])
def test_derivatives(function, dimension):
    kappa = torch.tensor([0.0, 0.3, 4.0, 90.0], dtype=torch.float64, requires_grad=True)
    # Differences at 0 would need values of negative concentrations, which are defined by symmetry or continuation.
    inner = kappa[1:].detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: function(dimension, x), inner, eps=1e-5)
    assert torch.autograd.gradgradcheck(lambda x: function(dimension, x), inner, eps=1e-5)
    (gradient,) = torch.autograd.grad(function(dimension, kappa).sum(), kappa)
    assert bool(gradient.isfinite().all())
