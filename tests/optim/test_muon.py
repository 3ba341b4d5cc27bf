"""`Muon`: orthogonalized momentum against a slow oracle with singular values, kept norms, resumed runs, bad input."""

import copy
import math

import pytest
import torch
from torch import nn

import spherenet as sn
from spherenet.optim import Muon, orthogonalize
from spherenet.optim.muon import COEFFICIENTS

SHAPES = ((6, 20), (20, 6), (5, 5), (1, 7), (7, 1), (8, 3, 3, 3), (4, 6, 5), (3, 2, 2, 2, 2))


def oracle(matrix, steps):
    """Apply the polynomial of the iteration to the singular values, in float64."""
    a, b, c = COEFFICIENTS
    u, s, vt = torch.linalg.svd(matrix.double() / matrix.double().norm(), full_matrices=False)
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ vt


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if len(shape) == 2])
@pytest.mark.parametrize("steps", [1, 3, 5])
def test_iterations_apply_a_polynomial_to_the_singular_values(shape, steps):
    matrix = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(orthogonalize(matrix, steps), oracle(matrix, steps), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(orthogonalize(matrix.float(), steps).double(), oracle(matrix, steps), rtol=0, atol=2e-5)


def test_singular_values_end_near_one():
    singular = torch.linalg.svdvals(orthogonalize(torch.randn(40, 90)))
    assert singular.min() > 0.6
    assert singular.max() < 1.25


def test_zero_stays_zero_and_scale_does_not_matter():
    assert orthogonalize(torch.zeros(3, 5)).eq(0).all()
    matrix = torch.randn(6, 9, dtype=torch.float64)
    torch.testing.assert_close(orthogonalize(1e-4 * matrix), orthogonalize(matrix))


def slow_steps(weight, gradients, lr, momentum, nesterov, norm, steps):
    """The update of the docstring in float64, with the oracle's orthogonalization."""
    weight, rows = weight.double().clone(), len(weight)
    buffer = torch.zeros_like(weight)

    def scaled(values):
        if norm == "frobenius":
            return values * rows**0.5 / values.norm()
        if norm == "filter":
            return values / values.flatten(1).norm(dim=1).view(-1, *[1] * (values.dim() - 1))
        return values

    weight = scaled(weight)
    for gradient in gradients:
        buffer = momentum * buffer + gradient.double()
        direction = gradient.double() + momentum * buffer if nesterov else buffer
        weight = scaled(weight - lr * oracle(direction.flatten(1), steps).view(weight.shape))
    return weight


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("norm", [None, "frobenius", "filter"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_agree_with_the_oracle(shape, norm, nesterov):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator, dtype=torch.float64)
    gradients = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4)]
    weight = nn.Parameter(start.clone())
    optimizer = Muon([weight], lr=0.1, momentum=0.6, nesterov=nesterov, norm=norm, steps=3)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    expected = slow_steps(start, gradients, 0.1, 0.6, nesterov, norm, 3)
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-8, atol=1e-10)


