"""The margin function ψ and additive margins: shape, special cases, gradients at the boundaries between segments."""

import math

import pytest
import torch

from loss_cases import ANGLES, MARGINS
from oracle import losses as reference_losses
from spherenet.angles import AngleFunction, CosineAngle, LearnableSigmoidAngle, LinearAngle, SigmoidAngle, make_angle
from spherenet.ops.angular import additive_angle, additive_cosine

GRID = torch.linspace(0, math.pi, 20_001, dtype=torch.float64)
NAMED = ["linear", "cosine", "sigmoid-0.1", "sigmoid-0.3", "sigmoid-0.7"]
each_angle = pytest.mark.parametrize("name", ANGLES)
each_m = pytest.mark.parametrize("m", MARGINS)


@each_angle
@each_m
def test_psi_is_strictly_decreasing(name, m):
    value = ANGLES[name][0]().psi(GRID.cos(), m)
    assert (value.diff() < 0).all()


@each_angle
@each_m
def test_psi_is_continuous(name, m):
    angle = ANGLES[name][0]()
    value = angle.psi(GRID.cos(), m)
    steepest = m * (angle(GRID.cos()).diff() / GRID.diff()).abs().max()
    assert (value.diff() / GRID.diff()).abs().max() <= steepest * (1 + 1e-6)


@each_angle
@each_m
def test_psi_equals_reference(name, m):
    make, g = ANGLES[name]
    theta = torch.linspace(0.01, math.pi - 0.01, 57, dtype=torch.float64)
    expected = torch.stack([reference_losses.psi(angle, m, g) for angle in theta])
    torch.testing.assert_close(make().psi(theta.cos(), m), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_cosine_psi_is_the_multiple_angle_polynomial(m):
    c = GRID.cos()
    polynomial = {1: c, 2: 2 * c**2 - 1, 3: 4 * c**3 - 3 * c, 4: 8 * c**4 - 8 * c**2 + 1}[m]
    j = (m * GRID / math.pi).floor()
    torch.testing.assert_close(CosineAngle().psi(c, m), (-1) ** j * polynomial - 2 * j, rtol=0, atol=1e-10)


@each_m
def test_linear_psi_is_one_segment(m):
    torch.testing.assert_close(LinearAngle().psi(GRID.cos(), m), 1 - 2 * m * GRID / math.pi, rtol=0, atol=1e-7 * m)


@each_angle
def test_psi_with_margin_one_equals_g(name):
    angle = ANGLES[name][0]()
    assert torch.equal(angle.psi(GRID.cos(), 1), angle(GRID.cos()))


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("m", [2, 3, 4, 7, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_psi_between_segments_is_odd_integer(name, m, dtype):
    j = torch.arange(m + 1, dtype=dtype)
    value = ANGLES[name][0]().psi((j.double() * math.pi / m).cos().to(dtype), m)
    torch.testing.assert_close(value, 1 - 2 * j, rtol=0, atol=m * 1e-3 if dtype == torch.float32 else m * 1e-7)
    assert value[-1] == pytest.approx(1 - 2 * m, abs=1e-5)


@each_angle
@each_m
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_are_finite_between_segments(name, m, dtype):
    at = torch.arange(math.floor(m) + 1, dtype=torch.float64) * math.pi / m
    nudged = torch.stack([at, at - 1e-7, at + 1e-7, at - 1e-3, at + 1e-3]).clamp(0, math.pi)
    cosine = torch.cat([nudged.cos().flatten(), torch.tensor([0.0, 1.0, -1.0, 1.003, -1.003])])
    cosine = cosine.to(dtype).to(torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_()
    value = ANGLES[name][0]().psi(cosine, m)
    (gradient,) = torch.autograd.grad(value.sum(), cosine)
    assert value.isfinite().all()
    assert gradient.isfinite().all()
    assert (gradient >= 0).all()


@each_angle
@pytest.mark.parametrize("m", [1, 2.5, 4])
def test_psi_gradcheck(name, m):
    cosine = (torch.rand(7, 3, dtype=torch.float64) * 1.8 - 0.9).requires_grad_()
    angle = ANGLES[name][0]().double()
    assert torch.autograd.gradcheck(lambda c: angle.psi(c, m), cosine)
    assert torch.autograd.gradgradcheck(lambda c: angle.psi(c, m), cosine)


def test_psi_has_gradient_for_learned_k_of_each_class():
    angle = LearnableSigmoidAngle(3, dtype=torch.float64)
    with torch.no_grad():
        angle.raw_k.copy_(torch.tensor([-1.0, 0.0, 1.0]))
    cosine = torch.rand(5, 3, dtype=torch.float64) * 2 - 1
    value = angle.psi(cosine, 3)
    for index, k in enumerate(angle.k.tolist()):
        torch.testing.assert_close(value[:, index], SigmoidAngle(k).psi(cosine[:, index], 3))
    value.sum().backward()
    assert (angle.raw_k.grad != 0).all()


def test_is_same_for_all_filters():
    same = {name: make().is_same_for_all_filters for name, (make, _) in ANGLES.items()}
    assert [name for name, value in same.items() if not value] == ["halved"]
    assert not make_angle("learnable", num_filters=3).is_same_for_all_filters


def test_psi_of_own_function():
    class Steeper(AngleFunction):
        def forward(self, cosine):
            return LinearAngle()(cosine) * 2

    theta = torch.linspace(0.1, 3, 31, dtype=torch.float64)
    expected = torch.stack([reference_losses.psi(angle, 3, lambda t: 2 * (1 - 2 * t / math.pi)) for angle in theta])
    torch.testing.assert_close(Steeper().psi(theta.cos(), 3), expected, rtol=1e-6, atol=1e-6)
    assert not Steeper().is_same_for_all_filters


def test_additive_cosine_equals_formula():
    torch.testing.assert_close(additive_cosine(GRID.cos(), 0.35), GRID.cos() - 0.35)


@pytest.mark.parametrize("m", [0.0, 0.3, 0.5, 1.5, 3.0])
def test_additive_angle_equals_formula_up_to_pi(m):
    inside = GRID[math.pi - m >= GRID]
    torch.testing.assert_close(additive_angle(inside.cos(), m), (inside + m).cos(), rtol=0, atol=1e-7)


@pytest.mark.parametrize("m", [0.0, 0.3, 0.5, 1.5, 3.0])
def test_additive_angle_decreases_beyond_pi(m):
    value = additive_angle(GRID.cos(), m)
    assert (value.diff() < 0).all()
    assert value.diff().abs().max() <= 1.001 * GRID.diff().max()


def test_additive_angle_has_finite_gradients():
    cosine = torch.tensor([1.0, -1.0, 1.003, -1.003, math.cos(math.pi - 0.5), 0.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(additive_angle(cosine, 0.5).sum(), cosine)
    assert gradient.isfinite().all()
    assert (gradient >= 0).all()
