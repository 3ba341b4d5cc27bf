"""`Hyperball`: each step rotates a weight by exactly the learning rate, whatever optimizer chooses the direction."""

import copy
import math

import pytest
import torch
from torch import nn

import spherenet as sn
from spherenet.optim import Hyperball

INNER = {"sgd": {"momentum": 0.9}, "adam": {}, "adamw": {"weight_decay": 0.1}, "muon": {"momentum": 0.6}}


def gradient_of(shape, seed, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def walk(weight, optimizer, steps, factor=1.0, first=0):
    """Make steps on random gradients and return the angles by which the whole weight rotated."""
    angles = []
    for seed in range(first, first + steps):
        before = weight.detach().clone().flatten()
        weight.grad = factor * gradient_of(weight.shape, seed, weight.dtype)
        optimizer.step()
        after = weight.detach().flatten()
        chord = (before / before.norm() - after / after.norm()).norm()
        angles.append(2 * torch.asin(chord / 2).item())
    return angles


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("lr", [1e-4, 0.05, 1.0])
def test_every_step_rotates_by_the_learning_rate(inner, lr):
    weight = nn.Parameter(7 * gradient_of((8, 3, 3, 3), 100))
    norm = weight.detach().norm().item()
    angles = walk(weight, Hyperball([weight], inner, lr=lr, **INNER[inner]), 6)
    assert angles == pytest.approx([lr] * 6, rel=1e-6)
    assert weight.detach().norm().item() == pytest.approx(norm, rel=1e-12)


@pytest.mark.parametrize("inner", INNER)
def test_filters_rotate_one_by_one(inner):
    weight = nn.Parameter(gradient_of((8, 3, 3, 3), 100))
    norms = weight.detach().flatten(1).norm(dim=1)
    optimizer = Hyperball([weight], inner, lr=0.05, scope="filter", **INNER[inner])
    for seed in range(5):
        before = weight.detach().clone().flatten(1)
        weight.grad = gradient_of(weight.shape, seed)
        optimizer.step()
        cosine = torch.cosine_similarity(before, weight.detach().flatten(1))
        torch.testing.assert_close(cosine.acos(), torch.full((8,), 0.05, dtype=torch.float64))
        torch.testing.assert_close(weight.detach().flatten(1).norm(dim=1), norms)


def test_norms_stay_constant_in_float32():
    weight = nn.Parameter(torch.randn(16, 64))
    norm = weight.detach().norm().item()
    walk(weight, Hyperball([weight], "adam", lr=0.1), 50)
    assert weight.detach().norm().item() == pytest.approx(norm, rel=1e-6)


def test_direction_is_that_of_the_inner_optimizer():
    """One step of SGD: the great circle through w along the tangential part of −∇."""
    start, gradient = gradient_of((4, 6), 1), gradient_of((4, 6), 2)
    weight = nn.Parameter(start.clone())
    weight.grad = gradient.clone()
    Hyperball([weight], "sgd", lr=0.3).step()
    unit = start / start.norm()
    tangent = gradient - unit * (unit * gradient).sum()
    expected = start.norm() * (math.cos(0.3) * unit - math.sin(0.3) * tangent / tangent.norm())
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("inner", ["sgd", "muon"])
def test_trajectory_does_not_depend_on_the_scale_of_the_gradient(inner):
    ends = []
    for factor in (1.0, 1e-12, 1e12):
        weight = nn.Parameter(gradient_of((4, 6), 100))
        options = dict(INNER[inner])
        walk(weight, Hyperball([weight], inner, lr=0.1, **options), 5, factor if inner == "sgd" else factor**0.25)
        ends.append(weight.detach())
    torch.testing.assert_close(ends[1], ends[0])
    torch.testing.assert_close(ends[2], ends[0])


@pytest.mark.parametrize("inner", INNER)
def test_resumed_run_is_bit_identical(inner):
    weight = nn.Parameter(torch.randn(6, 10))
    optimizer = Hyperball([weight], inner, lr=0.05, **INNER[inner])
    walk(weight, optimizer, 3)
    copied = nn.Parameter(weight.detach().clone())
    resumed = Hyperball([copied], inner, **INNER[inner])
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for parameter, trainer in ((weight, optimizer), (copied, resumed)):
        walk(parameter, trainer, 3, first=3)
    assert torch.equal(weight, copied)


def test_norms_of_half_precision_weights_survive_a_state_dict():
    weight = nn.Parameter(torch.randn(6, 10).bfloat16())
    optimizer = Hyperball([weight], "sgd", lr=0.05)
    walk(weight, optimizer, 2)
    resumed = Hyperball([weight], "sgd")
    resumed.load_state_dict(optimizer.state_dict())
    assert torch.equal(resumed.state[weight]["radius"], optimizer.state[weight]["radius"])
    assert resumed.state[weight]["radius"].dtype == torch.float32


def test_schedulers_and_copies_work():
    layer = sn.SphereLinear(6, 5)
    optimizer = Hyperball(layer.parameters(), "adam", lr=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.5, 2)
    clone = copy.deepcopy(optimizer)
    for _ in range(2):
        layer(torch.randn(3, 6)).sum().backward()
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    assert clone.param_groups[0]["lr"] == pytest.approx(0.1)


def test_zero_update_and_radial_update_change_nothing():
    weight = nn.Parameter(torch.randn(4, 5))
    before = weight.detach().clone()
    optimizer = Hyperball([weight], "sgd", lr=0.1)
    for gradient in (torch.zeros(4, 5), 2 * before):
        weight.grad = gradient.clone()
        optimizer.step()
        torch.testing.assert_close(weight.detach(), before, rtol=1e-6, atol=0)


def test_gradient_that_is_not_finite_shows():
    weight = nn.Parameter(torch.randn(4, 5))
    weight.grad = torch.full((4, 5), float("nan"))
    Hyperball([weight], "sgd", lr=0.1).step()
    assert weight.isnan().any()


def test_failing_inner_step_leaves_the_weights():
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("out of memory")

    weight = nn.Parameter(torch.randn(4, 5))
    before = weight.detach().clone()
    weight.grad = torch.ones(4, 5)
    with pytest.raises(RuntimeError, match="out of memory"):
        Hyperball([weight], Failing, lr=0.1).step()
    assert torch.equal(weight, before)


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        (torch.ones(3), {}, r"^params must have two dimensions or more for Hyperball, got shape \[3\]"),
        (torch.zeros(3, 4), {}, r"^params must be finite and not zero for Hyperball, .* shape \[3, 4\]"),
        (
            torch.full((3, 4), torch.nan),
            {},
            r"^params must be finite and not zero for Hyperball, .* largest entry is nan",
        ),
        (torch.ones(3, 4), {"lr": -0.1}, r"^lr must be at least 0, got -0\.1\.$"),
        (torch.ones(3, 4), {"scope": "row"}, "^scope must be one of"),
        (torch.ones(3, 4), {"inner": "lion"}, "^inner must be one of"),
        (torch.ones(3, 4), {"inner": "muon", "norm": "filter"}, "^norm must be None inside Hyperball"),
    ],
)
def test_bad_arguments_are_refused(values, options, message):
    with pytest.raises(ValueError, match=message):
        Hyperball([nn.Parameter(values)], **options)
