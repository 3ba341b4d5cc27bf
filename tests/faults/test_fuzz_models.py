"""Fuzzed folders of saved models: a clean ModelError, or exactly the weights that stand in them."""

import json
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file

import spherenet as sn
from faults.mutation import answer, mutated_bytes, mutated_value
from faults.scale import FUZZ_INPUTS
from spherenet.errors import DataError, ModelError, RunError
from spherenet.export import load_metadata, load_model, save_model
from spherenet.training.saved_runs import load_predictor

POINT = 11
METADATA = {"classes": ["a", "b", "c"], "preprocessing": sn.data.Preprocessing.standard((8, 8), 1).as_dict()}


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    model = sn.create_model("cnn-3", 3, operator="learnable", loss="ga-linear", widths=(4, 5, 6), in_channels=1,
                            input_size=8)  # fmt: skip
    save_model(model, tmp_path / "model", metadata=METADATA)
    return tmp_path / "model"


def read(folder):
    """Load a model by every door, and compare it with its file."""
    load_metadata(folder)
    model = load_model(folder)
    stored = load_file(folder / "model.safetensors")
    state = model.state_dict()
    for name, tensor in stored.items():
        assert torch.equal(state[name].nan_to_num(7), tensor.to(state[name].dtype).nan_to_num(7)), name
    with torch.no_grad():
        scores = model(torch.zeros(1, model.config["in_channels"], *model.config["input_size"]))
    assert scores.shape == (1, model.config["num_classes"])
    predictor = load_predictor(folder)
    assert len(predictor.classes) >= 0


def bytes_of(name):
    def change(folder, chance):
        path = folder / name
        path.write_bytes(mutated_bytes(path.read_bytes(), chance))

    return change


def odd_config(folder, chance):
    path = folder / "config.json"
    path.write_text(json.dumps(mutated_value(json.loads(path.read_text()), chance)))


def odd_header(folder, chance):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.dumps(mutated_value(json.loads(whole[8 : 8 + length]), chance)).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + whole[8 + length :])


CHANGES = {
    "config.json": bytes_of("config.json"),
    "values of config.json": odd_config,
    "model.safetensors": bytes_of("model.safetensors"),
    "the header of model.safetensors": odd_header,
}


@pytest.mark.parametrize("part", CHANGES)
def test_saved_models(saved, tmp_path, tried, part):
    chance = random.Random(0)
    refused, folder, times = 0, tmp_path / "fuzzed", FUZZ_INPUTS // 2
    for _ in range(times):
        shutil.copytree(saved, folder, dirs_exist_ok=True)
        CHANGES[part](folder, chance)
        _, sentence = answer(read, folder, (ModelError, DataError, RunError))
        refused += sentence is not None
        tried("a saved model with a fuzzed file")
    assert refused > times // 10
