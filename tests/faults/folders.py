"""What stands in a run's folder: compared bit for bit, looked at after a kill, damaged."""

import hashlib
import json

import torch

from spherenet.files import is_temporary
from spherenet.runs import RunDirectory
from spherenet.runs.checkpoints import load_checkpoint
from spherenet.runs.directory import examine

CLOCK = ("seconds", "peak_megabytes")
"""What differs between two equal runs."""


def is_run(path):
    """Whether a folder became a run: before its config.json is written there is nothing to go on with."""
    return (path / "config.json").is_file()


def rows(path):
    """The metrics without the clock."""
    found = RunDirectory(path).metrics.read()
    return [{name: value for name, value in row.items() if name not in CLOCK} for row in found]


def newest_step(path):
    """The step of the newest checkpoint, which must be whole, as must all others; −1 without any."""
    found, complaints = RunDirectory(path).checkpoints.newest()
    assert complaints == []
    return -1 if found is None else found.step


def assert_sound(path):
    """After a kill: whatever is there is whole; what is not whole is known as temporary."""
    if is_run(path):
        findings = examine(path)
        assert all(finding.good for finding in findings), findings


def assert_no_temporaries(path):
    assert [entry for entry in path.rglob("*") if is_temporary(entry)] == []


def tensors_of(path):
    """{"step-00000014/model/head.weight": tensor, …} of every checkpoint of a run."""
    checkpoints = RunDirectory(path).checkpoints
    return {
        f"{folder.name}/{group}/{name}": tensor
        for kind in ("step", "best")
        for folder in checkpoints.paths(kind)
        for group, tensors in load_checkpoint(folder).tensors.items()
        for name, tensor in tensors.items()
    }


def assert_same_tensors(found, expected):
    assert [name for name in expected if name not in found] == []
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def assert_same_run(path, whole):
    """The same checkpoints bit for bit, the same metrics and summary, and nothing left over.

    A kill between the last checkpoint and the removal of the one it makes superfluous leaves that one, whole. The
    note of a fault stays in the metrics of a run that goes on.
    """
    assert_sound(path)
    assert_no_temporaries(path)
    found, expected = ([entry.name for entry in RunDirectory(run).checkpoints.paths()] for run in (path, whole))
    assert found[-len(expected) :] == expected
    assert len(found) <= len(expected) + 1
    assert_same_tensors(tensors_of(path), tensors_of(whole))
    assert [row for row in rows(path) if row["split"] != "fault"] == rows(whole)
    summaries = [RunDirectory(run).summary for run in (path, whole)]
    first, second = ({name: value for name, value in found.items() if name not in CLOCK} for found in summaries)
    assert first == second


def sign(checkpoint):
    """Write the manifest that fits a checkpoint's files as they are now: what an attacker, not an accident, does."""
    files = sorted(file for file in checkpoint.iterdir() if file.name != "manifest.json")
    manifest = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest) + "\n")
