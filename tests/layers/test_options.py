"""`SphereOptions` is the one list of layer options: layers, networks, conversions and configurations follow it."""

import inspect
from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch
from torch import nn

import spherenet as sn
from spherenet.convert import conversion_record
from spherenet.layers.options import NetworkKeywords, SphereKeywords
from spherenet.regularizers import sphere_layers
from spherenet.training.config import TrainConfig

NAMES = [field.name for field in fields(sn.SphereOptions)]
OPTIONS = sn.SphereOptions(
    "learnable", 0.4, "layer", (2, -1), 1e-3, center="patch", magnitude="tanh", radius="learned:3"
)


def network():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2))


def assert_has_options(layer):
    assert layer.operator == "learnable"
    assert layer.k.shape == ()
    torch.testing.assert_close(layer.k, torch.tensor(0.4))
    assert (layer.beta, layer.gamma, layer.eps, layer.center) == (2.0, -1.0, 1e-3, "patch")
    torch.testing.assert_close(layer.magnitude.radius, torch.full((len(layer.magnitude.radius),), 3.0))


def test_keywords_have_the_names_of_the_options():
    assert set(SphereKeywords.__annotations__) | set(NetworkKeywords.__annotations__) == set(NAMES)
    assert list(sn.SphereOptions().keywords()) == NAMES


@pytest.mark.parametrize("function", [sn.create_model, sn.to_sphere])
def test_functions_show_all_options(function):
    parameters = inspect.signature(function).parameters
    assert set(NAMES) <= set(parameters)
    defaults = {field.name: field.default for field in fields(sn.SphereOptions)} | {"center": "auto"}
    assert {name: parameters[name].default for name in NAMES} == defaults


def test_training_configuration_has_the_options_with_their_defaults():
    config = TrainConfig()
    expected = {field.name: field.default for field in fields(sn.SphereOptions)} | {"center": "auto"}
    own = [name for name in NAMES if hasattr(config, name)]
    # The others are options of --operator and --magnitude; eps belongs to create_model.
    assert [name for name in NAMES if name not in own] == ["k", "k_sharing", "eps", "radius"]
    assert {name: getattr(config, name) for name in own} == {name: expected[name] for name in own}


def test_layer_takes_options_as_keywords():
    assert_has_options(sn.SphereConv2d(3, 4, 3, **OPTIONS.keywords()))
    assert_has_options(sn.SphereLinear(3, 4, **OPTIONS.keywords()))
    assert_has_options(sn.SphereConvTranspose2d(3, 4, 3, **OPTIONS.keywords()))
    assert_has_options(sn.SphereLSTMCell(3, 4, **OPTIONS.keywords()).ih)


def test_network_and_conversion_take_options():
    for layer in sphere_layers(sn.create_model("cnn-3", operator=OPTIONS, widths=(4, 4, 4))).values():
        assert_has_options(layer)
    sphere = sn.to_sphere(network(), OPTIONS)
    assert_has_options(sphere[0])
    assert_has_options(sphere[3])
    assert list(conversion_record(sphere)["layers"]["0"]) == NAMES


def test_options_of_a_network_are_the_keywords_of_create_model():
    model = sn.create_model("cnn-3", operator=OPTIONS, widths=(4, 4, 4))
    again = sn.create_model(**model.config)
    assert again.config == model.config
    assert again.state_dict().keys() == model.state_dict().keys()


def test_one_k_for_all_layers_of_a_network():
    options = sn.SphereOptions("learnable", k_sharing="network")
    model = sn.create_model("cnn-3", operator=options, widths=(4, 4, 4))
    assert len({id(layer.angle) for layer in sphere_layers(model).values()}) == 1
    sphere = sn.to_sphere(network(), options)
    assert sphere[0].angle is sphere[3].angle


@pytest.mark.parametrize("call", [sn.to_sphere, lambda _, *a, **k: sn.create_model("cnn-3", 10, *a, **k)])
@pytest.mark.parametrize("option", [{"k": 0.3}, {"center": "patch"}, {"eps": 1e-3}, {"magnitude": "ball"}])
def test_options_object_and_keywords_exclude_each_other(call, option):
    name = next(iter(option))
    with pytest.raises(TypeError, match=f"{name} must be left out if operator is a SphereOptions object, got"):
        call(network(), OPTIONS, **option)


INVALID = {
    "eps": (lambda: sn.SphereOptions(eps=0), ValueError, "eps must be greater than 0, got 0"),
    "rescale": (lambda: sn.SphereOptions(rescale="yes"), ValueError, "rescale must be None"),
    "unknown": (lambda: sn.SphereOptions(centers="patch"), TypeError, "centers"),
    "center of a layer": (
        lambda: sn.SphereLinear(3, 4, **sn.SphereOptions(center="auto").keywords()), ValueError, "center.*'auto'",
    ),
    "center of a network": (
        lambda: sn.to_sphere(network(), sn.SphereOptions(center="pach")), ValueError, "center.*mean 'patch'",
    ),
    "shared k of a CNN": (
        lambda: sn.create_model("cnn-3", operator=None, k_sharing="network"), ValueError, "k_sharing must not be",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INVALID)
def test_invalid_options(name):
    call, error, message = INVALID[name]
    with pytest.raises(error, match=message):
        call()


def test_options_are_frozen_and_comparable():
    assert replace(OPTIONS, rescale=[2.0, -1.0]) == OPTIONS
    with pytest.raises(FrozenInstanceError):
        OPTIONS.k = 1.0


def test_plain_network_by_none():
    for operator in (None, "none"):
        model = sn.create_model("cnn-3", operator=operator, widths=(4, 4, 4))
        assert not sphere_layers(model)
        assert model.config["operator"] is None


def test_selected_layers_are_converted_whatever_their_role():
    sphere = sn.to_sphere(network(), select=lambda name, module: name in ("0", "5"))
    summary = sn.sphere_summary(sphere)
    assert [row.kind for row in summary] == ["sphere", "plain", "sphere"]
    assert summary["3"].reason == "not selected"
    by_type = sn.to_sphere(network(), OPTIONS, select=nn.Linear, skip="3")
    assert [row.kind for row in sn.sphere_summary(by_type)] == ["plain", "plain", "sphere"]


def test_selection_keeps_layers_that_cannot_be_converted():
    class Odd(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    model = nn.Sequential(nn.Linear(3, 4), Odd(4, 4), nn.MultiheadAttention(4, 1, add_zero_attn=True))
    summary = sn.sphere_summary(sn.to_sphere(model, select=lambda name, module: True))
    assert summary["1"].reason == "not converted: Odd overrides forward"
    assert summary["2.out_proj"].reason == "attention projection: MultiheadAttention applies its weight itself"
    with pytest.raises(TypeError, match="only must be left out if select is given"):
        sn.to_sphere(network(), select="0", only="3")
    with pytest.raises(ValueError, match="select must match layers of the model, got 'nowhere'"):
        sn.to_sphere(network(), select="nowhere")
