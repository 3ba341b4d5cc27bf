"""The error bounds that `kernels/approximations.py` states, over the whole range of each argument, in float32."""

import math

import pytest
import torch

from spherenet.kernels import approximations

EVERYWHERE = torch.cat([10.0 ** torch.linspace(-30, -2, 2001), torch.linspace(0.01, 1, 1_000_001)])


def relative_error(got, expected):
    return ((got.double() - expected) / expected).abs().max().item()


@pytest.mark.parametrize("sign", [1, -1])
def test_asin(sign):
    x = sign * EVERYWHERE
    assert relative_error(approximations.asin(x), x.double().asin()) < 3e-7
    # The same digits again where asin is near π/2: what matters there is the angle, π/2 − asin.
    assert (approximations.asin(x).double() - x.double().asin()).abs().max() < 2.5e-7


@pytest.mark.parametrize("sign", [1, -1])
def test_sin_of_acute(sign):
    h = sign * EVERYWHERE * (math.pi / 2)
    assert relative_error(approximations.sin_of_acute(h), h.double().sin()) < 2e-7


@pytest.mark.parametrize("sign", [1, -1])
def test_tanh(sign):
    v = sign * EVERYWHERE * 12
    assert relative_error(approximations.tanh(v), v.double().tanh()) < 5e-7
    assert approximations.tanh(torch.tensor([1e30, torch.inf])).sub(1).abs().max() < 5e-7


def test_zero_is_exact():
    zero = torch.zeros(1)
    for function in (approximations.asin, approximations.sin_of_acute, approximations.tanh):
        assert function(zero).item() == 0
