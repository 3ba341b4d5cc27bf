"""The choice between Winograd's and the direct algorithm, in sphere layers and FastConv2d."""

import threading

import pytest
import torch
from torch import nn
from torch.autograd import gradgradcheck
from torch.nn import functional as F

import spherenet as sn
from cases import OPERATORS
from spherenet.kernels import library
from spherenet.kernels.settings import CONVOLUTION
from spherenet.kernels.sphere_conv import winograd
from spherenet.ops.geometry import Geometry

needs_library = pytest.mark.skipif(not library.available(), reason="needs the native kernels")
LAYOUTS = [torch.contiguous_format, torch.channels_last]
THREE = Geometry((3, 3), (1, 1), (1, 1), (1, 1))


def tile(*shape, filters=32, geometry=THREE, layout=torch.channels_last, dtype=torch.float32):
    """Return the side of the tiles for an input, 0 for the direct algorithm."""
    x = torch.empty(shape, dtype=dtype).contiguous(memory_format=layout)
    plan = winograd.plan_for(x, filters, geometry)
    return 0 if plan is None else plan.tile


@needs_library
def test_auto_takes_winograd_where_it_is_faster():
    assert tile(64, 32, 16, 16) == 4
    assert tile(128, 64, 32, 32, filters=64) == 4
    assert tile(128, 64, 32, 32, filters=64, layout=torch.contiguous_format) == 4
    assert tile(200, 32, 2, 2) == 2  # tiles of four would compute 16 outputs for 4
    assert tile(64, 3, 32, 32) == 0
    assert tile(1, 16, 16, 16, filters=24) == 0  # calls cost more than multiplications
    assert tile(1, 512, 4, 4, filters=512) == 0  # the weights cost more than they save
    assert tile(64, 32, 16, 16, dtype=torch.float64) == tile(64, 32, 16, 16, dtype=torch.bfloat16) == 0


@needs_library
@pytest.mark.parametrize("layout", LAYOUTS, ids=["planes", "rows"])
def test_small_sphere_layers_take_winograd_before_plain_ones(layout):
    """Torch's convolution would need calls of the library before and after it."""
    layer, x = sn.SphereConv2d(16, 16, 3, padding=1), torch.randn(1, 16, 12, 12).contiguous(memory_format=layout)
    results = {}
    for choice in ("auto", "winograd", "direct"):
        with sn.convolution(choice), torch.no_grad():
            results[choice] = layer(x)
    assert tile(1, 16, 12, 12, filters=16) == 0
    is_rows = layout == torch.channels_last  # planes would have to be copied
    assert torch.equal(results["auto"], results["winograd" if is_rows else "direct"])


