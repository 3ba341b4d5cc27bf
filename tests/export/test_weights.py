"""`save_weights`, `load_weights` and `load_matching`: shared tensors, views, strict and partial loading."""

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
    """Module with a tensor under three names, a view that overlaps another tensor, and a channels-last buffer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.third = self.second
        self.register_buffer("view", self.first.bias.detach()[:2])
        self.register_buffer("image", torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("also_empty", torch.zeros(0))


def test_equal_models_become_equal_files(tmp_path):
    torch.manual_seed(0)
    model = nn.ModuleDict({"tied": Tied(), 'é "\\\n\x1f\x7f\u2028': sn.SphereLinear(3, 2)})
    contents = set()
    for number in range(8):
        save_weights(model, tmp_path / f"{number}.safetensors")
        contents.add((tmp_path / f"{number}.safetensors").read_bytes())
    assert len(contents) == 1
    content = contents.pop()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert list(header["__metadata__"]) == ["format", "sphere_layers", "tied_tensors"]
    load_weights(model, tmp_path / "0.safetensors")


def test_shared_tensors_are_stored_once_and_stay_shared(tmp_path):
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


def test_shared_tensors_of_other_programs(tmp_path):
    """They may be stored under any of their names, or several times with equal values."""
    state = {name: tensor.clone().contiguous() for name, tensor in Tied().state_dict().items()}
    stored_once = {name: state[name] for name in state if not name.startswith(("first.w", "second.w"))}
    save_file(stored_once, tmp_path / "one.safetensors")
    save_file(state, tmp_path / "all.safetensors")
    for name in ("one", "all"):
        model = Tied()
        load_weights(model, tmp_path / f"{name}.safetensors")
        assert torch.equal(model.first.weight, state["third.weight"])
    save_file(state | {"second.weight": torch.zeros(4, 4)}, tmp_path / "two.safetensors")
    with pytest.raises(ModelError, match=r"has different values for second\.weight and first\.weight"):
        load_weights(Tied(), tmp_path / "two.safetensors")


def test_separate_tensors_load_a_shared_tensor(tmp_path):
    save_weights(Tied(), tmp_path / "w.safetensors")
    model = Tied()
    model.second = nn.Linear(4, 4)
    model.third = nn.Linear(4, 4)
    model.second.bias = model.third.bias
    load_weights(model, tmp_path / "w.safetensors")
    assert torch.equal(model.second.weight, model.first.weight)
    assert torch.equal(model.third.weight, model.first.weight)


def test_failed_load_leaves_the_module_unchanged(tmp_path):
    save_weights(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), tmp_path / "w.safetensors")
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ModelError, match=r"2 of another shape or type: 1\.weight \(file \[2, 3\] float32, model"):
        load_weights(model, tmp_path / "w.safetensors")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_load_keeps_dtype_and_requires_grad(tmp_path):
    save_weights(nn.Linear(2, 3), tmp_path / "w.safetensors")
    model = nn.Linear(2, 3, dtype=torch.float64).requires_grad_(False)
    load_weights(model, tmp_path / "w.safetensors")
    assert model.weight.dtype == torch.float64
    assert not model.weight.requires_grad


def test_weights_of_a_folder_and_of_a_network_with_operator_object(network, tmp_path):
    """`save_model` does not support operator objects."""
    angle = sn.LearnableSigmoidAngle(k=0.2)
    model = sn.create_model("cnn-3", operator=angle, widths=(2, 3, 4))
    save_weights(model, tmp_path / "w.safetensors")
    reloaded = sn.create_model("cnn-3", operator=sn.LearnableSigmoidAngle(), widths=(2, 3, 4))
    load_weights(reloaded, tmp_path / "w.safetensors")
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(model(images), reloaded(images))
    saved = network(operator="cosine")
    save_model(saved, tmp_path / "folder")
    other = network(operator="cosine")
    load_weights(other, tmp_path / "folder")
    assert torch.equal(other.head.weight, saved.head.weight)
    with pytest.raises(ModelError, match="operator='cosine' instead of a plain layer"):
        load_weights(network(operator=None), tmp_path / "folder")


def test_loaded_weights_do_not_depend_on_the_file(tmp_path):
    save_weights(nn.Linear(2, 3), tmp_path / "w.safetensors")
    stored = load_file(tmp_path / "w.safetensors")["weight"].clone()
    model = nn.Linear(2, 3)
    load_weights(model, tmp_path / "w.safetensors")
    (tmp_path / "w.safetensors").write_bytes(b"")
    assert torch.equal(model.weight, stored)


def test_load_matching_for_other_classes(network, tmp_path):
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
    with pytest.raises(ModelError, match="must contain a tensor that fits the model, got only others: "):
        load_matching(nn.Linear(2, 2), tmp_path / "saved")


class WithExtraState(nn.Linear):
    def get_extra_state(self):
        return {"counter": 3}

    def set_extra_state(self, state):
        pass


UNSUPPORTED = {
    "extra state": (lambda: WithExtraState(2, 2), "_extra_state must be a tensor to be saved or loaded, got dict"),
    "lazy": (lambda: nn.LazyLinear(2), "weight has no values yet: run the model once"),
    "meta": (lambda: nn.Linear(2, 2, device="meta"), "weight has no values yet"),
    "sparse": (lambda: _with_buffer(torch.eye(3).to_sparse()), r"buffer must be a dense tensor.*torch\.sparse_coo"),
}


def _with_buffer(tensor):
    module = nn.Module()
    module.register_buffer("buffer", tensor)
    return module


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_state_raises(tmp_path, case):
    make, message = UNSUPPORTED[case]
    with pytest.raises(ModelError, match=message):
        save_weights(make(), tmp_path / "w.safetensors")
    assert not list(tmp_path.iterdir())


def test_invalid_paths_raise(tmp_path):
    with pytest.raises(ModelError, match="a folder has that name"):
        save_weights(nn.Linear(2, 2), tmp_path)
    with pytest.raises(ModelError, match=r"the file .*model\.safetensors does not exist"):
        load_weights(nn.Linear(2, 2), tmp_path)
    with pytest.raises(ModelError, match=r"the file .*x\.safetensors does not exist"):
        load_matching(nn.Linear(2, 2), tmp_path / "x.safetensors")
