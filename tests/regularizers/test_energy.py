"""Hyperspherical energy: value, gradient, numerics, invalid arguments."""

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call

from spherenet.layers import SphereConv1d, SphereConv2d, SphereConv3d, SphereLinear
from spherenet.regularizers import hyperspherical_energy
from spherenet.regularizers.energy import SOFTENING

LAYERS = {
    "linear": lambda: SphereLinear(5, 4, dtype=torch.float64),
    "more kernels than fan-in": lambda: SphereLinear(2, 7, dtype=torch.float64),
    "conv1d": lambda: SphereConv1d(2, 4, 3, dtype=torch.float64),
    "conv2d": lambda: SphereConv2d(3, 4, 2, dtype=torch.float64),
    "conv3d": lambda: SphereConv3d(2, 3, 2, dtype=torch.float64),
    "groups": lambda: SphereConv2d(4, 6, 3, groups=2, dtype=torch.float64),
}

FORMS = [(s, half, distance) for s in (0, 1, 2, 0.5) for half in (False, True) for distance in ("chord", "angle")]


def slow_energy(layer, s, half_space, distance):
    """Return the mean over ordered pairs of points, computed pair by pair; with half_space the points are ±w."""
    groups = getattr(layer, "groups", 1)
    energies = []
    for group in layer.weight.chunk(groups):
        points = [(i, k.flatten() / k.square().sum().sqrt()) for i, k in enumerate(group)]
        if half_space:
            points += [(i, -p) for i, p in points]
        for i, a in points:
            for j, b in points:
                if i != j:
                    cosine = (a * b).sum()
                    squared = (2 - 2 * cosine if distance == "chord" else cosine.acos() ** 2) + SOFTENING
                    energies.append(-squared.sqrt().log() if s == 0 else squared.sqrt() ** -s)
    return torch.stack(energies).mean()


def with_weight(layer, rows):
    with torch.no_grad():
        layer.weight.copy_(torch.as_tensor(rows, dtype=layer.weight.dtype))
    return layer


@pytest.mark.parametrize(("s", "half_space", "distance"), FORMS)
@pytest.mark.parametrize("name", LAYERS)
def test_equals_a_double_loop_in_value_and_gradient(name, s, half_space, distance):
    layer = LAYERS[name]()
    value = hyperspherical_energy(layer, s, half_space, distance=distance)
    expected = slow_energy(layer, s, half_space, distance)
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)
    got, wanted = (torch.autograd.grad(v, layer.weight)[0] for v in (value, expected))
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize(("s", "half_space", "distance"), FORMS)
def test_gradcheck(s, half_space, distance):
    class Energy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([SphereConv2d(2, 4, 2, groups=2, dtype=torch.float64)])

        def forward(self):
            return hyperspherical_energy(self.layers, s, half_space, distance=distance)

    energy = Energy()
    weight = energy.layers[0].weight.detach().clone().requires_grad_()

    def of_weight(w):
        return functional_call(energy, {"layers.0.weight": w}, ())

    assert torch.autograd.gradcheck(of_weight, weight)
    assert torch.autograd.gradgradcheck(of_weight, weight)


@pytest.mark.parametrize(
    ("s", "half_space", "distance", "expected"),
    [
        (2, False, "chord", 1 / 2),  # orthogonal kernels are √2 apart
        (1, False, "chord", 2**-0.5),
        (0, False, "chord", -math.log(2) / 2),
        (2, True, "chord", 1 / 2),
        (1, False, "angle", 2 / math.pi),
        (2, True, "angle", (2 / math.pi) ** 2),
    ],
)
def test_orthogonal_kernels_computed_by_hand(s, half_space, distance, expected):
    layer = with_weight(SphereLinear(3, 3), 4 * torch.eye(3))
    value = hyperspherical_energy(layer, s, half_space, distance=distance).item()
    assert value == pytest.approx(expected, rel=2e-4, abs=1e-4)


def test_opposite_kernels_are_far_apart_unless_half_space():
    layer = with_weight(SphereLinear(2, 2), [[5.0, 0.0], [-5.0, 0.0]])
    assert hyperspherical_energy(layer).item() == pytest.approx(1 / 4, rel=1e-3)
    assert hyperspherical_energy(layer, half_space=True).item() > 1000


def test_mean_over_layers_not_over_pairs():
    small, large = SphereLinear(4, 2, dtype=torch.float64), SphereLinear(4, 9, dtype=torch.float64)
    grouped = SphereConv1d(4, 6, 1, groups=2, dtype=torch.float64)
    alone = [hyperspherical_energy(layer) for layer in (small, large, grouped)]
    torch.testing.assert_close(hyperspherical_energy(nn.Sequential(small, large, grouped)), sum(alone) / 3)


def test_layers_of_the_same_kernel_shape_with_different_groups():
    plain = SphereLinear(3, 4, dtype=torch.float64)
    grouped = SphereConv1d(6, 8, 1, groups=2, dtype=torch.float64)  # two groups of four kernels with fan-in 3
    alone = [hyperspherical_energy(layer) for layer in (plain, grouped)]
    torch.testing.assert_close(hyperspherical_energy([plain, grouped]), sum(alone) / 2)


