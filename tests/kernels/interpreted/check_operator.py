"""Layers with the Triton backend, as `dispatch` selects it on GPUs: the operator around the five functions."""

import pytest
import torch
from torch import nn

import spherenet as sn
from cases import OPERATORS, Geometry
from spherenet.kernels import backends, dispatch
from spherenet.kernels.settings import backend
from spherenet.kernels.sphere_conv.triton import launch

SOME = [
    Geometry(1, (9,), 4, arguments={"stride": 2, "padding": 2, "dilation": 2}),
    Geometry(2, (5, 5), channels=4, filters=8, arguments={"groups": 4, "stride": 2}),
    Geometry(3, (4, 3, 4), (2, 1, 3), channels=2, filters=2, arguments={"padding": 1, "stride": 2}),
]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    monkeypatch.setattr(launch, "FEWEST_PROGRAMS", 1)


def gradients(layer, x, name, weighting, after=lambda y: y):
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    with backend(name):
        out = after(layer(x))
        return [out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], weighting)]


def assert_same(layer, x, rtol, after=lambda y: y):
    weighting = torch.randn_like(layer(x))
    expected = gradients(layer, x, "reference", weighting, after)
    for got, wanted in zip(gradients(layer, x, "triton", weighting, after), expected, strict=True):
        assert got.dtype == wanted.dtype
        torch.testing.assert_close(got, wanted, rtol=0, atol=rtol * max(1e-3, wanted.abs().max().item()))


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
@pytest.mark.parametrize("geometry", SOME, ids=str)
def test_layers(geometry, operator):
    assert_same(geometry.layer(**operator.arguments), geometry.images(), 1e-10)


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_bias_rescaling_and_channels_last(operator):
    layer = sn.SphereConv2d(4, 6, 3, groups=2, **operator.arguments, bias=True, rescale="learned", dtype=torch.float64)
    layer = layer.to(memory_format=torch.channels_last)
    x = torch.randn(2, 4, 5, 6, dtype=torch.float64).to(memory_format=torch.channels_last)
    assert_same(layer, x, 1e-10)


def test_k_for_the_layer_and_rows():
    layer = sn.SphereLinear(5, 4, operator="learnable", k_sharing="layer", dtype=torch.float64)
    assert_same(layer, torch.randn(3, 5, dtype=torch.float64), 1e-10)


@pytest.mark.parametrize("operator", ["cosine", "sigmoid"])
def test_half_precision(operator):
    layer = sn.SphereConv2d(4, 6, 3, operator=operator, dtype=torch.bfloat16)
    assert_same(layer, torch.randn(2, 4, 5, 5, dtype=torch.bfloat16), 0.1)


def test_gradients_after_in_place_change_of_output():
    layer = sn.SphereConv2d(3, 4, 3, operator="sigmoid", dtype=torch.float64)
    assert_same(layer, torch.randn(2, 3, 5, 5, dtype=torch.float64), 1e-9, nn.ReLU(inplace=True))


def test_inference():
    layer, x = sn.SphereConv2d(3, 4, 3, operator="linear"), torch.randn(2, 3, 5, 5)
    with torch.inference_mode():
        expected = layer(x)
        with backend("triton"):
            torch.testing.assert_close(layer(x), expected)


def test_cuda_tensors_use_triton():
    dispatch._candidates.cache_clear()
    assert [candidate.name for candidate in dispatch._candidates("auto", "cuda")] == ["triton"]
    assert [candidate.name for candidate in dispatch._candidates("auto", "cpu")] != ["triton"]
    assert dispatch.implementation_name("cuda") == "triton"


@pytest.mark.parametrize("options", [{"center": "weight"}, {"center": "patch"}, {"magnitude": "ball"}], ids=str)
def test_layers_without_triton_kernels_use_the_plain_formula(options, monkeypatch):
    layer, x = sn.SphereConv2d(3, 4, 3, **options), torch.randn(1, 3, 5, 5)
    calls = []
    original = dispatch.PLAIN.forward
    monkeypatch.setattr(dispatch.PLAIN, "forward", lambda *a: calls.append(1) or original(*a))
    with backend("triton"):
        layer(x)
    assert calls == [1]


def test_failed_import_of_triton_warns(monkeypatch):
    def broken(name):
        raise ImportError("undefined symbol: here\nand there")

    monkeypatch.setattr(backends, "load_backend", broken)
    for cached in (backends.has_triton, dispatch._candidates):
        cached.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"^spherenet runs without Triton, .*: undefined symbol: here$"):
        assert dispatch._candidates("auto", "cuda") == ()
    for cached in (backends.has_triton, dispatch._candidates):
        cached.cache_clear()
