"""Converted models in the folders of transformers: every `save_pretrained` keeps the sphere layers."""

import copy
import json
import pickle

import pytest
import torch
from torch import nn

import spherenet as sn
from spherenet.errors import ModelError
from spherenet.layers import SphereLayer

transformers = pytest.importorskip("transformers")

IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 0, 1])
CLS = transformers.ViTForImageClassification


def number_of_sphere_layers(model):
    return sum(isinstance(module, SphereLayer) for module in model.modules())


def logits(model):
    with torch.no_grad():
        return model.eval()(IMAGES).logits


def entries(model):
    """Return the configuration of a model without the entries that transformers itself sets when it saves one."""
    return {
        name: value
        for name, value in model.config.to_dict().items()
        if name not in ("_name_or_path", "architectures", "dtype")
    }


@pytest.fixture(scope="module")
def vit():
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, image_size=16, patch_size=8,
        id2label={0: "ant", 1: "bee"}, label2id={"ant": 0, "bee": 1},
    )  # fmt: skip
    torch.manual_seed(0)
    return CLS(config)


@pytest.mark.parametrize("operator", ["cosine", "learnable"])
@pytest.mark.parametrize("by_method", [True, False])
def test_models_stay_spherical(vit, tmp_path, operator, by_method):
    converted = sn.to_sphere(vit, operator, attention=True)
    converted.save_pretrained(tmp_path) if by_method else sn.save_pretrained(converted, tmp_path)
    loaded = sn.load_pretrained(CLS, tmp_path)
    assert type(loaded) is CLS
    assert number_of_sphere_layers(loaded) == number_of_sphere_layers(converted) == 7
    assert torch.equal(logits(loaded), logits(converted))
    assert loaded.config.id2label == {0: "ant", 1: "bee"}
    assert entries(loaded) == entries(vit)
    # A second round trip keeps everything.
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(sn.load_pretrained(CLS, tmp_path / "again")), logits(converted))


@pytest.mark.parametrize("options", [{}, {"attn_implementation": "eager"}, {"experts_implementation": "eager"}])
def test_transformers_alone_does_not_load_a_plain_model(vit, tmp_path, options):
    sn.to_sphere(vit).save_pretrained(tmp_path)
    for cls in (CLS, transformers.AutoModelForImageClassification, transformers.AutoModel):
        with pytest.raises(ValueError, match=r"was converted by spherenet: load it by spherenet.load_pretrained"):
            cls.from_pretrained(tmp_path, local_files_only=True, **options)


def test_models_without_attention_are_refused_too(tmp_path):
    config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic")
    converted = sn.to_sphere(transformers.ResNetForImageClassification(config))
    converted.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="was converted by spherenet"):
        type(converted).from_pretrained(tmp_path)
    assert torch.equal(logits(sn.load_pretrained(type(converted), tmp_path)), logits(converted))


def test_plain_models_are_saved_as_before(vit, tmp_path):
    converted = sn.to_sphere(vit)
    before = entries(converted)
    converted.save_pretrained(tmp_path / "sphere")
    assert entries(converted) == before
    for name, model in (("plain", vit), ("back", sn.to_plain(converted))):
        model.save_pretrained(tmp_path / name)
        assert torch.equal(logits(CLS.from_pretrained(tmp_path / name)), logits(vit))
        assert "spherenet" not in (tmp_path / name / "config.json").read_text()


def test_copies_save_themselves(vit, tmp_path):
    converted = sn.to_sphere(vit)
    for name, duplicate in (
        ("copy", copy.deepcopy(converted)),
        ("pickle", pickle.loads(pickle.dumps(converted))),
        ("applied", copy.deepcopy(vit)),
    ):
        if name == "applied":
            sn.convert.apply_conversion(duplicate, sn.convert.conversion_record(converted))
        with torch.no_grad():
            duplicate.classifier.weight.zero_()
        duplicate.save_pretrained(tmp_path / name)
        loaded = sn.load_pretrained(CLS, tmp_path / name)
        assert torch.equal(logits(loaded), logits(duplicate))
        assert number_of_sphere_layers(loaded) == number_of_sphere_layers(converted)


def test_part_of_a_model_is_recorded_by_the_function(vit, tmp_path):
    model = copy.deepcopy(vit)
    sn.to_sphere(model.vit, inplace=True)
    sn.save_pretrained(model, tmp_path)
    assert torch.equal(logits(sn.load_pretrained(CLS, tmp_path)), logits(model))


