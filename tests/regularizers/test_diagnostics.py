"""Diagnostics of the kernels of sphere layers: angles, k, norms, JSON."""

import itertools
import json
import math

import pytest
import torch
from torch import nn

from spherenet.angles import LearnableSigmoidAngle
from spherenet.layers import SphereConv2d, SphereLinear
from spherenet.regularizers import (
    KernelNorms,
    hyperspherical_energy,
    k_values,
    kernel_angles,
    layer_diagnostics,
    orthogonality,
)
from spherenet.regularizers import diagnostics as diagnostics_module


def with_weight(layer, rows):
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(rows).reshape(layer.weight.shape))
    return layer


def test_angles_computed_by_hand():
    layer = with_weight(SphereLinear(2, 3), [[2.0, 0.0], [0.0, 5.0], [-1.0, -1.0]])
    angles = kernel_angles(layer, bins=4)["SphereLinear"]
    assert angles["min"] == pytest.approx(math.pi / 2)
    assert angles["max"] == pytest.approx(3 * math.pi / 4)
    assert angles["mean"] == pytest.approx((math.pi / 2 + 2 * 3 * math.pi / 4) / 3)
    assert angles["pairs"] == 3
    assert angles["kernels_without_direction"] == 0
    assert angles["histogram"]["edges"] == pytest.approx([0, math.pi / 4, math.pi / 2, 3 * math.pi / 4, math.pi])
    assert sum(angles["histogram"]["counts"]) == 3


@pytest.mark.parametrize("rows_at_a_time", [3, 1024])
def test_angles_equal_a_loop_over_pairs_within_groups(rows_at_a_time, monkeypatch):
    monkeypatch.setattr(diagnostics_module, "_ROWS_AT_A_TIME", rows_at_a_time)
    layer = SphereConv2d(4, 16, 3, groups=2)
    expected = []
    for group in layer.weight.detach().double().chunk(2):
        for a, b in itertools.combinations(group.flatten(1), 2):
            expected.append(math.acos((a @ b / (a.norm() * b.norm())).item()))
    angles = kernel_angles(layer)["SphereConv2d"]
    assert angles["pairs"] == len(expected) == 2 * 28
    assert (angles["min"], angles["max"]) == pytest.approx((min(expected), max(expected)))
    assert angles["mean"] == pytest.approx(sum(expected) / len(expected))
    width = math.pi / 18
    assert angles["histogram"]["counts"] == [sum(int(e / width) == i for e in expected) for i in range(18)]


def test_copies_have_angle_zero():
    layer = SphereLinear(500, 2)
    with torch.no_grad():
        layer.weight[1] = 3 * layer.weight[0]
    assert kernel_angles(layer)["SphereLinear"]["max"] < 1e-6


