"""The five Triton functions against the reference, the oracle and float64, in Triton's interpreter on CPU tensors.

`tests/kernels/test_triton.py` runs this file in a new process, because Triton decides on import whether it interprets.
"""

import math

import numpy as np
import pytest
import torch
from driver import triton_sphere_conv
from torch.nn import functional as F

import spherenet as sn
from cases import GEOMETRIES, OPERATORS, Geometry, geometry_of, oracle_conv, oracle_linear
from spherenet.angles import make_angle
from spherenet.kernels.backends import Pass, Saved
from spherenet.kernels.sphere_conv.triton import gradients, launch, patches, weights
from spherenet.ops import geometry as conv
from spherenet.ops.norms import direction
from spherenet.ops.operation import Operation, Parameters

SOME_OPERATORS = [operator for operator in OPERATORS if str(operator) in ("linear", "sigmoid-0.3", "learnable-0.5")]
every_operator = pytest.mark.parametrize("operator", OPERATORS, ids=str)
LINEAR_GEOMETRY = conv.Geometry()


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    monkeypatch.setattr(launch, "FEWEST_PROGRAMS", 1)
    with np.errstate(all="ignore"):  # the interpreter computes with NumPy, which warns of overflow and NaN
        yield


def by_triton(layer, x, **options):
    """Return the layer's output by the Triton functions."""
    affine, geometry = (layer.bias, layer.beta, layer.gamma), LINEAR_GEOMETRY
    if layer.weight.dim() > 2:
        x, geometry = conv.resolve_padding(x, geometry_of(layer))
    k = layer.angle.k
    return triton_sphere_conv(x, layer.weight, geometry, layer.angle, k, affine, **options)


