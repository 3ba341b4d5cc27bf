"""Tensors of any module: ties, views, strict loading, and loading what fits."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import spherenet as sn
from spherenet.errors import ModelError
from spherenet.export import load_matching, load_weights, save_model, save_weights


class Tied(nn.Module):
    """One tensor under three names, a view that overlaps another, and a buffer of another layout."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.third = self.second
        self.register_buffer("part", self.first.bias.detach()[:2])
        self.register_buffer("image", torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("also_empty", torch.zeros(0))


def test_ties_are_stored_once_and_kept(tmp_path):
    model, other = Tied(), Tied()
    save_weights(model, tmp_path / "w.safetensors")
    with safe_open(tmp_path / "w.safetensors", "pt") as file:
        assert "second.weight" not in file.keys()  # noqa: SIM118
        ties = json.loads(file.metadata()["tied_tensors"])
    assert ties["second.weight"] == ties["third.weight"] == "first.weight"
    load_weights(other, tmp_path / "w.safetensors")
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    assert other.second.weight is other.first.weight


def test_ties_as_other_programs_write_them(tmp_path):
    """Under any one of their names, or several times with one value; two values are no tie."""
    state = {name: tensor.clone().contiguous() for name, tensor in Tied().state_dict().items()}
    ours = {name: state[name] for name in state if not name.startswith(("first.w", "second.w"))}
    save_file(ours, tmp_path / "one.safetensors")
    save_file(state, tmp_path / "all.safetensors")
    for name in ("one", "all"):
        model = Tied()
        load_weights(model, tmp_path / f"{name}.safetensors")
        assert torch.equal(model.first.weight, state["third.weight"])
    save_file(state | {"second.weight": torch.zeros(4, 4)}, tmp_path / "two.safetensors")
    with pytest.raises(ModelError, match=r"has two values for second\.weight and first\.weight"):
        load_weights(Tied(), tmp_path / "two.safetensors")


def test_untied_weights_take_a_tied_file(tmp_path):
    save_weights(Tied(), tmp_path / "w.safetensors")
    model = Tied()
    model.second = nn.Linear(4, 4)
    model.third = nn.Linear(4, 4)
    model.second.bias = model.third.bias
    load_weights(model, tmp_path / "w.safetensors")
    assert torch.equal(model.second.weight, model.first.weight)
    assert torch.equal(model.third.weight, model.first.weight)


def test_strict_loading_changes_nothing_on_failure(tmp_path):
    save_weights(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), tmp_path / "w.safetensors")
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ModelError, match=r"2 of another shape or type: 1\.weight \(file \[2, 3\] float32, model"):
        load_weights(model, tmp_path / "w.safetensors")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_dtype_and_requires_grad_are_the_modules(tmp_path):
    save_weights(nn.Linear(2, 3), tmp_path / "w.safetensors")
    model = nn.Linear(2, 3, dtype=torch.float64).requires_grad_(False)
    load_weights(model, tmp_path / "w.safetensors")
    assert model.weight.dtype == torch.float64
    assert not model.weight.requires_grad


def test_weights_of_a_folder_and_of_a_changed_network(network, tmp_path):
    """What save_model refuses: a network with an operator of one's own."""
    angle = sn.LearnableSigmoidAngle(k=0.2)
    model = sn.create_model("cnn-3", operator=angle, widths=(2, 3, 4))
    save_weights(model, tmp_path / "w.safetensors")
    twin = sn.create_model("cnn-3", operator=sn.LearnableSigmoidAngle(), widths=(2, 3, 4))
    load_weights(twin, tmp_path / "w.safetensors")
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(model(images), twin(images))
    saved = network(operator="cosine")
    save_model(saved, tmp_path / "folder")
    plain = network()
    load_weights(plain, tmp_path / "folder")
    assert torch.equal(plain.head.weight, saved.head.weight)


def test_the_file_can_change_after_it_was_read(tmp_path):
    save_weights(nn.Linear(2, 3), tmp_path / "w.safetensors")
    stored = load_file(tmp_path / "w.safetensors")["weight"].clone()
    model = nn.Linear(2, 3)
    load_weights(model, tmp_path / "w.safetensors")
    (tmp_path / "w.safetensors").write_bytes(b"")
    assert torch.equal(model.weight, stored)


def test_fine_tuning_to_other_classes(network, tmp_path):
    source = network(operator="cosine", loss="ga-linear", num_classes=10)
    save_model(source, tmp_path / "saved")
    model = network(operator="cosine", loss="w-cosine", num_classes=4, head_bias=True)
    head = model.head.weight.clone()
    match = load_matching(model, tmp_path / "saved")
    assert match.left_in_model == ["head.weight", "head.bias"]
    assert set(match.left_in_file) == {"head.weight"}
    assert torch.equal(model.head.weight, head)
    for name in match.loaded:
        assert torch.equal(model.state_dict()[name], source.state_dict()[name])
    with pytest.raises(ModelError, match="holds no tensor that fits the model: its first names are"):
        load_matching(nn.Linear(2, 2), tmp_path / "saved")


class WithExtraState(nn.Linear):
    def get_extra_state(self):
        return {"counter": 3}

    def set_extra_state(self, state):
        pass


WRONG = {
    "extra state": (lambda: WithExtraState(2, 2), "_extra_state must be a tensor to be saved or loaded, got dict"),
    "lazy": (lambda: nn.LazyLinear(2), "weight has no values yet: run the model once"),
    "meta": (lambda: nn.Linear(2, 2, device="meta"), "weight has no values yet"),
    "sparse": (lambda: _with_buffer(torch.eye(3).to_sparse()), r"buffer must be a dense tensor.*torch\.sparse_coo"),
}


def _with_buffer(tensor):
    module = nn.Module()
    module.register_buffer("buffer", tensor)
    return module


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_saved(tmp_path, case):
    make, message = WRONG[case]
    with pytest.raises(ModelError, match=message):
        save_weights(make(), tmp_path / "w.safetensors")
    assert not list(tmp_path.iterdir())


def test_wrong_places(tmp_path):
    with pytest.raises(ModelError, match="a folder has that name"):
        save_weights(nn.Linear(2, 2), tmp_path)
    with pytest.raises(ModelError, match=r"there is no file .*model\.safetensors"):
        load_weights(nn.Linear(2, 2), tmp_path)
    with pytest.raises(ModelError, match=r"there is no file .*x\.safetensors"):
        load_matching(nn.Linear(2, 2), tmp_path / "x.safetensors")
