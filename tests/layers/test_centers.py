"""Centered layers (Eq. 14): values and gradients against the oracle, invariances, flat and overflowing patches."""

import itertools

import pytest
import torch

import spherenet as sn
from cases import GEOMETRIES, OPERATORS, Geometry, oracle_conv, oracle_linear
from spherenet.functional import sphere_conv2d, sphere_linear

SMALL = [geometry for geometry in GEOMETRIES if not (geometry.dims == 1 and geometry.kernel == 1)]
CENTERS = ["weight", "patch"]
every_center = pytest.mark.parametrize("center", CENTERS)
every_backend = pytest.mark.parametrize("backend", ["auto", "reference"])
every_operator = pytest.mark.parametrize("operator", OPERATORS, ids=str)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
LAYERS = {
    "conv1d": (lambda **kw: sn.SphereConv1d(3, 4, 3, **kw), (2, 3, 6)),
    "conv2d": (lambda **kw: sn.SphereConv2d(3, 4, 3, **kw), (2, 3, 5, 5)),
    "conv3d": (lambda **kw: sn.SphereConv3d(3, 4, 2, **kw), (2, 3, 3, 3, 3)),
    "grouped": (lambda **kw: sn.SphereConv2d(4, 4, 3, groups=2, **kw), (2, 4, 5, 5)),
    "pointwise": (lambda **kw: sn.SphereConv2d(4, 4, 1, **kw), (2, 4, 5, 5)),
    "linear": (lambda **kw: sn.SphereLinear(6, 4, **kw), (5, 6)),
}
every_layer = pytest.mark.parametrize("layer_name", LAYERS)


def build(layer_name, **arguments):
    make, shape = LAYERS[layer_name]
    return make(**arguments), torch.randn(shape, dtype=arguments.get("dtype", torch.float32))


def assert_equals_oracle(layer, inputs, oracle, operator, tolerance=1e-9):
    """Compare the output and all gradients of both backends with the oracle, relative to the largest entry."""
    inputs.requires_grad_()
    expected = oracle(layer, inputs, operator)
    weighting = torch.randn_like(expected)
    tensors = {"input": inputs, **dict(layer.named_parameters())}
    expected_gradients = torch.autograd.grad(expected, list(tensors.values()), weighting)
    for backend in ("auto", "reference"):
        with sn.backend(backend):
            got = layer(inputs)
            got_gradients = torch.autograd.grad(got, list(tensors.values()), weighting)
        torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)
        for name, a, b in zip(tensors, got_gradients, expected_gradients, strict=True):
            atol = tolerance * max(1.0, b.abs().max().item())
            message = f"{backend}, gradient of {name}"
            torch.testing.assert_close(a, b, rtol=0, atol=atol, msg=lambda text, message=message: f"{message}: {text}")


@every_center
@pytest.mark.parametrize("geometry", SMALL, ids=str)
def test_all_geometries_equal_oracle(geometry, center):
    operator = OPERATORS[SMALL.index(geometry) % len(OPERATORS)]
    assert_equals_oracle(geometry.layer(**operator.arguments, center=center), geometry.images(), oracle_conv, operator)


@every_center
@every_operator
def test_all_operators_equal_oracle(operator, center):
    geometry = Geometry(2, (5, 4), arguments={"padding": 1, "stride": 2})
    layer = geometry.layer(**operator.arguments, center=center, bias=True, rescale="learned")
    torch.nn.init.normal_(layer.beta)
    assert_equals_oracle(layer, geometry.images(), oracle_conv, operator)
    layer = sn.SphereLinear(7, 5, **operator.arguments, center=center, dtype=torch.float64)
    assert_equals_oracle(layer, torch.randn(6, 7, dtype=torch.float64), oracle_linear, operator)


@every_center
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_channels_last_equals_oracle(groups, center):
    layer = sn.SphereConv2d(4, 8, 3, padding=1, groups=groups, operator="linear", center=center, dtype=torch.float64)
    layer = layer.to(memory_format=torch.channels_last)
    x = torch.randn(2, 4, 5, 4, dtype=torch.float64).to(memory_format=torch.channels_last)
    assert_equals_oracle(layer, x, oracle_conv, OPERATORS[0])


@every_center
@every_operator
def test_float32_equals_oracle_in_float64(operator, center):
    """The inputs are the same numbers; the bound is a few roundings of a sum of 36 products times the slope of g."""
    layer = sn.SphereConv2d(4, 6, 3, padding=1, **operator.arguments, center=center)
    double = sn.SphereConv2d(4, 6, 3, padding=1, **operator.arguments, center=center, dtype=torch.float64)
    double.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    x = torch.randn(1, 4, 5, 5) + 1
    error = (layer(x) - oracle_conv(double, x.double(), operator)).abs().max().item()
    assert error <= 40 * torch.finfo(torch.float32).eps * max(1, operator.steepest())