def assert_like_reference(layer, x, rtol, **options):
    """Output and gradients equal those of the plain formula; errors are relative to a gradient's largest entry."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    inputs = [x, *layer.parameters()]
    with sn.backend("reference"):
        expected = layer(x)
    weighting = torch.randn_like(expected)
    expected_gradients = torch.autograd.grad(expected, inputs, weighting)
    got = by_triton(layer, x, **options)
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=0, atol=rtol)
    for g, e in zip(torch.autograd.grad(got, inputs, weighting), expected_gradients, strict=True):
        assert g.dtype == e.dtype
        torch.testing.assert_close(g, e, rtol=0, atol=rtol * max(e.abs().max().item(), 1e-3))
    return got


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("operator", SOME_OPERATORS[1:], ids=str)
def test_every_geometry_in_float64(geometry, operator):
    assert_like_reference(geometry.layer(**operator.arguments), geometry.images(), 1e-11)


@every_operator
@pytest.mark.parametrize("save_cosine", [False, True])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["planes", "rows"])
def test_float32_in_both_memory_formats(operator, memory_format, save_cosine):
    geometry = Geometry(2, (5, 6), channels=4, filters=6, arguments={"padding": 1, "groups": 2})
    layer = geometry.layer(**operator.arguments, dtype=torch.float32).to(memory_format=memory_format)
    x = geometry.images(dtype=torch.float32).to(memory_format=memory_format)
    got = assert_like_reference(layer, x, 5e-6, save_cosine=save_cosine or not layer.angle.is_recoverable)
    assert got.is_contiguous(memory_format=memory_format)


@every_operator
def test_bias_and_rescaling(operator):
    geometry = Geometry(2, (4, 4), arguments={"padding": 1})
    layer = geometry.layer(**operator.arguments, bias=True, rescale="learned")
    torch.nn.init.normal_(layer.beta)
    torch.nn.init.normal_(layer.gamma)
    assert_like_reference(layer, geometry.images(), 1e-11)


@every_operator
def test_fully_connected(operator):
    layer = sn.SphereLinear(7, 5, **operator.arguments, bias=True, dtype=torch.float64)
    x = torch.randn(6, 7, dtype=torch.float64)
    got = assert_like_reference(layer, x, 1e-11)
    torch.testing.assert_close(got, oracle_linear(layer, x, operator), rtol=1e-9, atol=1e-9)


@every_operator
def test_oracle(operator):
    geometry = Geometry(2, (5, 4), arguments={"padding": 1, "stride": 2})
    layer, x = geometry.layer(**operator.arguments), geometry.images()
    torch.testing.assert_close(by_triton(layer, x), oracle_conv(layer, x, operator), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("operator", SOME_OPERATORS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(operator, dtype):
    geometry = Geometry(2, (5, 4), channels=4, arguments={"padding": 1})
    layer, x = geometry.layer(**operator.arguments, dtype=dtype), geometry.images(dtype=dtype)
    assert_like_reference(layer, x, 8 * torch.finfo(dtype).eps * max(1, operator.steepest()))


def test_half_precision_computes_in_float32():
    weight = torch.randn(4, 3, 3, 3)
    unit, scale = weights.unit_weight(weight, 1e-4, torch.bfloat16)
    assert (unit.dtype, scale.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(unit, direction(weight, (1, 2, 3)).bfloat16(), rtol=2**-7, atol=0)
    grad = torch.randn_like(unit)
    assert weights.unit_weight_backward(grad, unit, scale, weight.dtype).dtype == torch.float32


@every_operator
def test_gradients_against_finite_differences(operator):
    geometry = conv.Geometry((2, 2), (2, 1), (1, 0), (1, 1), 1)
    x = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    learned = operator.name == "learnable"
    angle = sn.SigmoidAngle() if learned else make_angle(**operator.arguments)
    k = torch.full((2,), 0.5, dtype=torch.float64, requires_grad=True) if learned else angle.k
    inputs = (x, weight, k) if learned else (x, weight)

    def function(*values):
        return triton_sphere_conv(values[0], values[1], geometry, angle, values[2] if learned else k)

    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


@every_operator
def test_edges(operator):
    layer = sn.SphereConv2d(4, 4, 3, **operator.arguments)
    x = torch.randn(7, 4, 5, 5)
    x[0] = 0
    x[1, ..., 1:4, 1:4] = 50 * layer.weight[0]
    x[2, ..., 1:4, 1:4] = -50 * layer.weight[0]
    x[3] = 1e30
    x[4] = torch.finfo(torch.float32).max
    x[5] *= 1e-30
    x[6] *= 1e18
    x = x.detach().requires_grad_()
    out = by_triton(layer, x)
    assert (out[[0, 3, 4]] == 0).all()
    assert out[1, 0, 1, 1] > 0.95
    assert out[2, 0, 1, 1] < -0.95
    torch.testing.assert_close(out[6:], by_triton(layer, x[6:] * 1e-18), rtol=1e-3, atol=1e-4)
    out.sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    assert by_triton(layer, torch.full_like(x[:1], math.nan)).isnan().all()


def test_other_layouts_of_the_inputs():
    """Sliced, transposed and expanded inputs and gradients need no contiguous memory."""
    layer = sn.SphereConv2d(3, 4, 3, padding=1, operator="sigmoid", dtype=torch.float64)
    base = torch.randn(2, 3, 9, 12, dtype=torch.float64)
    image = torch.randn(1, 3, 5, 5, dtype=torch.float64)
    for x in (base[..., 1:6, ::2], base.mT, image.expand(2, -1, -1, -1)):
        expected = torch.autograd.functional.vjp(layer, x, torch.ones(1, dtype=torch.float64).expand_as(layer(x)))[1]
        got = torch.autograd.functional.vjp(
            lambda v: by_triton(layer, v), x, torch.ones(1, dtype=torch.float64).expand_as(layer(x))
        )[1]
        torch.testing.assert_close(got, expected)
    strided = torch.randn(2, 4, 10, 10, dtype=torch.float64)[..., ::2, ::2]
    expected = torch.autograd.functional.vjp(layer, image.expand(2, -1, -1, -1), strided)[1]
    got = torch.autograd.functional.vjp(lambda v: by_triton(layer, v), image.expand(2, -1, -1, -1), strided)[1]
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("shape", [(0, 3, 5, 5), (0, 3, 1, 1)])
def test_empty_batch(shape):
    layer = sn.SphereConv2d(3, 4, 1, operator="learnable", bias=True)
    x = torch.randn(shape, requires_grad=True)
    out = by_triton(layer, x)
    assert out.shape == (0, 4, *shape[2:])
    gradients = torch.autograd.grad(out.sum(), [x, *layer.parameters()])
    assert all((g == 0).all() for g in gradients)


def test_offsets_beyond_31_bits():
    """Three images 2³⁰ elements apart: strides fit 31 bits, the last offset does not. Few pages take memory."""
    layer = sn.SphereConv2d(1, 2, 2, dtype=torch.float16)
    apart = torch.empty(2**31 + 16, dtype=torch.float16).as_strided((3, 1, 3, 3), (2**30, 9, 3, 1))
    apart.copy_(torch.randn(3, 1, 3, 3))
    unit, _ = weights.unit_weight(layer.weight.detach(), 1e-4, torch.float16)
    operation = Operation(sn.CosineAngle(), conv.Geometry((2, 2), (1, 1), (0, 0), (1, 1), 1), 1e-4)
    results = []
    for x in (apart, apart.clone(memory_format=torch.contiguous_format)):
        product = F.conv2d(apart.contiguous(), unit)
        results.append(patches.forward(product, x, operation, Parameters(), False)[:2])
    assert apart.stride(0) == 2**30
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_large_windows_sum_the_squares_first(monkeypatch):
    layer = sn.SphereConv2d(4, 4, 3, padding=1, groups=2, dtype=torch.float64)
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    calls = []
    original = patches._channel_squares
    monkeypatch.setattr(patches, "_channel_squares", lambda *a: calls.append(1) or original(*a))
    assert_like_reference(layer, x, 1e-11)
    assert not calls
    monkeypatch.setattr(patches, "MOST_DIRECT_TAPS", 8)
    monkeypatch.setattr(patches, "MOST_DIRECT_ENTRIES", 17)
    assert_like_reference(layer, x, 1e-11)
    assert calls


def test_many_blocks_give_the_same_result_every_time(monkeypatch):
    """Blocks smaller than the map, filters and channels in several turns; sums in a fixed order."""
    monkeypatch.setattr(launch, "TILE", 32)
    monkeypatch.setattr(launch, "WIDEST_CHANNELS", 4)
    layer = sn.SphereConv2d(6, 10, 3, padding=1, operator="learnable", dtype=torch.float32)
    x = torch.randn(2, 6, 5, 5)
    assert_like_reference(layer, x, 5e-6)
    runs = []
    for _ in range(2):
        layer.zero_grad()
        by_triton(layer, x).square().sum().backward()
        runs.append([p.grad.clone() for p in layer.parameters()])
    for first, second in zip(*runs, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("k", [0.02, 0.5, 3.0, 7.0, 20.0, 1000.0])
@pytest.mark.parametrize("save_cosine", [False, True])
def test_gradient_of_learned_k_against_float64(k, save_cosine):
    """For large k the derivative by k is small, the difference of two terms that are not."""
    assert gradient_error({"operator": "learnable", "k": k}, torch.randn(2, 3, 7, 7), "raw_k", save_cosine) < 5e-6


@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e-16, 1e-18])
def test_gradients_of_powers_of_tiny_cosines_against_float64(scale):
    images = torch.randn(2, 3, 7, 7) * scale
    for name in (None, "raw_p"):
        assert gradient_error({"operator": "sharpened-cosine"}, images, name, save_cosine=True) < 1e-5
    assert gradient_error({"operator": "square-cosine"}, images, None, save_cosine=True) < 1e-5


def gradient_error(arguments, images, name, save_cosine):
    """Return the error of the gradient of a parameter, or of the weights, relative to its largest value."""
    single, exact = (sn.SphereConv2d(3, 4, 3, **arguments, dtype=dtype) for dtype in (torch.float32, torch.float64))
    exact.load_state_dict(single.state_dict())
    upstream = torch.randn(2, 4, 5, 5)
    with sn.backend("reference"):
        expected = exact(images.double())
    got = by_triton(single, images, save_cosine=save_cosine)
    parameters = [layer.weight if name is None else getattr(layer.angle, name) for layer in (exact, single)]
    (precise,) = torch.autograd.grad(expected, parameters[0], upstream.double())
    (rounded,) = torch.autograd.grad(got, parameters[1], upstream)
    return ((rounded - precise).abs().max() / precise.abs().max()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "k"), [("linear", None), *(("sigmoid", k) for k in (0.05, 0.3, 3.0, 1000.0))])
def test_g_over_all_cosines(name, k, dtype):
    """The device formulas of g equal those of `spherenet.angles`, also near 0 and ±1, for large and small k."""
    c = torch.cat([torch.linspace(-1, 1, 401, dtype=torch.float64), torch.logspace(-8, 0, 90, dtype=torch.float64)])
    c = torch.cat([c, 1 - torch.logspace(-7, 0, 70, dtype=torch.float64)]).to(dtype)
    unit = torch.ones(len(c), 1, dtype=dtype)
    product = c.reshape(-1, 1).clone()
    angle = make_angle(name, k)
    operation, parameters = Operation(angle, LINEAR_GEOMETRY, 1e-30), Parameters(k)
    out, inverse_norm, cosine = patches.forward(product, unit, operation, parameters, True)
    torch.testing.assert_close(inverse_norm, unit, rtol=1e-6, atol=0)
    exact = angle(cosine.double())
    rtol, atol = (2e-6, 1e-7) if dtype == torch.float32 else (1e-12, 1e-12)
    torch.testing.assert_close(out.double(), exact, rtol=rtol, atol=atol)
    slope = angle.derivative(cosine if k is None else cosine.double()).double()
    peak = slope.abs().max().item()
    for saved, is_cosine in ((cosine, True), (out, False)):
        results = Saved(unit, unit, unit, saved, None, not is_cosine)
        got = gradients.backward(torch.ones_like(out), Pass(operation, parameters, results, [False] * 7))[0]
        tolerance = (2e-3 if dtype == torch.float32 else 1e-6) if not is_cosine else 1e-5
        inner = cosine.abs() < 0.999
        torch.testing.assert_close(got.double()[inner], slope[inner], rtol=tolerance, atol=tolerance * min(peak, 10))
