"""Centered layers and magnitude functions (Eq. 14 and 15) in saved folders, frozen layers and exported programs."""

import json

import pytest
import torch
from torch import Tensor, nn

import spherenet as sn
from cases import GEOMETRIES
from spherenet.errors import ModelError
from spherenet.export import (
    export_onnx,
    export_program,
    freeze,
    load_model,
    save_model,
    shipped_model,
)
from spherenet.export.frozen_layers import FrozenSphereConv, FrozenSphereLinear
from spherenet.magnitudes import Magnitude, SegmentedMagnitude

ACCURACY = {torch.float32: 1e-6, torch.float64: 1e-12}
OPTIONS = {
    "weight": {"center": "weight"},
    "patch": {"center": "patch"},
    "ball": {"magnitude": "ball", "radius": 2.0},
    "tanh": {"magnitude": "tanh", "radius": "learned"},
    "linear": {"magnitude": "linear"},
    "segmented": {"magnitude": SegmentedMagnitude(radius=1.5, alpha=0.7, beta=0.2)},
    "log": {"magnitude": "log"},
    "mixed": {"magnitude": "mixed"},
    "patch and ball": {"center": "patch", "magnitude": "ball", "radius": "learned"},
    "weight and linear": {"center": "weight", "magnitude": "linear"},
}
CENTERED_GEOMETRIES = [geometry for geometry in GEOMETRIES if geometry.layer().weight[0].numel() > 1]