def test_layers_without_pairs_are_left_out():
    layer = SphereLinear(4, 3)
    single, depthwise = SphereLinear(4, 1), SphereConv2d(4, 4, 3, groups=4)
    for half_space in (False, True):
        value = hyperspherical_energy(layer, half_space=half_space)
        assert hyperspherical_energy([layer, single, depthwise], half_space=half_space) == value
        with pytest.warns(UserWarning, match="the penalty is 0, because model has no pair of kernels to include"):
            nothing = hyperspherical_energy([single, depthwise], half_space=half_space)
        assert nothing.item() == 0
        assert not nothing.requires_grad
    with pytest.warns(UserWarning, match="the penalty is 0"):
        assert hyperspherical_energy(nn.Linear(3, 3)).item() == 0


def test_tied_weights_count_once():
    layer, other = SphereLinear(4, 3), SphereLinear(4, 3)
    value = hyperspherical_energy([layer, other])
    tied = SphereLinear(4, 3)
    tied.weight = layer.weight
    torch.testing.assert_close(hyperspherical_energy(nn.Sequential(layer, tied, other, layer)), value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("s", "half_space", "distance"), FORMS)
def test_equal_opposite_zero_and_huge_kernels_are_finite(s, half_space, distance, dtype):
    huge = 6e4 if dtype == torch.float16 else 1e30
    rows = [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [-1.0, -2.0, -3.0], [0.0, 0.0, 0.0], [huge, -huge, 0.0]]
    layer = with_weight(SphereLinear(3, 5, dtype=dtype), rows)
    value = hyperspherical_energy(layer, s, half_space, distance=distance)
    value.backward()
    assert value.isfinite()
    assert layer.weight.grad.isfinite().all()


def test_largest_s_does_not_overflow_float32():
    layer = with_weight(SphereLinear(3, 2), [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    value = hyperspherical_energy(layer, s=8, half_space=True)
    value.backward()
    assert value.isfinite()
    assert layer.weight.grad.isfinite().all()


def test_training_separates_near_copies():
    layer = with_weight(SphereLinear(3, 2), [[1.0, 0.0, 0.0], [1.0, 1e-3, 0.0]])
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    for _ in range(300):
        optimizer.zero_grad()
        hyperspherical_energy(layer, s=0).backward()
        optimizer.step()
    assert torch.cosine_similarity(layer.weight[0], layer.weight[1], dim=0) < 0.9


def test_training_spreads_more_kernels_than_fan_in():
    layer = SphereLinear(2, 6)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
    for _ in range(400):
        optimizer.zero_grad()
        value = hyperspherical_energy(layer, s=1)
        value.backward()
        optimizer.step()
    # Six points on a circle have the smallest energy when they are 60° apart.
    best = sum(1 / (2 * math.sin(math.pi * j / 6)) for j in range(1, 6)) / 5
    assert value.item() == pytest.approx(best, rel=1e-3)


def test_autocast_and_half_precision_are_computed_in_float32():
    model = nn.Sequential(SphereConv2d(3, 8, 3), SphereConv2d(8, 8, 3))
    value = hyperspherical_energy(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(hyperspherical_energy(model), value)
    half = hyperspherical_energy(model.bfloat16())
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, value, rtol=1e-2, atol=0)


def test_scale_of_kernels_has_no_influence():
    layer = SphereLinear(5, 4)
    before = hyperspherical_energy(layer)
    with torch.no_grad():
        layer.weight.mul_(torch.tensor([[0.5], [3.0], [10.0], [1000.0]]))
    torch.testing.assert_close(hyperspherical_energy(layer), before)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"s": -1}, ValueError, "s must be from 0 to 8, got -1"),
        ({"s": 9}, ValueError, "s must be from 0 to 8, got 9"),
        ({"s": math.nan}, ValueError, "s must be finite, got nan"),
        ({"s": "2"}, TypeError, "s must be a number, got '2'"),
        ({"distance": "angular"}, ValueError, "distance must be one of 'chord', 'angle', got 'angular'"),
    ],
)
def test_invalid_arguments(arguments, error, words):
    with pytest.raises(error, match=words):
        hyperspherical_energy(SphereLinear(2, 2), **arguments)


def test_model_must_be_a_module():
    with pytest.raises(TypeError, match="model must be a module or several modules, got None"):
        hyperspherical_energy(None)


def fixed_generator():
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize("half_space", [False, True])
def test_compressed_energy_is_that_of_projected_kernels(half_space):
    layer = SphereLinear(20, 6, dtype=torch.float64)
    value = hyperspherical_energy(
        layer, half_space=half_space, compressed_dim=4, projections=3, generator=fixed_generator()
    )
    draw, energies = fixed_generator(), []
    for _ in range(3):
        projected = SphereLinear(4, 6, dtype=torch.float64)
        with torch.no_grad():
            projected.weight.copy_(layer.weight @ torch.randn(20, 4, generator=draw, dtype=torch.float64) / 2)
        energies.append(hyperspherical_energy(projected, half_space=half_space))
    torch.testing.assert_close(value, torch.stack(energies).mean())
    value.backward()
    assert layer.weight.grad.any()


def test_no_projection_if_the_fan_in_is_not_larger():
    layer = SphereLinear(4, 6)
    assert torch.equal(hyperspherical_energy(layer, compressed_dim=4), hyperspherical_energy(layer))


@pytest.mark.parametrize("options", [{"compressed_dim": 0}, {"compressed_dim": 4, "projections": 0}])
def test_invalid_compression(options):
    with pytest.raises(ValueError, match=r"must be at least 1, got 0\."):
        hyperspherical_energy(SphereLinear(8, 6), **options)
