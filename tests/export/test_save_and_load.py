"""`save_model` and `load_model`: bit-identical round trips and atomic writes."""

import json
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors import torch as safetensors_torch

import spherenet as sn
from spherenet._util import atomic
from spherenet.errors import ModelError
from spherenet.export import ModelCard, load_metadata, load_model, save_model

MODELS = {
    "plain": {},
    "linear": {"operator": "linear"},
    "cosine, rescaled, no BatchNorm": {"operator": "cosine", "rescale": "learned", "batch_norm": False},
    "cosine, fixed rescaling": {"operator": "cosine", "rescale": (2.0, -0.5)},
    "sigmoid": {"operator": "sigmoid", "k": 0.1, "loss": "w-sigmoid", "loss_options": {"k": 0.7}},
    "k per filter": {"operator": "learnable"},
    "k per layer": {"operator": "learnable", "k_sharing": "layer", "k": 0.3},
    "k per network": {"operator": "learnable", "k_sharing": "network"},
    "gray": {"operator": "cosine", "in_channels": 1, "input_size": (28, 20), "num_classes": 3, "head_bias": True},
    "no ReLU": {"operator": "cosine", "relu": False, "eps": 1e-3},
    "resnet-32": {"name": "resnet-32", "operator": "sigmoid", "shortcut": "operator"},
    "resnet-18": {"name": "resnet-18", "operator": "learnable", "input_size": 32},
    "ga": {"operator": "cosine", "loss": "ga-linear", "loss_options": {"m": 2}},
    "annealing": {"loss": "a", "loss_options": {"annealing": sn.Annealing(50, 0.1, 1)}},
    "no annealing": {"loss": "ga-cosine", "loss_options": {"annealing": None, "label_smoothing": 0.1}},
    "class weights": {"loss": "s-linear", "loss_options": {"s": 20, "class_weight": torch.rand(10)}},
}


def assert_same(loaded, model):
    """Assert that state, scores and losses are bit-identical."""
    assert not loaded.training
    expected, actual = model.state_dict(), loaded.state_dict()
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype
        assert torch.equal(actual[name], tensor), name
    assert [n for n, _ in loaded.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert not [n for n, t in (*loaded.named_parameters(), *loaded.named_buffers()) if t.is_meta]
    model.eval()
    images = torch.randn(2, model.config["in_channels"], *model.config["input_size"]).to(model.head.weight.dtype)
    with torch.no_grad():
        for a, b in zip(loaded(images, torch.tensor([0, 2])), model(images, torch.tensor([0, 2])), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_round_trip_is_bit_identical(network, tmp_path, options):
    model = network(**options)
    save_model(model, tmp_path / "saved")
    loaded = load_model(tmp_path / "saved")
    assert_same(loaded, model)
    # Saving the loaded model again gives the same config.
    save_model(loaded, tmp_path / "again")
    texts = [(tmp_path / name / "config.json").read_text() for name in ("saved", "again")]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_round_trip_of_other_dtypes(network, tmp_path, dtype):
    model = network(operator="learnable", loss="ga-linear").to(dtype)
    save_model(model, tmp_path / "saved")
    assert_same(load_model(tmp_path / "saved"), model)


def test_shared_k_is_stored_once_and_stays_shared(network, tmp_path):
    model = network("cnn-9", operator="learnable", k_sharing="network")
    save_model(model, tmp_path / "saved")
    stored = safetensors_torch.load_file(tmp_path / "saved" / "model.safetensors")
    assert len([name for name in stored if name.endswith("raw_k")]) == 1
    loaded = load_model(tmp_path / "saved")
    assert len({id(layer.angle) for layer in sn.regularizers.sphere_layers(loaded).values()}) == 1


def test_replaced_annealing_is_saved(network, tmp_path):
    model = network(operator="cosine", loss="ga-linear")
    model.criterion.annealing = sn.Annealing.for_run(1000, floor=2)
    model.criterion.set_step(7)
    save_model(model, tmp_path / "saved")
    loaded = load_model(tmp_path / "saved")
    assert loaded.criterion.annealing == sn.Annealing.for_run(1000, floor=2)
    assert loaded.criterion.lambda_ == 2  # the margin at its final strength


def test_config_without_operator_is_a_plain_network(network, tmp_path):
    model = network(operator=None)
    save_model(model, tmp_path / "saved")
    file = tmp_path / "saved" / "config.json"
    config = json.loads(file.read_text())
    del config["model"]["operator"]
    file.write_text(json.dumps(config))
    loaded = load_model(tmp_path / "saved")
    assert not sn.regularizers.sphere_layers(loaded)
    assert_same(loaded, model)


def test_loaded_model_can_be_trained(network, tmp_path):
    save_model(network(operator="learnable", loss="ga-linear"), tmp_path / "saved")
    model = load_model(tmp_path / "saved").train()
    model(torch.randn(4, 3, 32, 32), torch.arange(4))[0].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_metadata_round_trip(network, tmp_path):
    metadata = {"classes": ["Käfer", "b"], "preprocessing": {"mean": (0.5, 0.25), "scale": 1 / 128}, "none": None}
    save_model(network(num_classes=2), tmp_path / "saved", metadata=metadata)
    expected = metadata | {"preprocessing": {"mean": [0.5, 0.25], "scale": 1 / 128}}
    assert load_metadata(tmp_path / "saved") == expected
    assert "2: Käfer, b." in (tmp_path / "saved" / "README.md").read_text(encoding="utf-8")


def test_folder_contents(network, tmp_path):
    save_model(network(operator="sigmoid"), tmp_path / "saved", card=ModelCard("Mine", license="MIT"))
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
        "README.md", "config.json", "model.safetensors",
    ]  # fmt: skip
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["format_version"] == 1
    assert config["versions"]["spherenet"] == sn.__version__
    assert config["model"]["operator"] == "sigmoid"
    card = (tmp_path / "saved" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: spherenet\n")
    assert "\n# Mine\n" in card
    assert "cnn-3 with the sigmoid operator" in card


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX permissions")
def test_files_follow_the_umask(network, tmp_path):
    before = os.umask(0o027)
    try:
        save_model(network(), tmp_path / "saved")
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "saved").iterdir()}
    assert modes == {0o640}
    assert stat.S_IMODE((tmp_path / "saved").stat().st_mode) == 0o750


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_failed_save_leaves_the_target_unchanged(network, tmp_path, monkeypatch, failure, existing):
    model = network()
    if existing:
        save_model(model, tmp_path / "saved", metadata={"which": "old"})
    before = sorted(tmp_path.rglob("*"))

    def fail(*_, **__):
        raise failure

    monkeypatch.setattr(safetensors_torch, "save_file", fail)
    error = ModelError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(error) as caught:
        save_model(model, tmp_path / "saved", overwrite=True)
    assert error is KeyboardInterrupt or str(caught.value).endswith("saved: No space left on device.")
    assert sorted(tmp_path.rglob("*")) == before
    if existing:
        assert load_metadata(tmp_path / "saved") == {"which": "old"}