def test_channels_last_weights_take_the_same_steps():
    start = torch.randn(8, 4, 3, 3, dtype=torch.float64)
    weights = [nn.Parameter(start.clone()), nn.Parameter(start.clone(memory_format=torch.channels_last))]
    for weight in weights:
        optimizer = Muon([weight], lr=0.1)
        for seed in range(3):
            gradient = torch.randn(start.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            weight.grad = gradient.to(
                memory_format=torch.channels_last if weight is weights[1] else torch.contiguous_format
            )
            optimizer.step()
    assert weights[1].is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(weights[0].detach(), weights[1].detach())


def test_matrices_take_the_steps_of_torch():
    """torch computes in bfloat16, and scales the rate of tall matrices by √(rows/columns)."""
    start = torch.randn(12, 30)
    own, other = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizers = Muon([own], lr=0.1, weight_decay=0.1), torch.optim.Muon([other], lr=0.1, weight_decay=0.1)
    for seed in range(5):
        gradient = torch.randn(start.shape, generator=torch.Generator().manual_seed(seed))
        for weight, optimizer in zip((own, other), optimizers, strict=True):
            weight.grad = gradient.clone()
            optimizer.step()
    difference = (own - other).norm() / (own - start).norm()
    assert difference < 0.02


@pytest.mark.parametrize("norm", ["frobenius", "filter"])
def test_norms_stay_constant(norm):
    weight = nn.Parameter(torch.randn(16, 8, 3, 3))
    optimizer = Muon([weight], lr=0.3, norm=norm)
    for seed in range(20):
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
        optimizer.step()
        assert weight.norm().item() == pytest.approx(4, rel=1e-6)
        if norm == "filter":
            torch.testing.assert_close(weight.detach().flatten(1).norm(dim=1), torch.ones(16), rtol=1e-6, atol=0)


def test_step_turns_a_weight_by_about_the_arctangent_of_the_rate():
    for shape in ((16, 8, 3, 3), (64, 32, 3, 3), (32, 128)):
        weight = nn.Parameter(torch.randn(shape))
        optimizer = Muon([weight], lr=0.24, norm="frobenius")
        weight.grad = torch.zeros(shape)
        optimizer.step()
        before = weight.detach().clone()
        weight.grad = torch.randn(shape)
        optimizer.step()
        angle = torch.cosine_similarity(before.flatten(), weight.detach().flatten(), dim=0).acos().item()
        assert angle == pytest.approx(math.atan(0.24), rel=0.25)


def test_trajectory_does_not_depend_on_the_scale_of_the_gradient():
    ends = []
    for factor in (1.0, 1e-3, 1e3):
        weight = nn.Parameter(torch.arange(24, dtype=torch.float64).sin().view(4, 6))
        optimizer = Muon([weight], lr=0.1)
        for seed in range(5):
            gradient = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            weight.grad = factor * gradient
            optimizer.step()
        ends.append(weight.detach())
    torch.testing.assert_close(ends[1], ends[0])
    torch.testing.assert_close(ends[2], ends[0])


def loss_of(layer, seed):
    images = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
    return layer(images).square().mean() - layer(images).mean()


def test_resumed_run_is_bit_identical():
    torch.manual_seed(0)
    layer = sn.SphereConv2d(3, 8, 3)
    optimizer = Muon(layer.parameters(), lr=0.1, norm="filter")
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, 6)
    for step in range(6):
        if step == 3:
            resumed_layer = copy.deepcopy(layer)
            resumed = Muon(resumed_layer.parameters())
            resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            resumed_schedule = torch.optim.lr_scheduler.LinearLR(resumed, 1, 0, 6)
            resumed_schedule.load_state_dict(schedule.state_dict())
        pairs = [(layer, optimizer, schedule)]
        if step >= 3:
            pairs.append((resumed_layer, resumed, resumed_schedule))
        for network, trainer, rate in pairs:
            trainer.zero_grad()
            loss_of(network, step).backward()
            trainer.step()
            rate.step()
    assert torch.equal(layer.weight, resumed_layer.weight)


def test_parameter_without_gradient_is_left_alone():
    weight = nn.Parameter(torch.randn(3, 4))
    before = weight.detach().clone()
    Muon([weight], norm="filter").step()
    assert torch.equal(weight, before)


def test_closure_returns_its_loss():
    weight = nn.Parameter(torch.randn(3, 4))
    optimizer = Muon([weight])

    def closure():
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == pytest.approx(closure().item(), rel=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_keep_their_dtype(dtype):
    weight = nn.Parameter(torch.randn(6, 8, 3, 3).to(dtype))
    weight.grad = torch.randn(weight.shape).to(dtype)
    Muon([weight], lr=0.1, norm="frobenius").step()
    assert weight.dtype == dtype
    assert weight.float().norm().item() == pytest.approx(6**0.5, rel=2e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1}, r"^lr must be at least 0, got -1\.$"),
        ({"momentum": 1.0}, r"^momentum must be less than 1, got 1\.0\.$"),
        ({"steps": 0}, "^steps must be"),
        ({"norm": "rows"}, "^norm must be one of"),
        ({"norm": "filter", "weight_decay": 0.1}, "^weight_decay must be 0 if norms are kept"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Muon([nn.Parameter(torch.randn(3, 4))], **options)


def test_vectors_are_refused_with_their_name():
    with pytest.raises(
        ValueError, match=r"^params\['1.bias'\] must have two dimensions or more for Muon, got shape \[2\]"
    ):
        Muon(nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 2)).named_parameters())
