"""Regularizers of heads and plain layers: which layers are included, their weights, kernels of transposed layers."""

import pytest
import torch
from torch import nn

from spherenet.layers import AngularHead, SphereConv2d, SphereLinear
from spherenet.regularizers import hyperspherical_energy, orthogonality, orthogonality_minimum
from spherenet.regularizers.kernels import INCLUDE, kernel_matrix, layers_with_kernels


@pytest.fixture
def model():
    layers = {
        "conv": nn.Conv2d(3, 4, 3, groups=1),
        "sphere": SphereConv2d(4, 6, 3, groups=2),
        "linear": nn.Linear(6, 5),
        "sphere_linear": SphereLinear(5, 5),
        "norm": nn.BatchNorm1d(5),
        "head": AngularHead(5, 7),
    }
    return nn.ModuleDict(layers).double()


NAMES = {"sphere": ["sphere", "sphere_linear"], "head": ["head"], "plain": ["conv", "linear"]}


@pytest.mark.parametrize(
    "include",
    [
        ("sphere",),
        ("head",),
        ("plain",),
        ("sphere", "head"),
        ("head", "plain"),
        ("plain", "sphere"),
        INCLUDE,
        (),
        "head",
    ],
    ids=str,
)
def test_included_layers(model, include):
    chosen = [include] if isinstance(include, str) else include
    names = {name for choice in chosen for name in NAMES[choice]}
    assert set(layers_with_kernels(model, include)) == names
    for form in ("raw", "normalized"):
        expected = sum(orthogonality(model[name], form, include=INCLUDE) for name in names)
        torch.testing.assert_close(orthogonality(model, form, include=include), torch.as_tensor(expected).double())
        minimum = sum(orthogonality_minimum(model[name], form, include=INCLUDE) for name in names)
        assert orthogonality_minimum(model, form, include=include) == pytest.approx(minimum)


def test_orthogonality_of_class_weights_equals_the_formula(model):
    weight = model["head"].weight
    expected = (weight @ weight.T - torch.eye(7)).square().sum()
    value = orthogonality(model, include=("head",))
    torch.testing.assert_close(value, expected)
    (gradient,) = torch.autograd.grad(value, weight)
    torch.testing.assert_close(gradient, 4 * (weight @ weight.T - torch.eye(7)) @ weight)


def test_default_is_the_mean_over_sphere_layers(model):
    expected = (hyperspherical_energy(model["sphere"]) + hyperspherical_energy(model["sphere_linear"])) / 2
    torch.testing.assert_close(hyperspherical_energy(model), expected)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("hidden", "output"), [(1.0, 10.0), (0.5, 2.0), (0.0, 1.0), (1.0, 0.0)])
def test_energy_weights_hidden_layers_and_heads(model, reduction, hidden, output):
    energies = {
        name: hyperspherical_energy(model[name], include=INCLUDE, output_weight=1.0) for name in NAMES["sphere"]
    }
    energies |= {name: hyperspherical_energy(model[name], include=INCLUDE) for name in NAMES["plain"]}
    of_hidden = torch.stack(list(energies.values()))
    of_head = hyperspherical_energy(model["head"], include=("head",), output_weight=1.0)
    expected = hidden * (of_hidden.mean() if reduction == "mean" else of_hidden.sum()) + output * of_head
    value = hyperspherical_energy(
        model, include=INCLUDE, hidden_weight=hidden, output_weight=output, reduction=reduction
    )
    torch.testing.assert_close(value, expected)


def test_published_weights_are_1_and_10(model):
    value = hyperspherical_energy(model, include=("sphere", "head"))
    expected = hyperspherical_energy(model, include=("sphere", "head"), hidden_weight=1, output_weight=10)
    assert torch.equal(value, expected)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_kernels_of_a_transposed_convolution_belong_to_output_channels(groups, layout):
    layer = nn.ConvTranspose2d(4, 6, 3, groups=groups).to(memory_format=layout)
    matrix = kernel_matrix(layer)
    assert matrix.shape == (groups, 6 // groups, 4 // groups * 9)
    for channel in range(6):
        group, index = divmod(channel, 6 // groups)
        inputs = slice(group * 4 // groups, (group + 1) * 4 // groups)
        kernel = layer.weight[inputs, index].flatten()
        assert matrix[group, index].sort().values.equal(kernel.sort().values)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"include": ("heads",)}, "include must be one of 'sphere', 'head', 'plain', got 'heads'"),
        ({"hidden_weight": -1}, "hidden_weight must be at least 0, got -1"),
        ({"output_weight": float("nan")}, "output_weight must be finite, got nan"),
        ({"reduction": "none"}, "reduction must be one of 'mean', 'sum', got 'none'"),
    ],
)
def test_invalid_arguments(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        hyperspherical_energy(model, **arguments)
