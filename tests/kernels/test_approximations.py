"""The error bounds that `kernels/approximations.py` states, over the whole range of each argument, in float32."""

import math

import torch

from spherenet.kernels import approximations

EVERYWHERE = torch.cat([torch.zeros(1), 10.0 ** torch.linspace(-30, -2, 2001), torch.linspace(0.01, 1, 1_000_001)])


def test_asin():
    x = EVERYWHERE
    expected = x.double().asin()
    assert ((approximations.asin(x).double() - expected).abs() <= 3e-7 * expected).all()
    assert approximations.asin(torch.ones(1)).item() == torch.tensor(math.pi / 2).item()


def test_sin():
    h = EVERYWHERE * (math.pi / 2)
    expected = h.double().sin()
    error = (approximations.sin(h).double() - expected).abs()
    assert (error <= 2e-7 * expected).all()


def test_tanh():
    v = EVERYWHERE * 12
    assert (approximations.tanh(v).double() - v.double().tanh()).abs().max() < 2e-7
    assert approximations.tanh(torch.tensor([0.0, 100.0, 1e30, torch.inf])).tolist() == [0, 1, 1, 1]