@every_center
@every_operator
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_autocast_equals_oracle_with_rounded_tensors(operator, dtype, center):
    """Autocast rounds input and unit kernels once; a cosine of 36 products changes by about ε, plus the output's ε."""
    layer = sn.SphereConv2d(4, 6, 3, **operator.arguments, center=center)
    double = sn.SphereConv2d(4, 6, 3, **operator.arguments, center=center, dtype=torch.float64)
    double.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    x = torch.randn(1, 4, 5, 5).to(dtype)
    with torch.autocast("cpu", dtype):
        out = layer(x.float())
    assert out.dtype == dtype
    error = (out - oracle_conv(double, x.double(), operator)).abs().max().item()
    assert error <= 4 * torch.finfo(dtype).eps * max(1, operator.steepest())
    out.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32


@every_center
@every_layer
@every_backend
def test_gradcheck_and_gradgradcheck(layer_name, backend, center):
    layer, x = build(layer_name, operator="sigmoid", center=center, bias=True, rescale="learned", dtype=torch.float64)
    names, values = zip(*layer.named_parameters(), strict=True)

    def call(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    inputs = (x[:1].requires_grad_(), *values)
    with sn.backend(backend):
        assert torch.autograd.gradcheck(call, inputs)
        assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


# --- invariances ---------------------------------------------------------------------------------------------------


def add_to_kernels(layer, x):
    with torch.no_grad():
        layer.weight += torch.randn(len(layer.weight), *(1,) * (layer.weight.dim() - 1), dtype=x.dtype)
    return x


INVARIANCES = {
    "constant added to each kernel": (add_to_kernels, ["weight", "patch"]),
    "constant added to the input": (lambda layer, x: x + 3, ["patch"]),
    "input scaled": (lambda layer, x: x * 5, [None, "weight", "patch"]),
    "contrast scaled about another constant": (lambda layer, x: 7 + (x - 2) * 0.3, ["patch"]),
}


@every_layer
@every_operator
@pytest.mark.parametrize("change", INVARIANCES)
def test_invariances(change, layer_name, operator):
    """The listed forms do not change, and the others do."""
    function, invariant = INVARIANCES[change]
    for center, backend in itertools.product((None, *CENTERS), ("auto", "reference")):
        layer, x = build(layer_name, **operator.arguments, center=center, eps=1e-14, dtype=torch.float64)
        with sn.backend(backend):
            before = layer(x)
            difference = (layer(function(layer, x)) - before).abs().max().item()
        if center in invariant:
            assert difference < 1e-9, (center, backend)
        else:
            assert difference > 1e-4, (center, backend)


@every_operator
def test_patch_centered_output_is_the_correlation_coefficient(operator):
    layer, x = build("linear", **operator.arguments, center="patch", eps=1e-14, dtype=torch.float64)
    correlation = torch.corrcoef(torch.cat([x, layer.weight.detach()]))[: len(x), len(x) :]
    torch.testing.assert_close(layer(x), operator.g(correlation.acos()), rtol=0, atol=1e-9)


# --- edges ---------------------------------------------------------------------------------------------------------


@every_layer
@every_operator
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_flat_patch_has_value_zero_and_gradient_of_formula(layer_name, operator, dtype):
    """∂out/∂x = g'(0)·u/sqrt(eps), with u the centered unit kernel."""
    layer, x = build(layer_name, **operator.arguments, center="patch", dtype=dtype)
    shape = (1, x.shape[1], *layer.kernel_size) if x.dim() > 2 else (1, x.shape[1])  # one patch
    unit = layer.weight[0].detach().double() - layer.weight[0].detach().double().mean()
    unit /= (unit.square().sum() + layer.eps).sqrt()
    slope = layer.angle.derivative(torch.zeros(4, dtype=torch.float64))[0].item()
    expected = torch.zeros(shape, dtype=torch.float64)
    expected[:, : unit.shape[0]] = slope * unit / layer.eps**0.5
    for constant, backend in itertools.product((0.0, 1.0, -0.37, 1e3), ("auto", "reference")):
        x = torch.full(shape, constant, dtype=dtype, requires_grad=True)
        with sn.backend(backend):
            out = layer(x)
            assert (out == 0).all()
            (gradient,) = torch.autograd.grad(out[:, 0].sum(), x)
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-5 * max(1, slope) / layer.eps**0.5)


