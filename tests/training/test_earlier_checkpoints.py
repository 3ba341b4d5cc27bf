"""Checkpoints with the counter of the margin loss that earlier versions stored can be loaded and resumed."""

import pytest
import torch

import spherenet as sn
from command_line import TINY, spherenet
from spherenet.errors import CheckpointError
from spherenet.runs import Checkpoint, RunDirectory
from spherenet.training.saved_runs import load_run
from spherenet.training.state import load_model_tensors


@pytest.fixture
def earlier_run(tmp_path):
    """Return a run of GA-Softmax whose checkpoints have the counter."""
    path = tmp_path / "run"
    assert spherenet("train", *TINY, "--loss", "ga-linear:m=4,margin_gradient=full,scale=norm", "--output", path) == 0
    store = RunDirectory.open(path).checkpoints
    for name in ("step", "best"):
        checkpoint, _ = store.newest(name)
        tensors = dict(checkpoint.tensors)
        tensors["model"] = {**tensors["model"], "criterion.iteration": torch.tensor(checkpoint.step)}
        store.save(Checkpoint(checkpoint.step, tensors, checkpoint.state), best=name == "best")
        assert "criterion.iteration" in store.newest(name)[0].tensors["model"]
    return path


@pytest.mark.parametrize("checkpoint", ["best", "last"])
def test_model_is_loaded(earlier_run, checkpoint):
    model = load_run(earlier_run, checkpoint).model
    assert "criterion.iteration" not in model.state_dict()
    assert (model.criterion.m, model.criterion.scale, model.criterion.margin_gradient) == (4, "norm", "full")


def test_run_is_resumed(earlier_run):
    assert spherenet("train", "--resume", earlier_run, "--iterations", 8, "--allow-changes") == 0
    assert RunDirectory.open(earlier_run).newest_checkpoint()[0].step == 8


def test_counter_is_unexpected_in_a_model_without_margin():
    model = sn.create_model("cnn-3", widths=(2, 2, 2))
    with pytest.raises(CheckpointError, match=r"unexpected criterion\.iteration"):
        load_model_tensors(model, model.state_dict() | {"criterion.iteration": torch.tensor(7)}, "the checkpoint")
