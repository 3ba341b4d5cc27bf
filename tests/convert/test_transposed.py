"""Conversion of transposed convolutions, which stay plain unless `transposed=True`."""

import copy

import pytest
import torch
from torch import nn

import spherenet as sn
from spherenet.convert import sphere_summary, to_plain, to_sphere
from spherenet.errors import ModelError


def decoder():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, groups=2, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 3, 3),
    )


def test_transposed_convolutions_stay_plain_by_default():
    sphere = to_sphere(decoder())
    assert type(sphere[1]) is nn.ConvTranspose2d
    assert sphere_summary(sphere)["1"].reason == "transposed convolution"


@pytest.mark.parametrize("options", [{}, {"center": "patch", "rescale": "learned", "operator": "learnable"}], ids=str)
def test_transposed_convolutions_are_converted_on_request(options):
    model = decoder()
    sphere = to_sphere(model, transposed=True, **options)
    layer = sphere[1]
    assert type(layer) is sn.SphereConvTranspose2d
    expected = sn.SphereConvTranspose2d(4, 6, 3, 2, 1, 1, 2, **options)
    expected.load_state_dict(layer.state_dict())
    assert torch.equal(layer.weight, model[1].weight)
    x = torch.randn(2, 4, 3, 3)
    torch.testing.assert_close(layer(x), expected(x))


@pytest.mark.parametrize("dims", [1, 3])
def test_other_dimensions_convert(dims):
    plain = {1: nn.ConvTranspose1d, 3: nn.ConvTranspose3d}[dims]
    sphere = to_sphere(plain(3, 4, 3, 2), transposed=True)
    assert type(sphere) is {1: sn.SphereConvTranspose1d, 3: sn.SphereConvTranspose3d}[dims]


def test_to_plain_restores_transposed_convolutions():
    model = decoder().eval()
    back = to_plain(to_sphere(copy.deepcopy(model), transposed=True, rescale="learned"))
    assert type(back[1]) is nn.ConvTranspose2d
    images = torch.randn(2, 3, 6, 6)
    assert torch.equal(back.eval()(images), model(images))


def test_last_transposed_convolution_computes_the_output():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 4, 2), nn.ReLU(), nn.ConvTranspose2d(4, 3, 2))
    sphere = to_sphere(model, transposed=True)
    assert type(sphere[1]) is sn.SphereConvTranspose2d
    assert type(sphere[3]) is nn.ConvTranspose2d
    assert sphere_summary(sphere)["3"].reason == "classifier (last layer of the model)"
    assert type(to_sphere(model, transposed=True, classifier=True)[3]) is sn.SphereConvTranspose2d


def test_kernels_with_a_single_entry_are_not_centered():
    model = nn.Sequential(nn.ConvTranspose2d(1, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.ReLU())
    sphere = to_sphere(model, transposed=True, center="weight")
    assert sphere[0].center is None
    assert sphere[2].center == "weight"


def test_dropped_batch_norm_after_transposed_convolution():
    sphere = to_sphere(decoder(), transposed=True, drop_batch_norm=True)
    assert isinstance(sphere[2], nn.Identity)
    assert sphere(torch.randn(1, 3, 6, 6)).isfinite().all()


def test_lazy_transposed_convolution_stays_plain():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.LazyConvTranspose2d(4, 2), nn.ReLU())
    assert type(to_sphere(model, transposed=True)[1]) is nn.LazyConvTranspose2d


def test_model_of_transposed_convolutions_alone_is_not_converted():
    with pytest.raises(ModelError, match="1 transposed convolution"):
        to_sphere(nn.Sequential(nn.ConvTranspose2d(3, 4, 2), nn.ReLU()))
