"""Rows of metrics that are lost or corrupt after a power failure: they are detected, and computed again if possible."""

import json
import os
import shutil
from pathlib import Path

import pytest

from command_line import TINY, spherenet
from spherenet._util.atomic import is_temporary
from spherenet.errors import CheckpointError
from spherenet.runs import RunDirectory
from spherenet.runs.checkpoints import load_checkpoint
from spherenet.training import StopSignals
from training_problem import assert_equal, rows, trainer, weights
from training_problem import run as train


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    run = tmp_path_factory.mktemp("trained") / "run"
    assert spherenet("train", *TINY, "--output", run) == 0
    return run


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def test_checkpoint_contains_the_number_of_rows(run):
    directory = RunDirectory(run)
    newest = load_checkpoint(directory.checkpoints.paths()[-1])
    assert newest.state["rows"] == len(directory.metrics.read()) > 0


def test_doctor_reports_lost_rows(run, capsys):
    """After a power failure there may be checkpoints and a summary, but no metrics."""
    (run / "metrics.jsonl").write_bytes(b"")
    assert spherenet("doctor", run) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("BAD")]
    assert "metrics.jsonl" in line
    assert "has 0 rows" in line


def change_lines(path, change):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(change(lines)))


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [*lines[:-1], b"{nonsense\n"],
        lambda lines: [*lines[:-1], b"\0" * 40 + b"\n"],
        lambda lines: lines[:-1],
    ],
    ids=["a bad last line", "a line of zeros", "a missing row"],
)
def test_resume_computes_lost_rows_again_from_an_older_checkpoint(tmp_path, change):
    """The result is that of an uninterrupted run."""
    expected, _ = train(tmp_path / "uninterrupted")
    prepared, _ = train(tmp_path / "run")
    change_lines(prepared.run_directory.metrics.path, change)
    resumed = trainer(tmp_path / "run")
    messages = resumed.resume()
    assert resumed.step == 8
    assert len(messages) == 1
    assert "step-00000012" in messages[0]
    assert "metrics.jsonl" in messages[0]
    resumed.run_directory.cut_back(resumed.step)
    resumed.train(StopSignals())
    assert rows(tmp_path / "run") == rows(tmp_path / "uninterrupted")
    assert_equal(weights(resumed), weights(expected))


def test_newest_checkpoint_is_used_if_all_lack_rows(tmp_path):
    """The weights are more important than the rows. A copy of the corrupt file is kept."""
    prepared, _ = train(tmp_path / "run")
    path = prepared.run_directory.metrics.path
    change_lines(path, lambda lines: [b"{nonsense\n", *lines[1:]])
    corrupt, expected = path.read_bytes(), steps_after_the_first_row(path)
    resumed = trainer(tmp_path / "run")
    messages = resumed.resume()
    assert resumed.step == 12
    assert any("line 1 is not JSON" in sentence for sentence in messages)
    resumed.run_directory.cut_back(resumed.step)
    assert [row["step"] for row in resumed.run_directory.metrics.read()] == expected
    assert (tmp_path / "run" / "metrics-corrupt.jsonl").read_bytes() == corrupt


def steps_after_the_first_row(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()[1:]]


def test_resume_skips_manifest_with_nul_character(tmp_path):
    prepared, _ = train(tmp_path / "run")
    manifest = prepared.run_directory.checkpoints.paths()[-1] / "manifest.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, "a\0b": "x"}) + "\n")
    resumed = trainer(tmp_path / "run")
    (message,) = resumed.resume()
    assert resumed.step == 8
    assert "step-00000012" in message
    for checkpoint in prepared.run_directory.checkpoints.paths():
        (checkpoint / "manifest.json").write_text(json.dumps({**content, "a\0b": "x"}) + "\n")
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        trainer(tmp_path / "run").resume()


def test_rows_are_synced_before_the_checkpoint_is_renamed(tmp_path, monkeypatch):
    """Each write to the metrics is followed by their fsync before the next rename."""
    path, unsynced, renames = tmp_path / "run" / "metrics.jsonl", set(), []
    write, fsync, replace = os.write, os.fsync, os.replace

    def place(handle):
        return os.readlink(f"/proc/self/fd/{handle}")

    def watched_write(handle, data):
        if place(handle) == str(path):
            unsynced.update({str(path), *({str(path.parent)} if not path.stat().st_size else ())})
        return write(handle, data)

    def watched_fsync(handle):
        unsynced.discard(place(handle))
        return fsync(handle)

    def watched_replace(source, target):
        if any(word in str(target) for word in ("step-", "best-", "summary")) and not is_temporary(Path(target)):
            renames.append((str(target), set(unsynced)))
        return replace(source, target)

    for name, function in (("write", watched_write), ("fsync", watched_fsync), ("replace", watched_replace)):
        monkeypatch.setattr(os, name, function)
    prepared, _ = train(tmp_path / "run")
    prepared.run_directory.write_summary({"accuracy": 0.5})
    assert len(renames) > 4
    assert [name for name, missing in renames if missing and not name.endswith((".json", ".safetensors"))] == []
    assert renames[-1][0].endswith("summary.json")
    assert not renames[-1][1]


def test_names_of_new_folders_are_synced(tmp_path, monkeypatch):
    """The names of a run's folder and of its new parents."""
    synced, fsync = set(), os.fsync

    def watched(handle):
        synced.add(os.readlink(f"/proc/self/fd/{handle}"))
        return fsync(handle)

    monkeypatch.setattr(os, "fsync", watched)
    run = RunDirectory.create(tmp_path / "a" / "b" / "run")
    assert {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")} <= synced
    assert run.path.is_dir()
