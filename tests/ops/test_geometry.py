"""Convolutions that torch computes wrongly are computed another way."""

import itertools

import pytest
import torch
from torch.nn import functional as F

import spherenet as sn
from spherenet.ops.geometry import Geometry, convolve


def channels_last(x):
    """Return x with the strides of channels-last, which torch's own conversion leaves out for one channel."""
    _, c, h, w = x.shape
    return torch.empty_strided(x.shape, (c * h * w, 1, w * c, c), dtype=x.dtype).copy_(x)


@pytest.mark.parametrize("stride", [(1, 2), (1, 3), (2, 3), (3, 3)], ids=str)
@pytest.mark.parametrize("size", [(5, 5), (7, 3), (4, 5)], ids=str)
@pytest.mark.parametrize("kernel", [2, 3])
def test_one_channel_with_channels_last_strides(stride, size, kernel):
    """torch 2.10 to 2.13 is wrong by about the size of the output if that is one pixel wide."""
    x, weight = torch.randn(2, 1, *size), torch.randn(4, 1, kernel, kernel)
    geometry = Geometry((kernel, kernel), stride, (0, 0), (1, 1), 1)
    expected = F.conv2d(x.double(), weight.double(), None, stride).float()
    for convert_x, convert_weight in itertools.product((torch.Tensor.contiguous, channels_last), repeat=2):
        torch.testing.assert_close(convolve(convert_x(x), convert_weight(weight), geometry), expected)


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("magnitude", [None, "linear"])
def test_layers_with_one_channel_and_channels_last_strides(backend, magnitude):
    layer = sn.SphereConv2d(1, 4, 3, stride=(1, 3), magnitude=magnitude)
    x = torch.randn(2, 1, 5, 5)
    expected = layer.double()(x.double()).float()
    layer = layer.float()
    layer.weight = torch.nn.Parameter(channels_last(layer.weight.detach()))
    with sn.backend(backend):
        torch.testing.assert_close(layer(channels_last(x)), expected, rtol=1e-4, atol=1e-5)