@needs_library
@pytest.mark.parametrize(
    "changed",
    [{"kernel_size": (1, 1)}, {"stride": (2, 1)}, {"dilation": (1, 2)}, {"groups": 2}, {"padding": (3, 1)},
     {"padding": "same"}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("choice", ["auto", "winograd"])
def test_other_geometries_stay_direct(changed, choice):
    with sn.convolution(choice):
        assert tile(64, 32, 16, 16, geometry=THREE._replace(**changed)) == 0


@needs_library
def test_choice():
    assert CONVOLUTION.current() == "auto"
    with sn.convolution("direct"):
        assert tile(64, 32, 16, 16) == 0
        with sn.convolution("winograd"):
            assert tile(1, 3, 5, 5) > 0
        assert CONVOLUTION.current() == "direct"
        other = []
        thread = threading.Thread(target=lambda: other.append(CONVOLUTION.current()))
        thread.start()
        thread.join()
        assert other == ["auto"]
    try:
        sn.set_convolution("direct")
        assert tile(64, 32, 16, 16) == 0
    finally:
        sn.set_convolution("auto")
    with pytest.raises(ValueError, match="convolution must be"):
        sn.set_convolution("fft")
    with pytest.raises(ValueError, match="convolution must be"), sn.convolution("fft"):
        pass


def results(layer, x, algorithm):
    """Return output, output in inference, and all gradients."""
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    with sn.convolution(algorithm):
        out = layer(x)
        with torch.no_grad():
            inferred = layer(x)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    out.backward(grad)
    return [out.detach(), inferred, x.grad, *(parameter.grad for parameter in layer.parameters())]


@needs_library
@pytest.mark.parametrize("layout", LAYOUTS, ids=["planes", "rows"])
@pytest.mark.parametrize("center", [None, "patch"])
@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_layers_agree_with_the_direct_algorithm_and_keep_the_layout(operator, center, layout):
    for options in ({}, {"bias": True, "rescale": "learned"}):
        if operator.magnitude and center:
            options = {**options, "padding_mode": "reflect"}
        layer = sn.SphereConv2d(9, 17, 3, padding=1, center=center, **operator.arguments, **options)
        layer = layer.to(memory_format=layout)
        x = torch.randn(3, 9, 10, 7).contiguous(memory_format=layout)
        for result, expected in zip(results(layer, x, "winograd"), results(layer, x, "direct"), strict=True):
            assert result.stride() == expected.stride()
            assert (result - expected).abs().max() <= 2e-5 * expected.abs().max()


@needs_library
def test_layers_keep_their_edges():
    layer, x = sn.SphereConv2d(16, 16, 3, padding=1), torch.randn(4, 16, 9, 9, requires_grad=True)
    with sn.convolution("winograd"):
        assert layer(x[0]).shape == (16, 9, 9)
        assert layer(x[:0]).shape == (0, 16, 9, 9)
        changed = nn.functional.relu_(layer(x))  # backward finds the output changed and convolves again
        changed.sum().backward()
    expected = torch.autograd.grad(nn.functional.relu(layer(x)).sum(), x)[0]
    assert (x.grad - expected).abs().max() < 1e-5 * expected.abs().max()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


@needs_library
@pytest.mark.parametrize("layout", LAYOUTS, ids=["planes", "rows"])
@pytest.mark.parametrize("padding", [0, 1, 2, "same"])
def test_fast_conv_is_conv2d(padding, layout):
    for bias, mode in ((True, "zeros"), (False, "zeros"), (True, "reflect")):
        layer = sn.FastConv2d(12, 20, 3, padding=padding, bias=bias, padding_mode=mode).to(memory_format=layout)
        counterpart = nn.Conv2d(12, 20, 3, padding=padding, bias=bias, padding_mode=mode).to(memory_format=layout)
        counterpart.load_state_dict(layer.state_dict())
        x = torch.randn(2, 12, 9, 13).contiguous(memory_format=layout)
        for result, expected in zip(results(layer, x, "winograd"), results(counterpart, x, "auto"), strict=True):
            assert result.stride() == expected.stride()
            assert (result - expected).abs().max() <= 1e-5 * expected.abs().max()


@needs_library
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_fast_conv_spreads_what_is_not_finite_over_its_tiles_alone(value):
    layer, x = sn.FastConv2d(16, 16, 3, padding=1), torch.randn(2, 16, 24, 24)
    with sn.convolution("winograd"), torch.no_grad():
        clean = layer(x)
        x[0, 3, 12, 13] = value
        out = layer(x)
    reached = ~out.isfinite().any(1)
    assert reached[0, 11:14, 12:15].all()  # the patches that contain it
    reached[0, 8:16, 8:16] = False  # the tiles of these patches
    assert not reached.any()
    assert torch.equal(out[1], clean[1])


@needs_library
def test_fast_conv_where_the_engine_does_not_serve():
    layer, x = sn.FastConv2d(8, 8, 3, padding=1), torch.randn(2, 8, 6, 6)
    counterpart = nn.Conv2d(8, 8, 3, padding=1)
    counterpart.load_state_dict(layer.state_dict())
    with sn.convolution("winograd"):
        assert torch.equal(layer(x[0]), counterpart(x[0]))
        assert torch.equal(layer.double()(x.double()), counterpart.double()(x.double()))
        assert layer(x[:0].double()).shape == (0, 8, 6, 6)
        with sn.backend("reference"):
            layer, counterpart = layer.float(), counterpart.float()
            assert torch.equal(layer(x), counterpart(x))
        assert not torch.equal(layer(x), counterpart(x))
    strided = sn.FastConv2d(8, 8, 3, stride=2)
    assert strided(x).shape == (2, 8, 2, 2)
    compiled = torch.export.export(layer.float(), (x,)).module()
    assert (compiled(x) - counterpart.float()(x)).abs().max() < 1e-6


@needs_library
def test_fast_conv_can_be_differentiated_twice():
    layer = sn.FastConv2d(4, 3, 3, padding=1)
    x = torch.randn(2, 4, 5, 5, requires_grad=True)
    with sn.convolution("winograd"):
        gradient = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)[0]
        second = torch.autograd.grad(gradient.square().sum(), x)[0]
    expected = torch.autograd.grad(
        F.conv2d(x, layer.weight, layer.bias, padding=1).square().sum(), x, create_graph=True
    )
    expected = torch.autograd.grad(expected[0].square().sum(), x)[0]
    assert (second - expected).abs().max() < 1e-5 * expected.abs().max()
    assert gradgradcheck(lambda x: layer.double()(x), (x.detach().double().requires_grad_(),))


@needs_library
def test_the_plain_counterpart_on_the_same_engine():
    options = {"operator": None, "widths": (16, 16, 16), "input_size": 16}
    counterpart = sn.create_model("cnn-9", engine="winograd", **options)
    assert any(type(module) is sn.FastConv2d for module in counterpart.modules())
    plain = sn.create_model("cnn-9", **options)
    plain.load_state_dict(counterpart.state_dict())
    images = torch.randn(8, 3, 16, 16)
    assert (counterpart.eval()(images) - plain.eval()(images)).abs().max() < 1e-4
    assert sn.create_model(**counterpart.config).config == counterpart.config
    with pytest.raises(ValueError, match="engine must be"):
        sn.create_model("cnn-9", operator=None, engine="fft")
