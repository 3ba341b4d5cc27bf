"""Converted modules of any origin: saved and loaded with their sphere layers, without code from the folder."""

import functools
import json
import sys

import pytest
import torch
from torch import nn

import spherenet as sn
from spherenet.errors import ModelError
from spherenet.export import load_metadata
from spherenet.layers import SphereLayer


class Net(nn.Module):
    def __init__(self, width=6, classes=3):
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3)
        self.norm = nn.BatchNorm2d(width)
        self.middle = nn.Conv2d(width, width, 3)
        self.classifier = nn.Linear(width, classes)

    def forward(self, images):
        return self.classifier(self.middle(self.norm(self.conv(images)).relu()).mean((2, 3)))


IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def number_of_sphere_layers(model):
    return sum(isinstance(module, SphereLayer) for module in model.modules())


def outputs(model):
    with torch.no_grad():
        result = model.eval()(IMAGES)
    return getattr(result, "logits", result)


@pytest.fixture
def converted():
    torch.manual_seed(0)
    model = sn.to_sphere(Net(width=5), "learnable", k_sharing="network", center="weight")
    model(torch.randn(8, 3, 16, 16))  # running statistics
    with torch.no_grad():
        model.conv.angle.raw_k.add_(0.3)
    return model


@pytest.mark.parametrize("way", ["module", "class", "function"])
def test_any_converted_module_is_saved_and_loaded(converted, tmp_path, way):
    arguments = None if way == "module" else {"width": 5}
    sn.save_model(converted, tmp_path / "saved", metadata={"classes": ["a", "b", "c"]}, arguments=arguments)
    module = {"module": Net(width=5), "class": Net, "function": lambda width: Net(width)}[way]
    loaded = sn.load_model(tmp_path / "saved", model=module)
    assert type(loaded) is Net
    assert not loaded.training
    assert torch.equal(outputs(loaded), outputs(converted))
    assert loaded.conv.angle is loaded.middle.angle
    assert load_metadata(tmp_path / "saved") == {"classes": ["a", "b", "c"]}
    card = (tmp_path / "saved" / "README.md").read_text()
    assert "Net with 2 sphere layers (learnable)" in card
    assert "model=Net" in card


def test_converted_classifier_needs_no_module(tmp_path):
    model = sn.create_model("cnn-3", operator=None, widths=(4, 4, 4))
    converted = sn.to_sphere(model, "sigmoid", drop_batch_norm=True)
    sn.save_model(converted, tmp_path / "saved")
    loaded = sn.load_model(tmp_path / "saved")
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(loaded(images), converted.eval()(images))
    assert number_of_sphere_layers(loaded) == 4


def test_no_class_is_imported_by_a_name_in_the_folder(converted, tmp_path):
    sn.save_model(converted, tmp_path / "saved")
    file = tmp_path / "saved" / "config.json"
    config = json.loads(file.read_text())
    config["module"]["class"] = "this.Antigravity"
    file.write_text(json.dumps(config))
    sys.modules.pop("this", None)
    with pytest.raises(ModelError, match=r"holds a module of the class 'this.Antigravity': pass it as model"):
        sn.load_model(tmp_path / "saved")
    assert torch.equal(outputs(sn.load_model(tmp_path / "saved", model=Net(width=5))), outputs(converted))
    assert "this" not in sys.modules


