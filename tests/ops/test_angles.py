"""Angle functions, operator × property, against the formulas of docs/concepts.md (Eq. 1)."""

import math

import pytest
import torch

import spherenet as sn
from cases import OPERATORS
from oracle import sphere_conv as reference
from spherenet.angles import (
    ANGLES,
    AngleFunction,
    CosineAngle,
    LinearAngle,
    SharpenedCosineAngle,
    SigmoidAngle,
    SquareCosineAngle,
    make_angle,
)

K = [0.1, 0.3, 0.7, 2.0]
P = [1.0, 1.7, 2.0, 3.5]
FUNCTIONS = {"linear": LinearAngle(), "cosine": CosineAngle(), "square-cosine": SquareCosineAngle()}
FUNCTIONS |= {f"sigmoid-{k}": SigmoidAngle(k) for k in K}
FUNCTIONS |= {f"sharpened-{p}": SharpenedCosineAngle(p=p, dtype=torch.float64) for p in P}
REFERENCE = {
    "linear": (reference.g_linear, reference.slope_linear),
    "cosine": (reference.g_cosine, reference.slope_cosine),
    "square-cosine": (lambda t: t.cos() * t.cos().abs(), lambda t: -2 * t.cos().abs() * t.sin()),
} | {
    f"sigmoid-{k}": (lambda t, k=k: reference.g_sigmoid(t, k), lambda t, k=k: reference.slope_sigmoid(t, k)) for k in K
}
REFERENCE |= {
    f"sharpened-{p}": (lambda t, p=p: reference.g_power(t, p), lambda t, p=p: reference.slope_power(t, p)) for p in P
}
every_function = pytest.mark.parametrize("name", FUNCTIONS)


def interior(count=2001, dtype=torch.float64):
    return torch.linspace(0.01, math.pi - 0.01, count, dtype=dtype)


@every_function
def test_value_equals_reference(name):
    theta = interior()
    torch.testing.assert_close(FUNCTIONS[name](theta.cos()), REFERENCE[name][0](theta), rtol=0, atol=1e-13)


@every_function
def test_derivative_equals_reference(name):
    theta = interior()
    in_angle = -theta.sin() * FUNCTIONS[name].derivative(theta.cos())
    torch.testing.assert_close(in_angle, REFERENCE[name][1](theta), rtol=1e-11, atol=1e-12)


@every_function
def test_derivative_equals_autograd(name):
    cosine = interior().cos().requires_grad_()
    (slope,) = torch.autograd.grad(FUNCTIONS[name](cosine).sum(), cosine)
    torch.testing.assert_close(slope, FUNCTIONS[name].derivative(cosine.detach()), rtol=1e-9, atol=1e-9)