def test_failed_rename_restores_the_old_folder(network, tmp_path, monkeypatch):
    """For file systems that cannot exchange two folders atomically."""
    monkeypatch.setattr(atomic, "_exchange", lambda first, second: False)
    model = network()
    save_model(model, tmp_path / "saved", metadata={"which": "old"})
    rename = os.replace

    def fail_for_new_folder(source, target):
        if source.name.endswith("-new"):
            raise PermissionError(13, "Permission denied")
        return rename(source, target)

    monkeypatch.setattr(os, "replace", fail_for_new_folder)
    with pytest.raises(ModelError, match=r"saved: Permission denied\."):
        save_model(model, tmp_path / "saved", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert load_metadata(tmp_path / "saved") == {"which": "old"}


def test_existing_targets_need_overwrite(network, tmp_path):
    model = network()
    (tmp_path / "empty").mkdir()
    save_model(model, tmp_path / "empty")
    with pytest.raises(ModelError, match="is not empty; pass overwrite=True"):
        save_model(model, tmp_path / "empty")
    save_model(model, tmp_path / "empty", metadata={"which": "new"}, overwrite=True)
    assert load_metadata(tmp_path / "empty") == {"which": "new"}
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
    (tmp_path / "empty" / "thesis.tex").touch()
    with pytest.raises(ModelError, match=r"contains 'thesis\.tex', which is not a file of a saved model"):
        save_model(model, tmp_path / "empty", overwrite=True)
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="a file has that name"):
        save_model(model, tmp_path / "file", overwrite=True)
    with pytest.raises(ModelError, match=r"cannot write .*below: .*file is not a folder"):
        save_model(model, tmp_path / "file" / "below")


