"""`--init-from`: runs, saved models, and checkpoints of torchvision and transformers as safetensors."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import spherenet as sn
from spherenet.errors import ModelError, RunError
from spherenet.training import build
from spherenet.training.config import TrainConfig
from spherenet.training.initial_weights import start_from

WIDTHS = (8, 12, 16, 20)


def resnet(operator=None, **options):
    return sn.create_model("resnet-18", 5, operator, widths=WIDTHS, input_size=64, **options)


def hugging_face_resnet():
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        layer_type="basic", depths=[2, 2, 2, 2], hidden_sizes=list(WIDTHS), embedding_size=8, num_labels=3
    )
    torch.manual_seed(0)
    model = transformers.ResNetForImageClassification(config)
    model(torch.randn(4, 3, 64, 64))  # running statistics
    return model.eval()


def features(model, images):
    with torch.no_grad():
        return model.eval().features(images)


def expected_features(model, images):
    with torch.no_grad():
        return model.resnet(images).pooler_output.flatten(1)


IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("shards", [False, True])
def test_transformers_checkpoint_gives_the_same_features(tmp_path, shards):
    source = hugging_face_resnet()
    source.save_pretrained(tmp_path, **({"max_shard_size": "20KB"} if shards else {}))
    assert (tmp_path / "model.safetensors").exists() is not shards
    model = resnet()
    messages = start_from(model, str(tmp_path))
    torch.testing.assert_close(features(model, IMAGES), expected_features(source, IMAGES), rtol=1e-5, atol=1e-5)
    assert messages == [f"1 tensors (first: head.weight) have no match in {tmp_path} and keep their initial values."]


def test_converted_transformers_checkpoint_gives_the_same_features(tmp_path):
    source = sn.to_sphere(hugging_face_resnet(), "sigmoid")
    sn.save_model(source, tmp_path / "saved")
    model = resnet("sigmoid")
    assert len(start_from(model, str(tmp_path / "saved"))) == 1  # the head
    torch.testing.assert_close(features(model, IMAGES), expected_features(source, IMAGES), rtol=1e-4, atol=1e-4)
    other = resnet("linear")
    assert "operator='sigmoid' instead of 'linear'" in start_from(other, str(tmp_path / "saved"))[0]


def torchvision_names(state):
    """Rename the tensors of this library's network as those of torchvision's resnet18."""
    renamed = {}
    for name, tensor in state.items():
        parts = name.removeprefix("features.").split(".")
        if parts[0] == "begin":
            parts = [{"0": "conv1", "1": "bn1"}[parts[1]], *parts[2:]]
        elif parts[0] == "stages":
            stage, unit, place, layer, *rest = parts[1:]
            number = {"first": "1", "second": "2"}.get(place)
            inner = ["downsample", layer] if number is None else [{"0": "conv", "1": "bn"}[layer] + number]
            parts = [f"layer{int(stage) + 1}", unit, *inner, *rest]
        elif parts[0] == "head":
            parts = ["fc", parts[1]]
        renamed[".".join(parts)] = tensor.contiguous()
    return renamed


@pytest.mark.parametrize("prefix", ["", "module."])
def test_torchvision_names_are_known(tmp_path, prefix):
    torch.manual_seed(2)
    source = resnet()
    names = torchvision_names(source.state_dict())
    assert {"conv1.weight", "layer1.0.bn2.running_mean", "layer2.0.downsample.0.weight", "fc.weight"} <= set(names)
    save_file({prefix + name: tensor for name, tensor in names.items()}, tmp_path / "resnet18.safetensors")
    torch.manual_seed(3)
    model = resnet()
    assert len(start_from(model, str(tmp_path / "resnet18.safetensors"))) == 1
    assert torch.equal(features(model, IMAGES), features(source, IMAGES))


def test_bad_sources_are_refused(tmp_path):
    model = resnet()

    def fails(error, message, source=tmp_path):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(error, match=message):
            start_from(model, str(source))
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())

    save_file({"x": torch.zeros(2)}, tmp_path / "model.safetensors")
    fails(RunError, "no tensor in .* fits this model: it has x, got features.begin.0.weight")
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    fails(ModelError, "is not a valid safetensors file")
    (tmp_path / "model.safetensors").unlink()
    index = tmp_path / "model.safetensors.index.json"
    for names in ({"a": "../secret"}, {"a": "/etc/passwd"}, {}, [], None, {"a": ""}, {"a": ".."}):
        index.write_text(json.dumps({"weight_map": names}))
        fails(ModelError, "must have a weight_map of names of files in its folder")
    index.write_text(json.dumps({"weight_map": {"a": "missing.safetensors"}}))
    fails(ModelError, r"missing.safetensors does not exist")
    index.unlink()
    (tmp_path / "config.json").write_text("{}")
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "pytorch_model.bin")
    fails(ModelError, "pytorch_model.bin is a pickle, which can run code when it is loaded")
    (tmp_path / "text.safetensors").write_text("text")
    fails(ModelError, "is not a valid safetensors file", tmp_path / "text.safetensors")


@pytest.mark.parametrize(
    ("options", "copies", "cause"),
    [({}, 4, "the number of classes"), ({"optimizer": "sgd"}, 3, "the number"), ({"shard_head": True}, 1, "the number"),
     ({"widths": [4096, 4096, 4096]}, 4, "widths")],
)  # fmt: skip
def test_network_that_does_not_fit_in_memory_is_refused(options, copies, cause, monkeypatch):
    config = TrainConfig(data="folder", model="cnn-3", **options)
    dataset = SimpleNamespace(classes=range(10 if "widths" in options else 10**6),
                              preprocessing=SimpleNamespace(channels=3, size=(8, 8)))  # fmt: skip
    with torch.device("meta"):
        size = sum(parameter.nbytes for parameter in build._create(config, dataset).parameters())
    pages = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": copies * size - 1}
    monkeypatch.setattr(build.os, "sysconf", pages.get)
    with pytest.raises(ValueError, match=f"{cause}.* must make a network that fits in memory"):
        build.build_model(config, dataset)
    pages["SC_PHYS_PAGES"] += 1
    with torch.device("meta"):
        build._require_memory(build._create(config, dataset), config)