def perturbed(module):
    """Return the module with all parameters but weights changed at random."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if not name.endswith("weight"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return module


def assert_equal(actual, expected, accuracy):
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert actual.isfinite().all()
    assert (actual - expected).abs().max() <= accuracy * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("dtype", ACCURACY, ids=str)
@pytest.mark.parametrize("geometry", CENTERED_GEOMETRIES, ids=str)
def test_frozen_convolutions_match(geometry, dtype):
    for options in OPTIONS.values():
        layer = perturbed(geometry.layer(dtype=dtype, operator="sigmoid", rescale="learned", bias=True, **options))
        images = geometry.images(batch=3, dtype=dtype)
        images[0] = 0
        frozen = freeze(layer)
        assert type(frozen) is FrozenSphereConv
        assert not list(frozen.parameters())
        with torch.no_grad():
            expected = layer(images)
            assert_equal(frozen(images), expected, 3 * ACCURACY[dtype])
            assert_equal(frozen(images[1]), expected[1], 3 * ACCURACY[dtype])


@pytest.mark.parametrize("dtype", ACCURACY, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_frozen_linear_layers_match(options, dtype):
    layer = perturbed(sn.SphereLinear(6, 5, dtype=dtype, operator="linear", rescale="learned", bias=True, **options))
    rows = torch.randn(2, 3, 6, dtype=dtype)
    rows[0, 0], rows[0, 1] = 0, 0.37
    frozen = freeze(layer)
    assert type(frozen) is FrozenSphereLinear
    with torch.no_grad():
        assert_equal(frozen(rows), layer(rows), 3 * ACCURACY[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_frozen_flat_patches_have_the_cosine_zero(dtype):
    layer = sn.SphereConv2d(3, 4, 3, center="patch", dtype=dtype)
    images = torch.full((1, 3, 6, 6), 1234.5, dtype=dtype)
    assert (freeze(layer)(images) == 0).all()
    assert (layer(images) == 0).all()


def test_frozen_patches_of_low_contrast_match():
    layer = sn.SphereConv2d(3, 4, 3, center="patch", eps=1e-12)
    images = 100 + 1e-2 * torch.randn(2, 3, 8, 8)
    expected = layer.double()(images.double()).float()
    assert_equal(freeze(layer.float())(images), expected, 1e-3)


def test_batch_norm_is_folded_into_centered_layers_with_magnitudes(perturb):
    for options in OPTIONS.values():
        model = nn.Sequential(sn.SphereConv2d(3, 8, 3, groups=1, bias=True, **options), nn.BatchNorm2d(8), nn.ReLU())
        images = torch.randn(4, 3, 9, 9)
        perturb(model, images)
        frozen = freeze(model)
        assert [type(module) for module in frozen] == [FrozenSphereConv, nn.Identity, nn.ReLU]
        with torch.no_grad():
            assert_equal(frozen(images), model.eval()(images), 3e-6)


class RootMagnitude(Magnitude):
    """h = sqrt(‖x‖): a magnitude function defined by a user."""

    name = "root"

    def value(self, norm: Tensor, radius: Tensor | float) -> Tensor:
        return norm.sqrt()


EXPORTED = {
    "weight": {"center": "weight"},
    "patch": {"center": "patch"},
    "ball": {"magnitude": "ball", "radius": "learned"},
    "tanh": {"magnitude": "tanh", "radius": 3.0},
    "linear": {"magnitude": "linear", "center": "patch"},
    "segmented": {"magnitude": "segmented", "radius": 0.5},
    "log": {"magnitude": "log"},
    "mixed": {"magnitude": "mixed"},
    "custom": {"magnitude": RootMagnitude()},
}


@pytest.mark.parametrize("export", [export_program, export_onnx], ids=lambda f: f.__name__)
def test_exported_files_return_the_outputs_of_all_layers(export, tmp_path):
    """One file with a layer per option, because each export takes seconds. Scores are compared at two batch sizes."""
    layers = [sn.SphereConv2d(4, 4, 3, padding=1, groups=1 + index % 2, **options)
              for index, options in enumerate(EXPORTED.values())]  # fmt: skip
    strided = sn.SphereConv2d(4, 6, 3, stride=2, padding=2, dilation=2, center="patch", operator="sigmoid")
    linear = sn.SphereLinear(6 * 16, 5, center="patch", magnitude="ball", radius="learned")
    model = perturbed(nn.Sequential(*layers, strided, nn.Flatten(), linear, nn.Linear(5, 3)))
    assert export(model, tmp_path / "model", example=torch.randn(2, 4, 8, 8), check=True).is_file()


@pytest.mark.parametrize("options", [EXPORTED["weight"], EXPORTED["linear"]], ids=str)
def test_exported_networks_return_the_scores_of_the_model(options, network, tmp_path):
    model = network("cnn-3", operator="cosine", batch_norm=False, input_size=16, **options)
    assert export_program(model, tmp_path / "model", check=True).is_file()


@pytest.mark.parametrize(
    "options",
    [
        {"batch_norm": False},
        {"batch_norm": False, "center": None},
        {"center": "weight", "magnitude": "tanh", "radius": "learned"},
        {"magnitude": "ball", "radius": 2.5},
        {"batch_norm": False, "group_norm": 2},
    ],
    ids=str,
)
def test_saved_models_load_identically(options, network, tmp_path):
    model = network("cnn-3", operator="cosine", **options).eval()
    save_model(model, tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    assert loaded.config == model.config
    assert str(loaded) == str(model)
    images = torch.randn(3, 3, 32, 32)
    assert torch.equal(loaded(images), model(images))


def test_folders_of_earlier_versions_are_not_centered(network, tmp_path):
    model = network("cnn-3", operator="cosine", batch_norm=False, center=None)
    save_model(model, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    for name in ("center", "magnitude", "radius", "group_norm"):
        del config["model"][name]
    file.write_text(json.dumps(config))
    loaded = load_model(tmp_path / "model")
    assert loaded.config["center"] is None
    images = torch.randn(3, 3, 32, 32)
    assert torch.equal(loaded(images), model.eval()(images))


def test_shipped_model_is_not_centered():
    assert {layer.center for layer in sn.regularizers.sphere_layers(load_model(shipped_model())).values()} == {None}


def test_magnitude_objects_cannot_be_saved_as_a_folder(network, tmp_path):
    model = network("cnn-3", operator="cosine", magnitude=RootMagnitude())
    with pytest.raises(ModelError, match="magnitude must be a value that JSON supports, got an object of type RootMag"):
        save_model(model, tmp_path / "model")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"center": "kernel"}, "center must be one of"),
        ({"magnitude": "cube"}, "magnitude must be one of"),
        ({"radius": 2.0}, "radius must be None for the magnitude 'sphere'"),
        ({"group_norm": -1}, "group_norm must be an integer of at least 0, got -1"),
        ({"magnitude": [1]}, "must have a number, a string, true, false or null for magnitude"),
    ],
    ids=str,
)
def test_invalid_values_in_a_folder_are_rejected(change, message, network, tmp_path):
    save_model(network("cnn-3", operator="cosine"), tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    config["model"] |= change
    file.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path / "model")