def test_symbolic_link_is_followed(network, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real")
    save_model(network(), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    load_model(tmp_path / "real")


UNSUPPORTED = {
    "operator object": lambda: sn.create_model("cnn-3", operator=sn.SigmoidAngle(0.3)),
    "loss object": lambda: sn.create_model("cnn-3", loss=sn.WSoftmaxLoss()),
    "other loss": lambda: _changed(lambda model: setattr(model, "criterion", sn.WSoftmaxLoss())),
    "other layer": lambda: _changed(lambda model: setattr(model.features, "fully_connected", torch.nn.Identity())),
    "other head": lambda: _changed(lambda model: setattr(model, "head", sn.AngularHead(256, 11))),
    "no config": lambda: _changed(lambda model: model.config.clear()),
    "on meta": lambda: _on_meta(),
}
REASONS = {
    "operator object": "operator must be a value that JSON supports, got an object of type SigmoidAngle",
    "loss object": "loss must be a value that JSON supports, got an object of type WSoftmaxLoss",
    "other loss": "got WSoftmaxLoss.* instead of SoftmaxLoss.* for criterion",
    "other layer": r"got Identity\(\) instead of Linear.* for features.fully_connected",
    "other head": "got AngularHead.*num_classes=11.* instead of AngularHead.* for head",
    "no config": "got a config without a name",
    "on meta": "has no values yet",
}


def _changed(change):
    model = sn.create_model("cnn-3", operator=None, widths=(2, 2, 2))
    change(model)
    return model


def _on_meta():
    with torch.device("meta"):
        return sn.create_model("cnn-3")


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_models_raise(tmp_path, case):
    with pytest.raises(ModelError, match=REASONS[case]) as caught:
        save_model(UNSUPPORTED[case](), tmp_path / "saved")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_invalid_arguments_raise(network, tmp_path):
    with pytest.raises(
        TypeError, match="model must be a Classifier of create_model or a module with sphere layers, got Linear"
    ):
        save_model(torch.nn.Linear(2, 2), tmp_path / "saved")
    for metadata, message in (
        ({"x": object()}, r"metadata\['x'\] must be a value that JSON supports, got an object of type object"),
        ({"x": [float("nan")]}, r"metadata\['x'\]\[0\] must be finite"),
        ({1: 2}, "must have strings as keys"),
    ):
        with pytest.raises(ModelError, match=message):
            save_model(network(), tmp_path / "saved", metadata=metadata)
    with pytest.raises(TypeError, match="metadata must be None or a mapping"):
        save_model(network(), tmp_path / "saved", metadata=[("a", 1)])
    save_model(network(), tmp_path / "saved")
    for device in ("gpu", "cuda:99", "meta"):
        with pytest.raises(ValueError, match=rf"device '{device}' is not available here \("):
            load_model(tmp_path / "saved", device=device)


def test_class_weights_that_were_replaced_are_saved(tmp_path):
    model = sn.create_model("cnn-3", 3, widths=(4, 4, 4), loss_options={"class_weight": torch.tensor([1.0, 2.0, 3.0])})
    model.criterion.class_weight = torch.tensor([0.1, 2.0, 5.0])
    save_model(model, tmp_path / "model")
    assert torch.equal(load_model(tmp_path / "model").criterion.class_weight, model.criterion.class_weight)


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
@pytest.mark.parametrize("overwrite", [True, False])
def test_file_of_another_program_is_kept(overwrite, exchange, network, tmp_path, monkeypatch):
    """The other program writes after the folder was checked, and again while the earlier folder is removed."""
    model, folder = network(), tmp_path / "saved"
    if overwrite:
        save_model(model, folder, metadata={"which": "old"})
    else:
        folder.mkdir()
    exchange_names, remove_folder, late = atomic._exchange, Path.rmdir, []

    def exchange_later(first, second):
        (second / "notes.txt").write_text("of another program")
        (second / "results").mkdir()
        (second / "results" / "a.txt").write_text("inside")
        return exchange and exchange_names(first, second)

    def remove_later(path):
        if not late:
            late.append(path / "late.txt")
            late[0].write_text("written while the earlier folder is removed")
        remove_folder(path)

    monkeypatch.setattr(atomic, "_exchange", exchange_later)
    monkeypatch.setattr(Path, "rmdir", remove_later)
    save_model(model, folder, metadata={"which": "new"}, overwrite=overwrite)
    assert load_metadata(folder) == {"which": "new"}
    load_model(folder)
    names = {"README.md", "config.json", "model.safetensors", "notes.txt", "results", "late.txt"}
    assert {path.name for path in folder.iterdir()} == names
    assert (folder / "notes.txt").read_text() == "of another program"
    assert (folder / "results" / "a.txt").read_text() == "inside"
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_model_that_another_program_saves_into_an_empty_folder_is_kept(network, tmp_path, monkeypatch):
    folder = tmp_path / "saved"
    folder.mkdir()
    exchange = atomic._exchange

    def exchange_later(first, second):
        (second / "config.json").write_text("of another program")
        return exchange(first, second)

    monkeypatch.setattr(atomic, "_exchange", exchange_later)
    save_model(network(), folder)
    (kept,) = folder.glob("config.json.*")
    assert kept.read_text() == "of another program"
    load_model(folder)


def test_half_precision_rounds_kernels_only(network, tmp_path):
    model = network(operator="sigmoid").eval()
    save_model(model, tmp_path / "whole")
    save_model(model, tmp_path / "half", half=True)
    loaded = load_model(tmp_path / "half")
    for name, tensor in model.state_dict().items():
        expected = tensor.half().float() if tensor.dim() > 1 else tensor
        assert torch.equal(loaded.state_dict()[name], expected), name
    assert {tensor.dtype for tensor in loaded.state_dict().values()} == {torch.float32, torch.int64}
    images = torch.randn(4, 3, *model.config["input_size"])
    torch.testing.assert_close(loaded(images), model(images), rtol=0, atol=1e-2)
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("whole", "half")]
    kernels = sum(4 * tensor.numel() for tensor in model.parameters() if tensor.dim() > 1)
    assert sizes[0] - sizes[1] == pytest.approx(kernels / 2, abs=200)


def test_weights_beyond_half_precision_are_refused(network, tmp_path):
    model = network(operator="cosine")
    with torch.no_grad():
        model.head.weight[0, 0] = 1e5
    with pytest.raises(ModelError, match=r"^head.weight must be at most 65,504 to be stored in half precision, got 1"):
        save_model(model, tmp_path / "half", half=True)
    assert not (tmp_path / "half").exists()
