"""Magnitude functions (Eq. 15): formulas, layers against the oracle, radii, and their life as modules."""

import copy
import math

import pytest
import torch
from torch import nn

import spherenet as sn
from cases import OPERATORS, Geometry, oracle_conv, oracle_linear
from layers.test_centers import assert_equals_oracle
from oracle import sphere_conv as reference
from spherenet.functional import sphere_linear
from spherenet.magnitudes import MAGNITUDES, RADIUS, make_magnitude

every_magnitude = pytest.mark.parametrize("magnitude", MAGNITUDES)
every_center = pytest.mark.parametrize("center", [None, "weight", "patch"], ids=str)
every_backend = pytest.mark.parametrize("backend", ["auto", "reference"])
WITH_RADIUS = [name for name, cls in MAGNITUDES.items() if cls.has_radius]
WITHOUT_RADIUS = [name for name in MAGNITUDES if name not in WITH_RADIUS]
with_radius = pytest.mark.parametrize("magnitude", WITH_RADIUS)


def constants(magnitude):
    """Return a magnitude function with constants that differ from 0 and 1."""
    radius = {"radius": 2.5} if magnitude in WITH_RADIUS else {}
    return MAGNITUDES[magnitude](**radius, alpha=0.7, beta=0.3)


# --- formulas ------------------------------------------------------------------------------------------------------


@every_magnitude
def test_value_and_derivative_equal_reference(magnitude):
    h = constants(magnitude)
    norm = torch.tensor([0.0, 1e-3, 0.4, 2.4, 2.6, 7.0, 1e6], dtype=torch.float64, requires_grad=True)
    expected = torch.stack([reference.MAGNITUDES[magnitude](r, 2.5, 0.7, 0.3) for r in norm])
    value = h(norm)
    torch.testing.assert_close(value, expected, rtol=1e-14, atol=1e-14)
    (slope,) = torch.autograd.grad(value.sum(), norm)
    torch.testing.assert_close(slope, torch.autograd.grad(expected.sum(), norm)[0], rtol=1e-13, atol=1e-14)


@every_magnitude
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_value_is_zero_at_zero_and_never_decreases(magnitude, dtype):
    value = constants(magnitude)(torch.linspace(0, 20, 10_001, dtype=dtype))
    assert value[0] == 0
    assert (value.diff() >= 0).all()


@pytest.mark.parametrize("magnitude", ["ball", "tanh", "segmented"])
def test_value_is_continuous_at_radius(magnitude):
    h = constants(magnitude)
    below, above = h(torch.tensor([2.5 - 1e-12, 2.5 + 1e-12], dtype=torch.float64))
    assert abs(above - below) < 1e-11


def test_limits():
    norm = torch.tensor([0.5, 3.0, 1e30])
    assert (sn.BallMagnitude(2.0)(norm) == torch.tensor([0.25, 1.0, 1.0])).all()
    assert sn.TanhMagnitude(2.0)(norm)[2] == 1
    assert (sn.SegmentedMagnitude(2.0)(norm)[1:] == 2).all()  # β = 0 by default


def test_linear_magnitude_of_cosine_is_a_convolution_with_unit_kernels():
    layer = sn.SphereConv2d(3, 4, 3, padding=1, magnitude="linear", eps=1e-30, dtype=torch.float64)
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    unit = layer.weight / layer.weight.flatten(1).norm(dim=1)[:, None, None, None]
    torch.testing.assert_close(layer(x), nn.functional.conv2d(x, unit, padding=1))


# --- layers against the oracle ---------------------------------------------------------------------------------------


@every_magnitude
@every_center
@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_linear_layers_equal_oracle(operator, center, magnitude):
    layer = sn.SphereLinear(
        7, 5, **operator.arguments, center=center, magnitude=constants(magnitude), dtype=torch.float64
    )
    assert_equals_oracle(layer, torch.randn(6, 7, dtype=torch.float64), oracle_linear, operator)


@every_magnitude
@every_center
@pytest.mark.parametrize(
    "geometry",
    [
        Geometry(1, (8,), arguments={"dilation": 2}),
        Geometry(2, (5, 4), arguments={"padding": 1, "stride": 2}),
        Geometry(2, (4, 4), channels=4, arguments={"groups": 2, "padding": 1, "padding_mode": "reflect"}),
        Geometry(3, (3, 3, 4), 2, channels=2, filters=2),
    ],
    ids=str,
)
def test_convolutions_equal_oracle(geometry, center, magnitude):
    operator = OPERATORS[3]
    radius = {"radius": "learned"} if magnitude in WITH_RADIUS else {}
    layer = geometry.layer(**operator.arguments, center=center, magnitude=magnitude, **radius, bias=True)
    if radius:
        nn.init.uniform_(layer.magnitude.raw_radius, 0, 4)
    assert_equals_oracle(layer, geometry.images(), oracle_conv, operator)