def test_checkpoints_of_a_trainer_stay_spherical(vit, tmp_path):
    pytest.importorskip("accelerate")
    converted = sn.to_sphere(vit, "sigmoid", attention=True)
    dataset = [{"pixel_values": image, "labels": label} for image, label in zip(IMAGES, LABELS, strict=True)]

    def trainer(model, steps):
        arguments = transformers.TrainingArguments(
            tmp_path, max_steps=steps, save_steps=2, per_device_train_batch_size=4, learning_rate=0.01, use_cpu=True,
            report_to="none", disable_tqdm=True, logging_strategy="no", dataloader_pin_memory=False,
        )  # fmt: skip
        optimizer = torch.optim.AdamW(sn.param_groups(model, weight_decay=0.01), lr=0.01)
        return transformers.Trainer(model, arguments, train_dataset=dataset, optimizers=(optimizer, None))

    trainer(converted, 2).train()
    loaded = sn.load_pretrained(CLS, tmp_path / "checkpoint-2")
    assert number_of_sphere_layers(loaded) == number_of_sphere_layers(converted) == 7
    assert torch.equal(logits(loaded), logits(converted))
    with pytest.raises(ValueError, match="was converted by spherenet"):
        CLS.from_pretrained(tmp_path / "checkpoint-2")
    # Training continues from the checkpoint, whose configuration transformers reads.
    assert trainer(loaded, 4).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2")).global_step == 4
    last = sn.load_pretrained(CLS, tmp_path / "checkpoint-4")
    assert torch.equal(logits(last), logits(loaded))
    assert not torch.equal(logits(last), logits(converted))


def test_shared_k_is_refused_before_anything_is_written(vit, tmp_path):
    model = sn.to_sphere(vit, "learnable", k_sharing="network")
    for save in (model.save_pretrained, lambda folder: sn.save_pretrained(model, folder)):
        with pytest.raises(ModelError, match="transformers does not save; use save_model"):
            save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_bad_folders_are_refused(vit, tmp_path):
    def set_entry(name, value):
        file = tmp_path / "hf" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))

    vit.save_pretrained(tmp_path / "hf")
    for folder in ("hf", "missing"):
        with pytest.raises(ModelError, match=r"must have a conversion record in config.json"):
            sn.load_pretrained(CLS, tmp_path / folder)
    for record in ([], None, {"format": "x"}):
        set_entry("spherenet_conversion", record)
        with pytest.raises(ModelError, match="the conversion record must be an object"):
            sn.load_pretrained(CLS, tmp_path / "hf")
    set_entry("spherenet_conversion", sn.convert.conversion_record(sn.to_sphere(vit, "learnable")))
    with pytest.raises(ModelError, match=r"does not fit ViTForImageClassification: .* missing: .*raw_k"):
        sn.load_pretrained(CLS, tmp_path / "hf")
    set_entry("hidden_size", "sixteen")
    with pytest.raises(ModelError, match=r"config.json is not a configuration of ViTConfig"):
        sn.load_pretrained(CLS, tmp_path / "hf")
    with pytest.raises(TypeError, match="model must be a model of transformers, got Linear"):
        sn.save_pretrained(nn.Linear(2, 2), tmp_path / "x")
    for cls in (nn.Linear, transformers.AutoModel, CLS.from_pretrained):
        with pytest.raises(TypeError, match="cls must be a class of transformers"):
            sn.load_pretrained(cls, tmp_path / "hf")


def test_code_in_a_configuration_is_not_selected(vit, tmp_path, monkeypatch):
    converted = sn.to_sphere(vit)
    converted.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    hostile = {
        "_attn_implementation": "somebody/kernel", "attn_implementation": "somebody/kernel", "auto_map": {"a": "b"},
        "quantization_config": {"quant_method": "torchao"}, "backbone": "somebody/backbone",
    }  # fmt: skip
    file.write_text(json.dumps(json.loads(file.read_text()) | hostile))
    passed = {}
    original = transformers.ViTConfig.from_dict
    monkeypatch.setattr(transformers.ViTConfig, "from_dict", lambda values: passed.update(values) or original(values))
    assert torch.equal(logits(sn.load_pretrained(CLS, tmp_path)), logits(converted))
    assert not set(hostile) & set(passed)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "somebody/model"}))
    with pytest.raises(ModelError, match=r"must not contain adapter_config.json"):
        sn.load_pretrained(CLS, tmp_path)


def test_layers_that_an_option_replaces_are_named(vit, tmp_path, monkeypatch):
    sn.to_sphere(vit).save_pretrained(tmp_path)
    load = CLS.from_pretrained.__func__

    def replacing(cls, *arguments, **options):
        model, report = load(cls, *arguments, **options)
        model.vit.layers[0].mlp.fc1 = nn.Linear(16, 24)
        return model, report

    monkeypatch.setattr(CLS, "from_pretrained", classmethod(replacing))
    with pytest.raises(ModelError, match=r"options must not replace sphere layers, got a plain layer for .*fc1"):
        sn.load_pretrained(CLS, tmp_path)