def with_arguments(folder, arguments):
    """Replace the arguments of a saved folder, as a stranger who offers it may do."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["module"]["arguments"] = arguments
    file.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"width": 5, "trust_remote_code": True}, "must not contain 'trust_remote_code', which may select code"),
        ({"width": 5, "pretrained": True}, "must not contain 'pretrained'"),
        ({"width": 5, "weights_only": False}, "must not contain 'weights_only'"),
        ({"width": 5, "token": True}, "must not contain 'token'"),
        ({"width": 5, "a b": 1}, "must not contain 'a b'"),
        ({"width": "somebody/model"}, "must have a number, true, false, null or a list of these for 'width'"),
        ({"width": [5, ["/etc/passwd"]]}, "must have a number, true, false, null or a list of these for 'width'"),
        ({"width": {"path": 1}}, "must have a number, true, false, null or a list of these for 'width'"),
        ({"width": 5, "unnamed": True}, "it names no 'unnamed'"),
        ([5], "must be an object, got"),
    ],
)
@pytest.mark.parametrize("is_partial", [False, True])
def test_arguments_of_a_file_load_no_code_and_no_files(converted, tmp_path, arguments, message, is_partial):
    sn.save_model(converted, tmp_path / "saved")
    with_arguments(tmp_path / "saved", arguments)
    calls = []

    def from_pretrained(pretrained_model_name_or_path=None, width=5, trust_remote_code=False, **options):
        calls.append(options)
        return Net(width)

    factory = functools.partial(from_pretrained, "own/model") if is_partial else from_pretrained
    with pytest.raises(ModelError, match=message):
        sn.load_model(tmp_path / "saved", model=factory)
    with pytest.raises(ModelError, match=message):
        sn.from_pretrained(tmp_path / "saved", model=factory)
    assert not calls
    with_arguments(tmp_path / "saved", {"width": 5})
    assert torch.equal(outputs(sn.load_model(tmp_path / "saved", model=factory)), outputs(converted))


def test_auto_classes_are_not_called_with_the_names_of_a_file(converted, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    sn.save_model(converted, tmp_path / "saved")
    called = []
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *_, **options: called.append(options))
    for name in ("/tmp/model", "somebody/model"):
        with_arguments(tmp_path / "saved", {"pretrained_model_name_or_path": name, "trust_remote_code": True})
        with pytest.raises(ModelError, match="must not contain 'pretrained_model_name_or_path'"):
            sn.load_model(tmp_path / "saved", model=transformers.AutoModel.from_pretrained)
    assert not called


def test_arguments_that_cannot_be_loaded_are_not_saved(converted, tmp_path):
    for arguments in ({"weights": None}, {"activation": "relu"}, {"trust_remote_code": True}):
        with pytest.raises(ModelError, match=r"set .* in a function that you pass as model to load_model"):
            sn.save_model(converted, tmp_path / "saved", arguments=arguments)
    assert not (tmp_path / "saved").exists()


def test_wrong_modules_are_refused(converted, tmp_path):
    sn.save_model(converted, tmp_path / "saved", arguments={"width": 5})

    def fails(error, message, model):
        with pytest.raises(error, match=message):
            sn.load_model(tmp_path / "saved", model=model)

    fails(ModelError, "of another shape", Net(width=4))
    fails(ModelError, "must have a convolution or linear layer 'conv', got none", nn.Linear(2, 2))
    fails(ModelError, "model cannot be called with the arguments", nn.Identity.forward)
    fails(ModelError, "model cannot be called with the arguments", lambda size: Net(size))
    fails(TypeError, "model must be a module, a class or a function that returns one, got 3", 3)
    fails(TypeError, "model must return a module, got int", lambda width: width)
    with pytest.raises(TypeError, match="arguments must be None or a mapping"):
        sn.save_model(converted, tmp_path / "other", arguments=[5])
    with pytest.raises(ModelError, match=r"arguments\['width'\] must be a value that JSON supports"):
        sn.save_model(converted, tmp_path / "other", arguments={"width": object()})
    with pytest.raises(TypeError, match="arguments must be None for a Classifier"):
        sn.save_model(sn.create_model("cnn-3", widths=(4, 4, 4)), tmp_path / "other", arguments={})
    assert not (tmp_path / "other").exists()


def test_hostile_conversion_in_a_folder_is_refused(converted, tmp_path):
    sn.save_model(converted, tmp_path / "saved")
    file = tmp_path / "saved" / "config.json"
    good = json.loads(file.read_text())
    for conversion in (None, {}, "x", good["conversion"] | {"layers": {"classifier": {}}}):
        file.write_text(json.dumps(good | {"conversion": conversion}))
        with pytest.raises(ModelError, match="conversion record"):
            sn.load_model(tmp_path / "saved", model=Net(width=5))
    # Without its record the network would be plain, and the same tensors would give other scores.
    del good["conversion"]
    file.write_text(json.dumps(good))
    with pytest.raises(ModelError, match="does not fit the model"):
        sn.load_model(tmp_path / "saved", model=Net(width=5))


@pytest.fixture(scope="module")
def vit():
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, image_size=16, patch_size=8,
        id2label={0: "ant", 1: "bee"}, label2id={"ant": 0, "bee": 1},
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.ViTForImageClassification(config)


def test_transformers_models_are_saved_with_their_configuration(vit, tmp_path):
    converted, cls = sn.to_sphere(vit, "learnable", attention=True), type(vit)
    sn.save_model(converted, tmp_path / "saved")
    loaded = sn.load_model(tmp_path / "saved", model=cls)
    assert torch.equal(outputs(loaded), outputs(converted))
    assert loaded.config.id2label == {0: "ant", 1: "bee"}
    converted.save_pretrained(tmp_path / "hf")
    with pytest.raises(ModelError, match="load_pretrained loads folders of transformers"):
        sn.load_model(tmp_path / "hf", model=cls)


def test_code_in_a_saved_configuration_is_not_selected(vit, tmp_path, monkeypatch):
    sn.save_model(sn.to_sphere(vit), tmp_path / "saved")
    file = tmp_path / "saved" / "config.json"
    config = json.loads(file.read_text())
    hostile = {
        "_attn_implementation": "somebody/kernel",
        "attn_implementation": "somebody/kernel",
        "auto_map": {"a": "b"},
        "backbone": "somebody/backbone",
        "use_pretrained_backbone": True,
    }
    config["module"]["transformers_config"] |= hostile | {"nested": [hostile | {"inner": 1}]}
    file.write_text(json.dumps(config))
    passed = {}
    original = type(vit).config_class.from_dict
    monkeypatch.setattr(type(vit).config_class, "from_dict", lambda values: passed.update(values) or original(values))
    sn.load_model(tmp_path / "saved", model=type(vit))
    assert "hidden_size" in passed
    assert not set(hostile) & set(passed)
    assert passed["nested"] == [{"inner": 1}]
