"""Rows of metrics that a power failure or an accident took: noticed, made again where possible, never a dead end."""

import json
import shutil

import pytest

from command_line import TINY, spherenet
from spherenet.errors import CheckpointError
from spherenet.runs import RunDirectory
from spherenet.runs.checkpoints import load_checkpoint
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


def test_a_checkpoint_knows_how_many_rows_there_were(run):
    found = RunDirectory(run)
    newest = load_checkpoint(found.checkpoints.paths()[-1])
    assert newest.state["rows"] == len(found.metrics.read()) > 0


def test_the_doctor_misses_lost_rows(run, capsys):
    """As a power failure left them: checkpoints and summary, but no metrics."""
    (run / "metrics.jsonl").write_bytes(b"")
    assert spherenet("doctor", run) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("BAD")]
    assert "metrics.jsonl" in line
    assert "has 0 rows" in line


def kept_lines(path, change):
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
def test_resume_makes_lost_rows_again_from_an_older_checkpoint(tmp_path, change):
    """The run ends as one that nothing happened to."""
    whole, _ = train(tmp_path / "whole")
    prepared, _ = train(tmp_path / "run")
    kept_lines(prepared.run_directory.metrics.path, change)
    resumed = trainer(tmp_path / "run")
    complaints = resumed.resume()
    assert resumed.step == 8
    assert len(complaints) == 1
    assert "step-00000012" in complaints[0]
    assert "metrics.jsonl" in complaints[0]
    resumed.run_directory.cut_back(resumed.step)
    from spherenet.engine import StopSignals

    resumed.train(StopSignals())
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")
    assert_equal(weights(resumed), weights(whole))


def test_where_no_checkpoint_has_all_rows_the_newest_is_used(tmp_path):
    """Weights are worth more than rows; the unreadable lines are set aside, not thrown away."""
    prepared, _ = train(tmp_path / "run")
    path = prepared.run_directory.metrics.path
    kept_lines(path, lambda lines: [b"{nonsense\n", *lines[1:]])
    damaged, before = path.read_bytes(), rows_after_the_first(path)
    resumed = trainer(tmp_path / "run")
    complaints = resumed.resume()
    assert resumed.step == 12
    assert any("line 1 is not JSON" in sentence for sentence in complaints)
    resumed.run_directory.cut_back(resumed.step)
    assert [row["step"] for row in resumed.run_directory.metrics.read()] == before
    assert (tmp_path / "run" / "metrics-damaged.jsonl").read_bytes() == damaged


def rows_after_the_first(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()[1:]]


def test_a_nul_in_a_manifest_leads_to_the_older_checkpoint(tmp_path):
    prepared, _ = train(tmp_path / "run")
    manifest = prepared.run_directory.checkpoints.paths()[-1] / "manifest.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, "a\0b": "x"}) + "\n")
    resumed = trainer(tmp_path / "run")
    (complaint,) = resumed.resume()
    assert resumed.step == 8
    assert "step-00000012" in complaint
    for checkpoint in prepared.run_directory.checkpoints.paths():
        (checkpoint / "manifest.json").write_text(json.dumps({**content, "a\0b": "x"}) + "\n")
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        trainer(tmp_path / "run").resume()


def test_the_rows_are_on_the_disk_before_the_checkpoint_has_its_name(tmp_path, monkeypatch):
    """The order of calls: after each write to the metrics comes their fsync, and only then a rename."""
    import os

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
        if any(word in str(target) for word in ("step-", "best-", "summary")) and "-gone-" not in str(target):
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


def test_new_folders_are_on_the_disk(tmp_path, monkeypatch):
    """The names of a run's folder, and of those made above it, are synced in their parents."""
    import os

    synced, fsync = set(), os.fsync

    def watched(handle):
        synced.add(os.readlink(f"/proc/self/fd/{handle}"))
        return fsync(handle)

    monkeypatch.setattr(os, "fsync", watched)
    run = RunDirectory.create(tmp_path / "a" / "b" / "run")
    assert {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")} <= synced
    assert run.path.is_dir()