def test_kernels_without_direction_are_counted():
    layer = with_weight(SphereLinear(2, 5), [[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [math.nan, 0.0], [math.inf, 1.0]])
    angles = kernel_angles(layer)["SphereLinear"]
    assert angles["kernels_without_direction"] == 3
    assert angles["min"] == angles["max"] == pytest.approx(math.pi / 2)
    alone = kernel_angles(SphereLinear(2, 1))["SphereLinear"]
    assert alone["min"] is alone["mean"] is alone["max"] is None
    assert alone["pairs"] == sum(alone["histogram"]["counts"]) == 0


def test_k_values():
    shared = LearnableSigmoidAngle(k=0.8)
    model = nn.ModuleDict(
        {
            "filter": SphereConv2d(3, 4, 3, operator="learnable", k=0.5),
            "layer": SphereConv2d(3, 4, 3, operator="learnable", k_sharing="layer", k=2.0),
            "fixed": SphereLinear(4, 2, operator="sigmoid", k=0.3),
            "one": SphereLinear(4, 2, operator=shared),
            "two": SphereLinear(4, 2, operator=shared),
            "cosine": SphereLinear(4, 2),
        }
    )
    values = k_values(model, bins=10)
    assert list(values) == ["filter", "layer", "fixed", "one", "two"]
    assert values["filter"]["values"] == pytest.approx([0.5] * 4)
    assert values["layer"]["values"] == pytest.approx([2.0])
    assert values["layer"]["histogram"]["edges"][-1] == pytest.approx(2)
    assert values["fixed"]["values"] == [0.3]
    assert values["one"] == values["two"]
    assert values["filter"]["histogram"]["edges"] == pytest.approx([i / 10 for i in range(11)])
    assert sum(values["filter"]["histogram"]["counts"]) == 4
    assert values["fixed"]["histogram"]["counts"][2:4].count(1) == 1
    assert (values["one"]["min"], values["one"]["mean"], values["one"]["max"]) == pytest.approx((0.8,) * 3)


def test_k_values_include_the_power_of_sharpened_cosine():
    model = nn.Sequential(SphereLinear(4, 2, operator="sharpened-cosine"), SphereLinear(2, 2, operator="learnable"))
    values = k_values(model)
    assert [entry["parameter"] for entry in values.values()] == ["p", "k"]
    assert values["0"]["values"] == pytest.approx([2.0] * 2)
    assert values["0"]["histogram"]["edges"][-1] == pytest.approx(2)
    assert layer_diagnostics(model)["0"]["k_mean"] == pytest.approx(2.0)


def test_norm_growth_is_relative_to_the_snapshot():
    model = nn.Sequential(SphereLinear(4, 3), nn.ReLU(), SphereConv2d(2, 4, 3))
    norms = KernelNorms(model)
    assert all(g == {"min": 1.0, "mean": 1.0, "max": 1.0} for g in norms.growth(model).values())
    with torch.no_grad():
        model[0].weight[0].mul_(3)
        model[2].weight.mul_(2)
    growth = norms.growth(model)
    assert growth["0"] == pytest.approx({"min": 1, "mean": (3 + 1 + 1) / 3, "max": 3})
    assert growth["2"] == pytest.approx({"min": 2, "mean": 2, "max": 2})


def test_norm_growth_ignores_kernels_that_started_at_zero():
    layer = with_weight(SphereLinear(1, 2), [[0.0], [2.0]])
    norms = KernelNorms(layer)
    with_weight(layer, [[5.0], [3.0]])
    assert norms.growth(layer)["SphereLinear"]["max"] == 1.5
    zero = with_weight(SphereLinear(1, 2), [[0.0], [0.0]])
    assert KernelNorms(zero).growth(zero)["SphereLinear"] == {"min": None, "mean": None, "max": None}


def test_norms_can_be_saved_and_reject_another_model(tmp_path):
    model = nn.Sequential(SphereLinear(4, 3))
    norms = KernelNorms(model)
    torch.save(norms.state_dict(), tmp_path / "norms.pt")
    with torch.no_grad():
        model[0].weight.mul_(5)
    resumed = KernelNorms(model)
    resumed.load_state_dict(torch.load(tmp_path / "norms.pt", weights_only=True))
    assert resumed.growth(model) == norms.growth(model)
    for other in (nn.Sequential(SphereLinear(4, 2)), nn.Sequential(nn.ReLU(), SphereLinear(4, 3))):
        with pytest.raises(ValueError, match="model must have the sphere layers of the snapshot"):
            norms.growth(other)
        with pytest.raises(ValueError, match="state must have the sphere layers of the snapshot"):
            norms.load_state_dict(KernelNorms(other).state_dict())


def test_layer_diagnostics():
    model = nn.Sequential(SphereConv2d(3, 8, 1, operator="learnable"), nn.Conv2d(8, 8, 1), SphereLinear(8, 4))
    norms = KernelNorms(model)
    numbers = layer_diagnostics(model, norms, form="normalized", s=1)
    assert list(numbers) == ["0", "2"]
    first, last = numbers["0"], numbers["2"]
    assert (first["kernels"], first["fan_in"], first["groups"]) == (8, 3, 1)
    assert first["orthogonality"] == pytest.approx(orthogonality(model[0], "normalized").item())
    assert first["orthogonality_minimum"] == pytest.approx(8 * 5 / 3)
    assert first["orthogonality_excess"] == pytest.approx(first["orthogonality"] - 8 * 5 / 3, rel=1e-5)
    assert first["energy"] == pytest.approx(hyperspherical_energy(model[0], s=1).item())
    assert first["half_space_energy"] == pytest.approx(hyperspherical_energy(model[0], 1, True).item())
    assert first["norm_growth"] == 1
    assert first["norm_mean"] == pytest.approx(model[0].weight.flatten(1).norm(dim=1).mean().item())
    assert first["k_min"] == first["k_max"] == pytest.approx(0.5)
    assert last["k_mean"] is None
    assert last["angle_mean"] == kernel_angles(model)["2"]["mean"]
    assert layer_diagnostics(model)["0"]["norm_growth"] is None


@pytest.mark.parametrize("fill", [0.0, math.nan, math.inf, 1e30])
def test_numbers_are_valid_json_for_any_weights(fill):
    model = nn.Sequential(
        SphereConv2d(2, 4, 1, operator="learnable"), SphereConv2d(4, 4, 3, groups=4), SphereLinear(4, 1)
    )
    norms = KernelNorms(model)
    with torch.no_grad():
        model[0].weight[0] = fill
        model[0].angle.raw_k[0] = fill
    for numbers in (layer_diagnostics(model, norms), kernel_angles(model), k_values(model), norms.growth(model)):
        json.loads(json.dumps(numbers, allow_nan=False))


def test_no_gradients_and_half_precision():
    model = nn.Sequential(SphereConv2d(3, 4, 3, operator="learnable"), SphereLinear(4, 4)).bfloat16()
    norms = KernelNorms(model)
    assert not any(value.requires_grad for value in norms.state_dict().values())
    numbers = layer_diagnostics(model, norms)
    assert numbers["0"]["norm_growth"] == 1
    assert all(isinstance(n, (int, float, type(None))) for layer in numbers.values() for n in layer.values())


@pytest.mark.parametrize("function", [kernel_angles, k_values])
@pytest.mark.parametrize("bins", [0, -1, 2.5, True])
def test_invalid_bins(function, bins):
    with pytest.raises(ValueError, match="bins must be an integer of at least 1, got"):
        function(SphereLinear(2, 2), bins=bins)


def test_plain_model_has_no_diagnostics():
    cnn = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(4, 4))
    assert kernel_angles(cnn) == k_values(cnn) == layer_diagnostics(cnn) == KernelNorms(cnn).growth(cnn) == {}
