"""Checkpoints in parts that several processes wrote: joined by one process, and rejected if parts do not fit."""

import json

import pytest
import torch
from safetensors.torch import save_file

from faults.folders import sign
from spherenet.errors import CheckpointError
from spherenet.runs.checkpoints import load_checkpoint

WEIGHT = torch.arange(10.0).reshape(5, 2)


def write(path, parts):
    """Write a checkpoint. parts: {name: (first row, tensor)} of each process."""
    path.mkdir()
    for rank, tensors in enumerate(parts, start=1):
        offsets = {
            name: {"saved_offsets": [row] + [0] * (tensor.dim() - 1) if tensor.dim() else []}
            for name, (row, tensor) in tensors.items()
        }
        content = {name: tensor.contiguous() for name, (_, tensor) in tensors.items()}
        file = path / f"shard-{rank:05d}-model-00001-of-00001.safetensors"
        save_file(content, file, {"DCP_SHARDING_INFO": json.dumps(offsets)})
    (path / "state.json").write_text('{"step": 3}\n')
    sign(path)
    return path


def test_parts_are_joined(tmp_path):
    first = {"model/w": (0, WEIGHT[:3]), "optimizer/step/w": (0, torch.tensor(7.0)), "model/empty": (0, WEIGHT[:0])}
    path = write(tmp_path / "step-00000003", [first, {"model/w": (3, WEIGHT[3:])}, {"model/w": (5, WEIGHT[5:])}])
    checkpoint = load_checkpoint(path)
    assert checkpoint.step == 3
    assert torch.equal(checkpoint.tensors["model"]["w"], WEIGHT)
    assert checkpoint.tensors["model"]["empty"].shape == (0, 2)
    assert checkpoint.tensors["optimizer"] == {"step/w": torch.tensor(7.0)}
    shapes = load_checkpoint(path, shapes_only=True).tensors["model"]["w"]
    assert (shapes.shape, shapes.dtype, shapes.device.type) == (WEIGHT.shape, WEIGHT.dtype, "meta")


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"model/w": (4, WEIGHT[4:])}, "the parts of 'model/w' do not fit together"),
        ({"model/w": (2, WEIGHT[2:])}, "the parts of 'model/w' do not fit together"),
        ({"model/w": (-1, WEIGHT[3:])}, "the parts of 'model/w' do not fit together"),
        ({"model/w": (10**18, WEIGHT[3:])}, "the parts of 'model/w' do not fit together"),
        ({"model/w": (3, WEIGHT[3:, :1])}, "the parts of 'model/w' do not fit together"),
        ({"model/w": (3, WEIGHT[3:].double())}, "the parts of 'model/w' do not fit together"),
        ({"model/w": (3, torch.tensor(1.0))}, "the parts of 'model/w' do not fit together"),
        ({"model/w": (3, WEIGHT[0])}, "the parts of 'model/w' do not fit together"),
        ({"model/w": ("3", WEIGHT[3:])}, "has no valid offsets of 'model/w'"),
        ({"model/w": (True, WEIGHT[3:])}, "has no valid offsets of 'model/w'"),
        ({"model/w": ([3], WEIGHT[3:])}, "has no valid offsets of 'model/w'"),
    ],
)
@pytest.mark.parametrize("shapes_only", [False, True])
def test_parts_that_do_not_fit_are_rejected(tmp_path, second, message, shapes_only):
    path = write(tmp_path / "step-00000003", [{"model/w": (0, WEIGHT[:3])}, second])
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path, shapes_only=shapes_only)


@pytest.mark.parametrize("header", ["", "[", "null", "[]", '{"model/w": 1}', '{"model/w": {"saved_offsets": 0}}'])
def test_wrong_offsets_are_rejected(tmp_path, header):
    path = write(tmp_path / "step-00000003", [{"model/w": (0, WEIGHT)}])
    save_file({"model/w": WEIGHT}, next(path.glob("shard-*")), {"DCP_SHARDING_INFO": header})
    sign(path)
    with pytest.raises(CheckpointError):
        load_checkpoint(path)