@every_function
def test_inverse_inverts_value(name):
    cosine = interior().cos()
    # For k = 0.1 tanh is so flat near ±1 that a last-place change of g moves c by 1e-9.
    torch.testing.assert_close(
        FUNCTIONS[name].inverse(FUNCTIONS[name](cosine), FUNCTIONS[name].k), cosine, rtol=0, atol=1e-8
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_function
def test_value_at_ends_and_middle(name, dtype):
    value = FUNCTIONS[name](torch.tensor([1.0, 0.0, -1.0], dtype=dtype))
    torch.testing.assert_close(value, torch.tensor([1.0, 0.0, -1.0], dtype=dtype), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_function
def test_value_is_odd_and_at_most_one(name, dtype):
    cosine = torch.linspace(-1, 1, 200_001, dtype=dtype)
    value = FUNCTIONS[name](cosine)
    assert value.abs().max() <= 1
    torch.testing.assert_close(FUNCTIONS[name](-cosine), -value, rtol=0, atol=0)


@every_function
def test_value_is_strictly_decreasing_in_float64(name):
    value = FUNCTIONS[name](torch.linspace(0, math.pi, 5001, dtype=torch.float64).cos())
    assert (value.diff() < 0).all()


@pytest.mark.parametrize("k", [0.01, 0.05, *K])
def test_sigmoid_never_increases_in_float32(k):
    value = SigmoidAngle(k)(torch.linspace(1, -1, 100_001))
    assert value.diff().max() <= 2 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sigmoid_approaches_linear_for_large_k(dtype):
    cosine = torch.linspace(-1, 1, 1001, dtype=dtype)
    errors = [(SigmoidAngle(k)(cosine) - LinearAngle()(cosine)).abs().max().item() for k in (1, 10, 100, 1e4)]
    assert errors[0] > 30 * errors[1] > 0  # the distance decreases like 1/k²
    assert errors[2] < 2e-5
    assert errors[3] < 1e-6


@pytest.mark.parametrize("k", [1e-6, 1e-4, 1e-3])
def test_sigmoid_approaches_step_for_small_k(k):
    cosine = torch.cat([torch.linspace(-1, -0.02, 500), torch.linspace(0.02, 1, 500)])
    torch.testing.assert_close(SigmoidAngle(k)(cosine), cosine.sign(), rtol=0, atol=1e-7)
    assert SigmoidAngle(k)(torch.zeros(1)).item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("beyond", [0.0, 1e-7, 3e-3])
@every_function
def test_values_and_derivatives_are_finite_at_and_beyond_one(name, beyond, dtype):
    """Half-precision cosines reach 1.003: values stay in range, derivatives finite, twice."""
    cosine = torch.tensor([1 + beyond, -1 - beyond], dtype=dtype, requires_grad=True)
    value = FUNCTIONS[name](cosine)
    assert value.detach().abs().max() <= 1
    (slope,) = torch.autograd.grad(value.sum(), cosine, create_graph=True)
    assert slope.isfinite().all()
    if slope.requires_grad:
        assert torch.autograd.grad(slope.sum(), cosine)[0].isfinite().all()
    assert FUNCTIONS[name].derivative(cosine.detach()).isfinite().all()


@pytest.mark.parametrize("k", [1e-6, 0.01, 0.1, 0.5, 3.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradient_of_k_is_finite_everywhere(k, dtype):
    k = torch.tensor(k, dtype=dtype, requires_grad=True)
    cosine = torch.linspace(-1.001, 1.001, 1001, dtype=dtype)
    (slope,) = torch.autograd.grad(SigmoidAngle.value(cosine, k).abs().sum(), k)
    assert slope.isfinite()


def test_gradcheck_of_sigmoid_with_k():
    cosine = torch.linspace(-0.95, 0.95, 12, dtype=torch.float64, requires_grad=True)
    k = torch.linspace(0.1, 1.5, 12, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(SigmoidAngle.value, (cosine, k))
    assert torch.autograd.gradgradcheck(SigmoidAngle.value, (cosine, k))
    assert torch.autograd.gradcheck(SigmoidAngle.value, (cosine, k), check_forward_ad=True)


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_named_angles_equal_reference(operator):
    angle = make_angle(**operator.arguments, num_filters=5, dtype=torch.float64)
    theta = interior(50)[:, None].expand(50, 5)
    torch.testing.assert_close(angle(theta.cos()), operator.g(theta), rtol=0, atol=1e-12)
    torch.testing.assert_close(angle.at(theta), operator.g(theta), rtol=0, atol=1e-12)
    by_autograd = sn.AngleFunction.derivative(angle, theta.cos())
    torch.testing.assert_close(angle.derivative(theta.cos()), by_autograd, rtol=1e-10, atol=1e-10)


def test_custom_angle_in_layer():
    def square(theta):
        return 1 - 2 * (theta / math.pi) ** 2

    angle = sn.CustomAngle(square, name="square")
    theta = interior()
    torch.testing.assert_close(angle(theta.cos()), square(theta))
    torch.testing.assert_close(angle.derivative(theta.cos()) * -theta.sin(), -4 * theta / math.pi**2)
    layer = sn.SphereConv2d(3, 4, 3, operator=angle)
    images = torch.zeros(1, 3, 5, 5, requires_grad=True)
    out = layer(images)
    out.sum().backward()
    torch.testing.assert_close(out, torch.full_like(out, 0.5))  # g(π/2)
    assert images.grad.isfinite().all()
    assert layer.operator == "square"


def test_custom_class_with_parameter_per_filter():
    class Power(sn.AngleFunction):
        def __init__(self, filters):
            super().__init__()
            self.exponent = torch.nn.Parameter(torch.ones(filters))

        def forward(self, cosine):
            return cosine.sign() * cosine.abs() ** self.exponent

    layer = sn.SphereConv2d(3, 4, 3, operator=Power(4))
    layer(torch.randn(2, 3, 5, 5)).sum().backward()
    assert layer.angle.exponent.grad.shape == (4,)
    with pytest.raises(NotImplementedError, match="AngleFunction must define forward"):
        sn.AngleFunction()(torch.zeros(2))


@pytest.mark.parametrize("k", [0.02, 0.5, 5.0, 80.0])
def test_learned_k_starts_at_initial_value_and_stays_positive(k):
    angle = sn.LearnableSigmoidAngle(3, k, dtype=torch.float64)
    torch.testing.assert_close(angle.k, torch.full((3,), k, dtype=torch.float64), rtol=1e-12, atol=0)
    with torch.no_grad():
        angle.raw_k.fill_(-1e4)
    assert (angle.k >= 0.01).all()
    assert sn.LearnableSigmoidAngle(3, k).to(torch.bfloat16).k.dtype == torch.float32


@pytest.mark.parametrize("p", [0.3, 0.9, 1.0, 1.5, 2.0, 4.0])
def test_gradcheck_of_sharpened_cosine_with_power(p):
    """Away from c = 0, where the floor of |c| is not active."""
    angle = SharpenedCosineAngle(6, p, dtype=torch.float64)
    cosine = torch.linspace(-0.95, 0.95, 6, dtype=torch.float64, requires_grad=True)

    def run(cosine, raw):
        return torch.func.functional_call(angle, {"raw_p": raw}, (cosine,))

    assert torch.autograd.gradcheck(run, (cosine, angle.raw_p))
    assert torch.autograd.gradgradcheck(run, (cosine, angle.raw_p))
    assert torch.autograd.gradcheck(run, (cosine, angle.raw_p), check_forward_ad=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("p", [0.11, 0.5, 0.99, 1.0, 1.5, 2.0, 5.0])
def test_derivatives_of_sharpened_cosine_are_bounded_at_zero(p, dtype):
    angle = SharpenedCosineAngle(p=p, dtype=dtype)
    cosine = torch.tensor([0.0, 1e-30, -1e-10, 1e-6, -1e-3, 0.3], dtype=dtype, requires_grad=True)
    value = angle(cosine)
    assert value[0] == 0
    gradients = torch.autograd.grad(value.sum(), (cosine, angle.raw_p), create_graph=True)
    floor = 4 * torch.finfo(dtype).eps ** 0.5
    bound = max(p, p * floor ** (angle.p.item() - 1))
    assert (gradients[0] >= 0).all()
    assert gradients[0].max() <= 1.001 * bound
    for gradient in gradients:
        assert gradient.isfinite().all()
        for second in torch.autograd.grad(gradient.sum(), (cosine, angle.raw_p), retain_graph=True):
            assert second.isfinite().all()
    torch.testing.assert_close(angle.derivative(cosine.detach()), gradients[0])


@pytest.mark.parametrize("p", [0.2, 0.5, 2.0, 40.0])
def test_learned_power_starts_at_initial_value_and_has_a_lower_bound(p):
    angle = SharpenedCosineAngle(3, p, dtype=torch.float64)
    torch.testing.assert_close(angle.p, torch.full((3,), p, dtype=torch.float64), rtol=1e-12, atol=0)
    with torch.no_grad():
        angle.raw_p.fill_(-1e4)
    assert (angle.p >= 0.1).all()
    angle.reset_parameters()
    torch.testing.assert_close(angle.p, torch.full((3,), p, dtype=torch.float64), rtol=1e-12, atol=0)
    assert SharpenedCosineAngle(3).to(torch.bfloat16).p.dtype == torch.float32
    assert f"3 filters, initial_p={p:g}" in repr(angle)
    assert "shared, initial_p=2" in repr(SharpenedCosineAngle())


def test_learned_power_is_trained():
    """A layer recovers the powers of another layer with the same kernels."""
    torch.manual_seed(0)
    target, layer = (sn.SphereLinear(4, 3, operator="sharpened-cosine") for _ in range(2))
    layer.weight = target.weight
    powers = torch.tensor([0.5, 1.0, 4.0])
    target.angle = SharpenedCosineAngle(3)
    with torch.no_grad():
        target.angle.raw_p.copy_((powers - 0.1).expm1().log())
    optimizer, x = torch.optim.Adam([layer.angle.raw_p], 0.05), torch.randn(256, 4)
    for _ in range(400):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(layer(x), target(x)).backward()
        optimizer.step()
    torch.testing.assert_close(layer.angle.p, powers, rtol=0.02, atol=0)


def test_powers_one_and_two_equal_cosine_and_square_cosine():
    cosine = torch.linspace(-1, 1, 1001, dtype=torch.float64)
    for p, angle in ((1.0, CosineAngle()), (2.0, SquareCosineAngle())):
        sharpened = SharpenedCosineAngle(p=p, dtype=torch.float64)
        torch.testing.assert_close(sharpened(cosine), angle(cosine), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(sharpened.for_inference(cosine), angle.for_inference(cosine), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(sharpened.psi(cosine, 2.5), angle.psi(cosine, 2.5), rtol=1e-9, atol=1e-9)


def test_margin_loss_with_powers():
    features, labels = torch.randn(6, 4, requires_grad=True), torch.arange(6) % 3
    for angle in ("square-cosine", SharpenedCosineAngle()):
        head = sn.AngularHead(4, 3)
        loss = sn.GASoftmaxLoss(m=2.0, angle=angle)(head(features), labels)
        loss.backward()
        assert features.grad.isfinite().all()
    with pytest.raises(ValueError, match="SharpenedCosineAngle"):
        sn.GASoftmaxLoss(angle="sharpened-cosine")


@pytest.mark.parametrize("name", ["linear", "cosine", "square-cosine", "sigmoid-0.3"])
def test_factors_give_value_and_slope(name):
    angle = FUNCTIONS[name]
    cosine, grad = interior(200).cos(), torch.rand(200, dtype=torch.float64)
    inner, outer = angle.factors(angle.k)
    shape = angle.shape(cosine.clone(), inner)
    torch.testing.assert_close(outer * shape, angle(cosine))
    expected = grad * angle.derivative(cosine)
    angle.multiply_by_slope_(grad, cosine, shape.clone(), inner)
    torch.testing.assert_close(outer * grad, expected)


@pytest.mark.parametrize("method", ["forward", "value"])
def test_subclass_of_built_in_function_with_another_g_is_refused(method):
    with pytest.raises(TypeError, match=r"Doubled must be a subclass of AngleFunction .* got a subclass of .*Sigmoid"):
        type("Doubled", (SigmoidAngle,), {method: lambda self, cosine, *k: 2 * cosine})


def test_own_function_gets_general_methods():
    class Doubled(AngleFunction):
        def __init__(self, k):
            super().__init__()
            self.sigmoid = SigmoidAngle(k)

        def forward(self, cosine):
            return 2 * self.sigmoid(cosine)

    angle, theta = Doubled(0.3), interior(50)
    assert angle.kernel_id is None
    assert not angle.has_formula
    assert angle.factors(angle.k) is None
    assert not angle.is_same_for_all_filters
    torch.testing.assert_close(angle.at(theta), 2 * SigmoidAngle(0.3).at(theta))
    torch.testing.assert_close(angle.derivative(theta.cos()), 2 * SigmoidAngle(0.3).derivative(theta.cos()))
    torch.testing.assert_close(angle.drop(theta), torch.full((50,), 4.0, dtype=torch.float64))


def test_subclass_with_same_function_keeps_specialized_methods():
    class Named(SigmoidAngle):
        def extra_repr(self):
            return "named"

    assert Named(0.3).kernel_id == "sigmoid"
    assert Named(0.3).is_same_for_all_filters


@every_function
def test_derivative_of_psi_equals_difference_quotient(name):
    theta, step = torch.tensor([0.3, 0.9, 1.7, 2.9], dtype=torch.float64), 1e-6
    angle = FUNCTIONS[name]
    difference = angle.psi((theta + step).cos(), 2.5) - angle.psi((theta - step).cos(), 2.5)
    torch.testing.assert_close(angle.psi_derivative(theta, 2.5), difference / (2 * step), rtol=1e-5, atol=1e-5)


def test_tables_of_the_tests_contain_every_function():
    assert {operator.name for operator in OPERATORS} == set(ANGLES)


def test_every_name_creates_its_class():
    for name, angle_class in ANGLES.items():
        angle = make_angle(name)
        assert isinstance(angle, AngleFunction)
        assert type(angle) is angle_class
        assert angle.name == name
