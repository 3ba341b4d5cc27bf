"""Properties of sphere layers for all operators: invariances, range, bounded gradients, edge cases, dtypes."""

import math

import pytest
import torch

import spherenet as sn
from cases import GEOMETRIES, OPERATORS, WITH_MAGNITUDES

every_operator = pytest.mark.parametrize("operator", OPERATORS, ids=str)
every_form = pytest.mark.parametrize("operator", [*OPERATORS, *WITH_MAGNITUDES], ids=str)
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
LAYERS = {
    "conv1d": (lambda **kw: sn.SphereConv1d(3, 4, 3, **kw), (2, 3, 6)),
    "conv2d": (lambda **kw: sn.SphereConv2d(3, 4, 3, **kw), (2, 3, 5, 5)),
    "conv3d": (lambda **kw: sn.SphereConv3d(3, 4, 2, **kw), (2, 3, 3, 3, 3)),
    "grouped": (lambda **kw: sn.SphereConv2d(4, 4, 3, groups=2, **kw), (2, 4, 5, 5)),
    "linear": (lambda **kw: sn.SphereLinear(6, 4, **kw), (5, 6)),
}
every_layer = pytest.mark.parametrize("layer_name", LAYERS)


def build(layer_name, **arguments):
    make, shape = LAYERS[layer_name]
    dtype = arguments.get("dtype", torch.float32)
    return make(**arguments), torch.randn(shape, dtype=dtype)


@every_operator
@every_layer
@pytest.mark.parametrize("scale", [0.25, 3.0, 1e4])
def test_output_does_not_depend_on_scale_of_input_and_weights(layer_name, operator, scale):
    layer, x = build(layer_name, **operator.arguments, eps=1e-12, dtype=torch.float64)
    expected = layer(x)
    torch.testing.assert_close(layer(x * scale), expected, rtol=0, atol=1e-9)
    with torch.no_grad():
        layer.weight.mul_(scale)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-9)


@every_operator
@every_layer
@every_dtype
def test_outputs_are_between_minus_one_and_one(layer_name, operator, dtype):
    layer, x = build(layer_name, **operator.arguments, dtype=dtype)
    with torch.no_grad():
        layer.weight[0] = 1.0
        layer.weight[1] = -1.0
    for patch in (x * 100, torch.ones_like(x) * 100, torch.zeros_like(x)):
        assert layer(patch).abs().max() <= 1


@every_form
def test_output_is_odd(operator):
    layer, x = build("conv2d", **operator.arguments)
    torch.testing.assert_close(layer(-x), -layer(x), rtol=0, atol=0)


@every_operator
def test_output_decreases_with_angle(operator):
    layer = sn.SphereLinear(2, 1, **operator.arguments, eps=1e-30, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 0.0]]))
    theta = torch.linspace(0, math.pi, 2001, dtype=torch.float64)
    out = layer(torch.stack([theta.cos(), theta.sin()], 1) * 3).squeeze(1)
    assert (out.diff() < 0).all()
    torch.testing.assert_close(out[[0, 1000, 2000]], torch.tensor([1.0, 0.0, -1.0]).double(), rtol=0, atol=1e-7)


@every_form
@every_layer
def test_gradcheck_and_gradgradcheck(layer_name, operator):
    layer, x = build(layer_name, **operator.arguments, bias=True, rescale="learned", dtype=torch.float64)
    x = x[:1].requires_grad_()
    names, values = zip(*layer.named_parameters(), strict=True)

    def call(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    values = tuple(v.detach().clone().requires_grad_() for v in values)
    assert "angle.raw_k" in names or operator.name != "learnable"
    assert torch.autograd.gradcheck(call, (x, *values))
    assert torch.autograd.gradgradcheck(call, (x, *values), rtol=1e-3, atol=1e-4)


@every_operator
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("theta", [0.0, 1e-6, 1e-4, 1e-3, 1e-2, 0.3, math.pi / 2, math.pi - 1e-3, math.pi])
@pytest.mark.parametrize("length", [1e-2, 1.0, 1e3])
def test_gradient_is_at_most_steepest_slope_over_norm(operator, dtype, theta, length):
    """‖∂g/∂x‖ ≤ max|dg/dθ|/‖x‖ for all angles, with 5 % for the rounding of the cosine in float32."""
    w = torch.randn(64, dtype=torch.float64)
    w /= w.norm()
    sideways = torch.randn(64, dtype=torch.float64)
    sideways -= w * (w @ sideways)
    sideways /= sideways.norm()
    layer = sn.SphereLinear(64, 1, **operator.arguments, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(w[None])
    x = (length * (math.cos(theta) * w + math.sin(theta) * sideways)).to(dtype)[None].requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x), x)
    assert gradient.isfinite().all()
    assert gradient.norm().item() <= 1.05 * operator.steepest() / length


@every_form
@every_layer
@every_dtype
def test_zero_input_gives_zero_with_finite_gradients(layer_name, operator, dtype):
    layer, x = build(layer_name, **operator.arguments, dtype=dtype)
    x = torch.zeros_like(x).requires_grad_()
    out = layer(x)
    assert (out == 0).all()
    out.sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@every_operator
@every_dtype
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("eps", [1e-4, 1e-12])
def test_theta_zero_and_pi_are_finite(operator, dtype, sign, eps):
    layer = sn.SphereConv2d(3, 4, 3, **operator.arguments, eps=eps, dtype=dtype)
    x = (sign * 50 * layer.weight[:1]).detach().clone().requires_grad_()
    out = layer(x)
    # eps turns the angle by about sqrt(eps)/‖w‖; a rounded cosine by the square root of its last digit.
    tolerance = 1.5 * (eps**0.5 / layer.weight[0].norm().item() + torch.finfo(dtype).eps ** 0.5)
    assert abs(out[0, 0].item() - sign) < tolerance
    out.sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@every_form
