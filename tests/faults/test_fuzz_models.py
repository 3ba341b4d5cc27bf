"""Readers of mutated saved models raise an error of one sentence or return the exact weights."""

import json
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file

import spherenet as sn
from faults.mutation import call_reader, mutated_bytes, mutated_value
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
    """Load a model with every function, and compare it with its file."""
    load_metadata(folder)
    model = load_model(folder)
    stored = load_file(folder / "model.safetensors")
    state = model.state_dict()
    for name, tensor in stored.items():
        assert torch.equal(state[name].nan_to_num(7), tensor.to(state[name].dtype).nan_to_num(7)), name
    with torch.no_grad():
        scores = model(torch.zeros(1, model.config["in_channels"], *model.config["input_size"]))
    assert scores.shape == (1, model.config["num_classes"])
    classes = load_metadata(folder).get("classes")
    assert list(load_predictor(folder).classes) == [str(name) for name in classes]


def mutate_bytes(name):
    def change(folder, chance):
        path = folder / name
        path.write_bytes(mutated_bytes(path.read_bytes(), chance))

    return change


def mutate_config(folder, chance):
    path = folder / "config.json"
    path.write_text(json.dumps(mutated_value(json.loads(path.read_text()), chance)))


def mutate_header(folder, chance):
    path = folder / "model.safetensors"
    original = path.read_bytes()
    length = int.from_bytes(original[:8], "little")
    header = json.dumps(mutated_value(json.loads(original[8 : 8 + length]), chance)).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + original[8 + length :])


CHANGES = {
    "config.json": mutate_bytes("config.json"),
    "values of config.json": mutate_config,
    "model.safetensors": mutate_bytes("model.safetensors"),
    "the header of model.safetensors": mutate_header,
}


@pytest.mark.parametrize("mutation", CHANGES)
def test_mutated_saved_model(saved, tmp_path, tried, mutation):
    chance = random.Random(0)
    rejected, folder, times = 0, tmp_path / "fuzzed", FUZZ_INPUTS // 2
    for _ in range(times):
        shutil.copytree(saved, folder, dirs_exist_ok=True)
        CHANGES[mutation](folder, chance)
        _, message = call_reader(read, folder, (ModelError, DataError, RunError))
        rejected += message is not None
        tried("a saved model with a fuzzed file")
    assert rejected > times // 10
