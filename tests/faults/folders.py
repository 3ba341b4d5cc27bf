"""Checks of run directories: valid after a kill, and bit-identical to another run."""

import hashlib
import json

import torch

from spherenet._util.atomic import is_temporary
from spherenet.runs import RunDirectory
from spherenet.runs.checkpoints import load_checkpoint
from spherenet.runs.directory import examine

VARYING = ("seconds", "peak_megabytes")
"""Values that differ between two equal runs."""


def is_run(path):
    """Return whether a folder is a run, which can be resumed."""
    return (path / "config.json").is_file()


def rows(path):
    """Return the metrics without durations."""
    metrics = RunDirectory(path).metrics.read()
    return [{name: value for name, value in row.items() if name not in VARYING} for row in metrics]


def newest_step(path):
    """Return the step of the newest checkpoint, −1 if there is none. It must be valid."""
    checkpoint, errors = RunDirectory(path).checkpoints.newest()
    assert errors == []
    return -1 if checkpoint is None else checkpoint.step


def assert_valid(path):
    """Assert that all files of a run are valid, except for temporary ones, as after a kill."""
    if is_run(path):
        findings = examine(path)
        assert all(finding.valid for finding in findings), findings


def assert_no_temporaries(path):
    assert [entry for entry in path.rglob("*") if is_temporary(entry)] == []


def tensors_of(path):
    """Return {"step-00000014/model/head.weight": tensor, …} for every checkpoint of a run."""
    checkpoints = RunDirectory(path).checkpoints
    return {
        f"{folder.name}/{group}/{key}": tensor
        for name in ("step", "best")
        for folder in checkpoints.paths(name)
        for group, tensors in load_checkpoint(folder).tensors.items()
        for key, tensor in tensors.items()
    }


def assert_same_tensors(tensors, expected):
    assert [name for name in expected if name not in tensors] == []
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype, name
        assert torch.equal(tensors[name], tensor), name


def assert_same_run(path, other):
    """Assert that two runs have bit-identical checkpoints, the same metrics and summary, and no temporary files.

    A kill between the last checkpoint and the removal of an older one leaves the older one, which is valid. The row of
    a fault stays in the metrics when the run is resumed.
    """
    assert_valid(path)
    assert_no_temporaries(path)
    names, expected = ([entry.name for entry in RunDirectory(run).checkpoints.paths()] for run in (path, other))
    assert names[-len(expected) :] == expected
    assert len(names) <= len(expected) + 1
    assert_same_tensors(tensors_of(path), tensors_of(other))
    assert [row for row in rows(path) if row["split"] != "fault"] == rows(other)
    summaries = [RunDirectory(run).summary for run in (path, other)]
    first, second = ({name: value for name, value in summary.items() if name not in VARYING} for summary in summaries)
    assert first == second


def sign(checkpoint):
    """Write a manifest with the checksums of a checkpoint's current files, as an attacker does."""
    files = sorted(file for file in checkpoint.iterdir() if file.name != "manifest.json")
    manifest = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest) + "\n")