@every_layer
@every_dtype
def test_flat_input_in_every_dtype(layer_name, dtype):
    layer, x = build(layer_name, operator="sigmoid", center="patch", dtype=dtype)
    for constant, backend in itertools.product((0.0, 1.0, 0.37, -3.0), ("auto", "reference")):
        x = torch.full_like(x, constant).requires_grad_()
        with sn.backend(backend):
            out = layer(x)
        assert (out == 0).all()
        out.sum().backward()
        assert x.grad.isfinite().all()
        assert layer.weight.grad.isfinite().all()


@every_backend
@pytest.mark.parametrize("contrast", [1e-1, 1e-2, 1e-3, 1e-4])
def test_low_contrast_patches_keep_their_direction(backend, contrast):
    """Rounding x itself to float32 changes its contrast by 6e-8/contrast; the convolution adds a similar error."""
    layer = sn.SphereLinear(32, 5, operator="linear", center="patch")
    double = sn.SphereLinear(32, 5, operator="linear", center="patch", dtype=torch.float64)
    double.load_state_dict({"weight": layer.weight.double()})
    x = 1 + contrast * torch.randn(8, 32)
    with sn.backend(backend):
        error = (layer(x) - oracle_linear(double, x.double(), OPERATORS[0])).abs().max().item()
    # The norm includes eps = 1e-4, so the error relative to the norm is bounded by that of sqrt(n·contrast² + eps).
    assert error <= 32 * torch.finfo(torch.float32).eps * 32**0.5 / (32 * contrast**2 + layer.eps) ** 0.5


@every_layer
@every_operator
@every_center
def test_overflowing_patches_have_value_zero(layer_name, operator, center):
    """A patch that overflows without centering overflows with it, although its moments are computed in float64."""
    layer, x = build(layer_name, **operator.arguments, center=center, magnitude="linear")
    for value in (1e30, -1e30, torch.finfo(torch.float32).max):
        patterns = (torch.ones_like(x), x.sign(), x.clamp(-1, 1))
        for pattern, backend in itertools.product(patterns, ("auto", "reference")):
            huge = (pattern * value).requires_grad_()
            layer.zero_grad()
            with sn.backend(backend):
                out = layer(huge)
                assert (out == 0).all()
                out.sum().backward()
            assert (huge.grad == 0).all()
            assert all(p.grad.isfinite().all() for p in layer.parameters())


@every_layer
@every_backend
@every_center
def test_nan_propagates(layer_name, backend, center):
    layer, x = build(layer_name, center=center)
    with sn.backend(backend):
        assert layer(torch.full_like(x, torch.nan)).isnan().all()


@every_layer
@every_center
def test_empty_batch(layer_name, center):
    layer, x = build(layer_name, center=center, operator="learnable")
    x = x[:0].requires_grad_()
    layer(x).sum().backward()
    assert x.grad.shape == x.shape
    assert all((p.grad == 0).all() for p in layer.parameters())


@every_backend
def test_constant_kernel_has_value_zero_and_finite_gradients(backend):
    """A centered constant kernel is a zero kernel."""
    for center in CENTERS:
        layer, x = build("conv2d", center=center, operator="linear")
        torch.nn.init.constant_(layer.weight, 0.5)
        with sn.backend(backend):
            out = layer(x)
        torch.testing.assert_close(out, torch.zeros_like(out), rtol=0, atol=1e-5)
        out.sum().backward()
        assert layer.weight.grad.isfinite().all()


@every_center
def test_functions_equal_layers(center):
    layer, x = build("conv2d", center=center, magnitude="tanh", operator="sigmoid")
    out = sphere_conv2d(x, layer.weight, operator="sigmoid", center=center, magnitude="tanh")
    torch.testing.assert_close(out, layer(x), rtol=0, atol=0)
    layer, x = build("linear", center=center, magnitude="log")
    out = sphere_linear(x, layer.weight, center=center, magnitude="log")
    torch.testing.assert_close(out, layer(x), rtol=0, atol=0)


@every_center
@pytest.mark.parametrize("recurrent", [sn.SphereLSTM, sn.SphereGRU])
def test_recurrent_layers(recurrent, center):
    """Recurrent layers with centered gates equal their cells, and train from a zero state, which is a flat patch."""
    layer = recurrent(4, 5, center=center, magnitude="tanh", radius="learned")
    cell = layer.cells[0]
    assert cell.hh.center == cell.ih.center == center
    x = torch.randn(3, 2, 4, requires_grad=True)
    out = layer(x)[0]
    state, steps = None, []
    for step in x:
        state = cell(step, state)
        steps.append(state if recurrent is sn.SphereGRU else state[0])
    torch.testing.assert_close(out, torch.stack(steps))
    out.square().sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    assert cell.hh.magnitude.raw_radius.grad.abs().max() > 0