@with_radius
@every_center
def test_channels_last_with_learned_radius_equals_oracle(magnitude, center):
    geometry = Geometry(2, (5, 4), channels=4, filters=8, arguments={"groups": 2, "padding": 1})
    layer = geometry.layer(operator="linear", center=center, magnitude=magnitude, radius="learned", rescale="learned")
    layer = layer.to(memory_format=torch.channels_last)
    nn.init.uniform_(layer.magnitude.raw_radius, 0, 4)
    nn.init.normal_(layer.beta)
    x = geometry.images().to(memory_format=torch.channels_last)
    assert_equals_oracle(layer, x, oracle_conv, OPERATORS[0])


@every_magnitude
@every_center
def test_float32_equals_oracle_in_float64(magnitude, center):
    """Bound: a few roundings of a sum of 36 products, times the largest output."""
    operator = OPERATORS[0]
    layer = sn.SphereConv2d(4, 6, 3, operator="linear", center=center, magnitude=magnitude)
    double = sn.SphereConv2d(4, 6, 3, operator="linear", center=center, magnitude=magnitude, dtype=torch.float64)
    double.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    x = torch.randn(1, 4, 5, 5)
    expected = oracle_conv(double, x.double(), operator)
    error = (layer(x) - expected).abs().max().item()
    assert error <= 60 * torch.finfo(torch.float32).eps * max(1, expected.abs().max().item())