def test_zero_patches_at_border(operator):
    """Outputs at a zero border with padding are 0; the others equal those of the image without border."""
    layer = sn.SphereConv2d(3, 4, 3, padding=1, **operator.arguments)
    x = torch.zeros(1, 3, 12, 12)
    x[..., :4, :4] = torch.randn(1, 3, 4, 4)
    x.requires_grad_()
    out = layer(x)
    assert (out[..., 6:, 6:] == 0).all()
    assert (out[..., :4, :4] != 0).any()
    out.square().sum().backward()
    assert x.grad.isfinite().all()


@every_form
@every_layer
@every_dtype
@pytest.mark.parametrize("exponent", [-45, -30, -18, -9, 9, 18, 30, 38])
def test_finite_input_gives_finite_output(layer_name, operator, dtype, exponent):
    layer, x = build(layer_name, **operator.arguments, dtype=dtype)
    limit = torch.finfo(dtype).max / 16
    x = (x.double() * 10.0**exponent).clamp(-limit, limit).to(dtype).requires_grad_()
    out = layer(x)
    assert out.isfinite().all()
    out.sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@every_form
@pytest.mark.parametrize("exponent", [-18, -9, 0, 9, 18])
def test_float32_is_accurate_from_1e_minus_18_to_1e18(operator, exponent):
    layer = sn.SphereConv2d(600, 4, 3, **operator.arguments)
    counterpart = sn.SphereConv2d(600, 4, 3, **operator.arguments, dtype=torch.float64)
    x = torch.randn(1, 600, 4, 4)
    with torch.no_grad():
        layer.weight.mul_(10.0**exponent)
        x *= 10.0**exponent
        counterpart.load_state_dict(layer.state_dict())
    expected = counterpart(x.double())
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-4, atol=1e-6 * max(expected.abs().max().item(), 1))


def test_overflowing_weights_and_inputs_count_as_zero():
    layer = sn.SphereConv2d(3, 4, 3)
    assert (layer(torch.full((1, 3, 4, 4), 1e30)) == 0).all()
    with torch.no_grad():
        layer.weight.fill_(1e30)
    assert (layer(torch.randn(1, 3, 4, 4)) == 0).all()


def test_nan_input_gives_nan():
    assert sn.SphereConv2d(3, 4, 3)(torch.full((1, 3, 4, 4), math.nan)).isnan().all()


@every_layer
def test_empty_batch(layer_name):
    layer, x = build(layer_name, operator="learnable", rescale="learned")
    x = x[:0].requires_grad_()
    out = layer(x)
    assert out.shape[0] == 0
    out.sum().backward()
    assert x.grad.shape == x.shape
    assert (layer.weight.grad == 0).all()


@every_operator
@every_layer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close_to_float32(layer_name, operator, dtype):
    layer, x = build(layer_name, **operator.arguments)
    expected = layer(x)
    half = layer.to(dtype)
    got = half(x.to(dtype))
    assert got.dtype == dtype
    # A cosine of eight bits through a slope of at most steepest/sin θ; measured errors are a third of this.
    tolerance = 8 * torch.finfo(dtype).eps * max(1, operator.steepest())
    torch.testing.assert_close(got.float(), expected, rtol=0, atol=tolerance)


def test_one_angle_object_is_shared_by_layers():
    angle = sn.LearnableSigmoidAngle(k=0.4)
    model = torch.nn.Sequential(sn.SphereConv2d(3, 4, 3, operator=angle), sn.SphereConv2d(4, 5, 3, operator=angle))
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.angle.raw_k", "1.weight"]
    model(torch.randn(2, 3, 7, 7)).sum().backward()
    assert angle.raw_k.grad.shape == ()
    assert model[0].k is not None
    torch.testing.assert_close(model[0].k, model[1].k)


def test_k_of_layers():
    assert sn.SphereConv2d(3, 4, 3).k is None
    assert sn.SphereConv2d(3, 4, 3, operator="linear").k is None
    assert sn.SphereConv2d(3, 4, 3, operator="sigmoid").k == 0.3
    assert sn.SphereConv2d(3, 4, 3, operator="sigmoid", k=0.7).k == 0.7
    torch.testing.assert_close(sn.SphereConv2d(3, 4, 3, operator="learnable").k, torch.full((4,), 0.5))
    layer = sn.SphereConv2d(3, 4, 3, operator="learnable", k=0.2, k_sharing="layer")
    torch.testing.assert_close(layer.k, torch.tensor(0.2))


@pytest.mark.parametrize("geometry", GEOMETRIES[:10:3], ids=str)
def test_functions_equal_layers(geometry):
    layer = geometry.layer(operator="learnable", bias=True, rescale="learned")
    function = getattr(sn.functional, f"sphere_conv{geometry.dims}d")
    arguments = (layer.stride, layer.padding, layer.dilation, layer.groups)
    x = geometry.images()
    if layer.padding_mode == "zeros":
        out = function(
            x, layer.weight, layer.bias, *arguments, operator="sigmoid", k=layer.k, beta=layer.beta, gamma=layer.gamma
        )
        torch.testing.assert_close(out, layer(x))


def test_defaults_of_functions_equal_layers():
    x, w = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3)
    layer = sn.SphereConv2d(3, 4, 3)
    with torch.no_grad():
        layer.weight.copy_(w)
    torch.testing.assert_close(sn.functional.sphere_conv2d(x, w), layer(x))
    sigmoid = sn.functional.sphere_conv2d(x, w, operator="sigmoid")
    torch.testing.assert_close(sigmoid, sn.functional.sphere_conv2d(x, w, operator="sigmoid", k=0.3))