@every_magnitude
@every_center
@every_backend
def test_gradcheck_and_gradgradcheck(magnitude, center, backend):
    radius = {"radius": "learned"} if magnitude in WITH_RADIUS else {}
    layer = sn.SphereConv1d(2, 3, 3, operator="learnable", center=center, magnitude=magnitude, **radius).double()
    names, values = zip(*layer.named_parameters(), strict=True)

    def call(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    x = torch.randn(2, 2, 5, dtype=torch.float64, requires_grad=True)
    with sn.backend(backend):
        assert torch.autograd.gradcheck(call, (x, *values))
        assert torch.autograd.gradgradcheck(call, (x, *values), fast_mode=True)


# --- edges -----------------------------------------------------------------------------------------------------------


@every_magnitude
@every_center
@every_backend
@pytest.mark.parametrize("scale", [1e-18, 1e13, 1e18])
def test_small_and_large_patches_have_the_gradient_of_float64(magnitude, center, backend, scale):
    """Bound: as above, relative to the largest gradient; the norm must not be squared in float32."""
    radius = {"radius": 2 * scale} if magnitude in WITH_RADIUS else {}
    layer = sn.SphereConv2d(3, 4, 3, center=center, magnitude=magnitude, **radius)
    double = sn.SphereConv2d(3, 4, 3, center=center, magnitude=magnitude, **radius, dtype=torch.float64)
    double.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    x = (torch.randn(2, 3, 4, 4) * scale).requires_grad_()
    wide, grad = x.detach().double().requires_grad_(), torch.randn(2, 4, 2, 2)
    with sn.backend(backend):
        (gradient,) = torch.autograd.grad(layer(x), x, grad)
    (expected,) = torch.autograd.grad(double(wide), wide, grad.double())
    assert (gradient - expected).abs().max() <= 60 * torch.finfo(torch.float32).eps * expected.abs().max()


@every_magnitude
@every_center
@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_zero_and_overflowing_patches_have_value_zero(magnitude, center, backend, dtype):
    layer = sn.SphereConv2d(3, 4, 3, operator="linear", center=center, magnitude=magnitude, dtype=dtype)
    largest = min(1e300, torch.finfo(dtype).max)
    # The norm of float16 patches does not overflow in float32.
    for value in (0.0,) if dtype == torch.float16 else (0.0, largest):
        x = torch.full((1, 3, 4, 4), value, dtype=dtype, requires_grad=True)
        layer.zero_grad()
        with sn.backend(backend):
            out = layer(x)
            assert (out == 0).all()
            out.sum().backward()
        assert x.grad.isfinite().all()
        assert layer.weight.grad.isfinite().all()


@every_magnitude
@every_backend
def test_empty_batch(magnitude, backend):
    radius = {"radius": "learned"} if magnitude in WITH_RADIUS else {}
    layer = sn.SphereConv2d(3, 4, 3, magnitude=magnitude, **radius)
    x = torch.randn(0, 3, 5, 5, requires_grad=True)
    with sn.backend(backend):
        layer(x).sum().backward()
    assert x.grad.shape == x.shape
    assert all((p.grad == 0).all() for p in layer.parameters())


# --- radius ----------------------------------------------------------------------------------------------------------


@with_radius
def test_learned_radius_is_trained(magnitude):
    """A layer recovers the radii of another layer with the same kernels."""
    torch.manual_seed(0)
    target, layer = (sn.SphereLinear(4, 3, magnitude=magnitude, radius="learned") for _ in range(2))
    layer.weight = target.weight
    layer.weight.requires_grad_(False)
    radii = torch.tensor([0.5, 1.5, 3.0])
    with torch.no_grad():
        target.magnitude.raw_radius.copy_((radii - RADIUS.smallest).expm1().log())
    torch.testing.assert_close(target.magnitude.radius, radii)
    optimizer, x = torch.optim.Adam([layer.magnitude.raw_radius], 0.05), torch.randn(256, 4)
    x *= torch.linspace(0.1, 5, 256)[:, None] / x.norm(dim=1, keepdim=True)
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.mse_loss(layer(x), target(x)).backward()
        optimizer.step()
    torch.testing.assert_close(layer.magnitude.radius, radii, rtol=0.02, atol=0)


@with_radius
@pytest.mark.parametrize("radius", [0.01, 0.5, 1.0, 30.0])
def test_learned_radius_starts_at_initial_value_and_stays_positive(magnitude, radius):
    h = make_magnitude(magnitude, f"learned:{radius}", num_filters=3, dtype=torch.float64)
    torch.testing.assert_close(h.radius, torch.full((3,), radius, dtype=torch.float64), rtol=1e-12, atol=0)
    with torch.no_grad():
        h.raw_radius.fill_(-1e4)
    assert (h.radius >= RADIUS.smallest).all()
    assert h(torch.ones(2, 3, dtype=torch.float64)).isfinite().all()
    h.reset_parameters()
    torch.testing.assert_close(h.radius, torch.full((3,), radius, dtype=torch.float64), rtol=1e-12, atol=0)


@with_radius
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_radius_is_computed_in_float32(magnitude, dtype):
    h = MAGNITUDES[magnitude](3.3, 2, dtype=dtype)
    assert h.radius.dtype == torch.float32
    expected = nn.functional.softplus(h.raw_radius.double()) + RADIUS.smallest
    torch.testing.assert_close(h.radius.double(), expected, rtol=1e-6, atol=0)


def test_reset_parameters_of_a_layer_resets_radius():
    layer = sn.SphereConv2d(3, 4, 3, magnitude="ball", radius="learned", operator="sharpened-cosine")
    nn.init.constant_(layer.magnitude.raw_radius, 5.0)
    nn.init.constant_(layer.angle.raw_p, 5.0)
    layer.reset_parameters()
    torch.testing.assert_close(layer.magnitude.radius, torch.ones(4))
    torch.testing.assert_close(layer.angle.p, torch.full((4,), 2.0))


def test_fixed_radius_changes_the_output():
    x, weight = torch.randn(5, 4), torch.randn(3, 4)
    outputs = [sphere_linear(x, weight, magnitude=sn.TanhMagnitude(radius)) for radius in (0.5, 2.0)]
    assert (outputs[0] - outputs[1]).abs().max() > 1e-2
    layer = sn.SphereLinear(4, 3, magnitude="tanh", radius=2.0)
    torch.testing.assert_close(sphere_linear(x, layer.weight, magnitude=sn.TanhMagnitude(2.0)), layer(x))


# --- modules ---------------------------------------------------------------------------------------------------------


def learned_layer():
    return sn.SphereConv2d(3, 4, 3, center="patch", magnitude="ball", radius="learned")


def test_state_dict_and_copies_contain_the_radius():
    layer, x = learned_layer(), torch.randn(2, 3, 5, 5)
    nn.init.uniform_(layer.magnitude.raw_radius)
    assert set(layer.state_dict()) == {"weight", "magnitude.raw_radius"}
    duplicate, other = copy.deepcopy(layer), learned_layer()
    other.load_state_dict(layer.state_dict())
    for same in (duplicate, other):
        torch.testing.assert_close(same(x), layer(x), rtol=0, atol=0)
    assert duplicate.magnitude.raw_radius is not layer.magnitude.raw_radius
    assert set(sn.SphereConv2d(3, 4, 3, center="weight", magnitude="log").state_dict()) == {"weight"}


def test_printed_layer_states_the_options():
    text = repr(learned_layer())
    assert "center='patch'" in text
    assert "BallMagnitude(radius=learned" in text
    assert "radius=2.5" in repr(sn.SphereLinear(3, 4, magnitude="tanh", radius=2.5))
    assert "radius" not in repr(sn.LogMagnitude())
    assert "center" not in repr(sn.SphereLinear(3, 4))


def test_dtype_and_device_reach_the_radius():
    layer = sn.SphereLinear(3, 4, magnitude="tanh", radius="learned", dtype=torch.float64)
    assert layer.magnitude.raw_radius.dtype == torch.float64
    assert sn.SphereLinear(3, 4, magnitude="tanh", radius="learned", device="meta").magnitude.raw_radius.is_meta
    half = sn.SphereLinear(3, 4, magnitude="tanh", radius="learned").to(torch.bfloat16)
    half(torch.randn(2, 3, dtype=torch.bfloat16)).sum().backward()
    assert half.magnitude.raw_radius.grad.dtype == torch.bfloat16


def test_lazy_layers_take_the_options():
    layer = sn.LazySphereConv2d(4, 3, center="patch", magnitude="ball", radius="learned")
    layer(torch.randn(2, 3, 5, 5)).sum().backward()
    assert layer.weight.shape == (4, 3, 3, 3)
    assert layer.magnitude.raw_radius.grad is not None


def test_custom_magnitude_uses_the_plain_formula():
    class Root(sn.Magnitude):
        name = "root"

        def value(self, norm, radius):
            return norm.sqrt()

    layer, x = sn.SphereLinear(4, 3, magnitude=Root()), torch.randn(5, 4, requires_grad=True)
    out = layer(x)
    norm = (x.square().sum(1, keepdim=True) + layer.eps).sqrt()
    torch.testing.assert_close(out, norm.sqrt() * sphere_linear(x, layer.weight))
    out.sum().backward()
    with pytest.raises(NotImplementedError, match="must define value"):
        sn.Magnitude()(torch.ones(2))


def test_every_name_creates_its_class():
    for name, cls in MAGNITUDES.items():
        assert type(make_magnitude(name)) is cls
        assert make_magnitude(name).name == name
        assert getattr(sn, cls.__name__) is cls
    assert make_magnitude(None) is make_magnitude("sphere") is None


BAD = {
    "unknown magnitude": (lambda: sn.SphereLinear(3, 4, magnitude="bal"), "'bal'.*mean 'ball'"),
    "radius of sphere": (lambda: sn.SphereLinear(3, 4, radius=2.0), "radius must be None.*'sphere', got 2.0"),
    "radius beside an object": (
        lambda: sn.SphereLinear(3, 4, magnitude=sn.BallMagnitude(), radius=2.0), "radius must be None.*'ball'",
    ),
    "misspelled learned": (
        lambda: sn.SphereLinear(3, 4, magnitude="ball", radius="lerned"),
        "^radius must be a number, 'learned' or 'learned:' and its initial value, got 'lerned'. Did you mean",
    ),
    "initial radius": (lambda: make_magnitude("ball", "learned:ten", num_filters=3), "radius must.*'learned:ten'.$"),
    "no initial radius": (lambda: make_magnitude("ball", "learned:", num_filters=3), "radius must.*got 'learned:'.$"),
    "small initial radius": (
        lambda: make_magnitude("ball", "learned:1e-4", num_filters=3), "greater than 0.001 if it is learned, got 0.00",
    ),
    "NaN initial radius": (lambda: make_magnitude("ball", "learned:nan", num_filters=3), "radius must be finite"),
    "negative radius": (lambda: sn.SphereLinear(3, 4, magnitude="ball", radius=-1.0), "radius must be.*got -1"),
    "zero radius": (lambda: sn.SphereLinear(3, 4, magnitude="ball", radius=0), "radius must be.*got 0"),
    "infinite radius": (lambda: sn.BallMagnitude(math.inf), "radius must be finite"),
    "small learned radius": (lambda: sn.BallMagnitude(1e-4, 3), "greater than 0.001 if it is learned"),
    "radii of another layer": (
        lambda: sn.SphereLinear(3, 4, magnitude=sn.BallMagnitude(1.0, 5)), "must have 4 radii.*got 5",
    ),
    "NaN alpha": (lambda: sn.LinearMagnitude(alpha=math.nan), "alpha must be finite"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_wrong_arguments_raise(case):
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("magnitude", WITHOUT_RADIUS)
@pytest.mark.parametrize("radius", [2.0, "learned"])
def test_radius_of_magnitude_without_radius_raises(magnitude, radius):
    with pytest.raises(ValueError, match=f"radius must be None for the magnitude '{magnitude}'"):
        sn.SphereLinear(3, 4, magnitude=magnitude, radius=radius)
