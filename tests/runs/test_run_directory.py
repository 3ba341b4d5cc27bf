"""The run directory: whole or absent files, cut-back metrics, checkpoints that prove themselves."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spherenet.errors import CheckpointError, RunError
from spherenet.files import is_temporary, replacing, write_json
from spherenet.runs import Checkpoint, Checkpoints, MetricsFile, RunDirectory
from spherenet.runs.checkpoints import load_checkpoint


def checkpoint(step, value=0.0):
    weight = torch.full((3, 4), float(value))
    return Checkpoint(
        step, {"model": {"weight": weight, "tied": weight}, "optimizer": {"exp_avg/weight": weight}}, {"x": [1]}
    )


def test_a_failed_write_leaves_the_old_file_and_no_temporary(tmp_path):
    path = tmp_path / "config.json"
    write_json(path, {"a": 1})

    def fail():
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert json.loads(path.read_text()) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.json"]


def test_json_refuses_what_no_reader_takes(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "x.json", {"loss": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_metrics_are_whole_lines(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    assert metrics.read() == []
    metrics.append({"step": 1, "split": "train", "loss": float("nan"), "nested": {"a": [float("inf")]}})
    metrics.append({"step": 2, "split": "test", "loss": 0.5})
    assert metrics.read()[0] == {"step": 1, "split": "train", "loss": None, "nested": {"a": [None]}}
    with open(metrics.path, "a") as file:
        file.write('{"step": 3, "spl')  # what a kill leaves
    assert [row["step"] for row in metrics.read()] == [1, 2]
    metrics.cut_back(1)
    assert [row["step"] for row in metrics.read()] == [1]
    assert metrics.path.read_text().endswith("}\n")


@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"step": -1, "split": "test"}', '{"step": true, "split": "test"}',
                                  '{"step": 1}', "[" * 100_000])  # fmt: skip
def test_a_damaged_line_is_named(tmp_path, line):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.path.write_text(f'{{"step": 1, "split": "test"}}\n{line}\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl is damaged: line 2"):
        metrics.read()


def test_checkpoints_come_back_bit_for_bit(tmp_path):
    path = Checkpoints(tmp_path).save(checkpoint(7, 1 / 3))
    found = load_checkpoint(path)
    assert found.step == 7
    assert found.state == {"x": [1]}
    assert torch.equal(found.tensors["model"]["weight"], torch.full((3, 4), 1 / 3))
    assert set(found.tensors["model"]) == {"weight", "tied"}


def test_the_last_two_and_the_best_stay(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert checkpoints.newest() == (None, [])
    for step in (5, 10, 15, 20):
        checkpoints.save(checkpoint(step))
        checkpoints.save(checkpoint(step), best=step < 15)
    assert [path.name for path in checkpoints.paths()] == ["step-00000015", "step-00000020"]
    assert [path.name for path in checkpoints.paths("best")] == ["best-00000010"]
    checkpoints.remove_after(15)
    assert [path.name for path in checkpoints.paths()] == ["step-00000015"]


def test_saving_a_step_again_replaces_it(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(checkpoint(5, 1))
    checkpoints.save(checkpoint(5, 2))
    found, _ = checkpoints.newest()
    assert found.tensors["model"]["weight"][0, 0] == 2


DAMAGE = {
    "empty": lambda data: b"",
    "ten bytes": lambda data: data[:10],
    "half": lambda data: data[: len(data) // 2],
    "one byte short": lambda data: data[:-1],
    "a bit flipped": lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
}


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_name_and_the_previous_one_used(tmp_path, file, kind):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(checkpoint(1))
    damaged = checkpoints.save(checkpoint(2)) / file
    damaged.write_bytes(DAMAGE[kind](damaged.read_bytes()))
    found, complaints = checkpoints.newest()
    assert found.step == 1
    assert len(complaints) == 1
    assert "step-00000002" in complaints[0]


@pytest.mark.parametrize(
    "manifest", ["[]", "{}", '{"state.json": 3}', '{"state.json": "x", "../a": "y"}', "[" * 100_000]
)
def test_a_hostile_manifest_is_refused(tmp_path, manifest):
    path = Checkpoints(tmp_path).save(checkpoint(1))
    (path / "manifest.json").write_text(manifest + "\n")
    with pytest.raises(CheckpointError):
        load_checkpoint(path)


def test_a_pickle_in_a_checkpoint_is_refused_without_running_it(tmp_path):
    import hashlib
    import pickle

    class Evil:
        def __reduce__(self):
            return (Path(tmp_path / "ran").touch, ())

    path = Checkpoints(tmp_path / "checkpoints").save(checkpoint(1))
    data = pickle.dumps(Evil())
    (path / "model.safetensors").write_bytes(data)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["model.safetensors"] = hashlib.sha256(data).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest) + "\n")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(path)
    assert not (tmp_path / "ran").exists()


def test_what_a_kill_left_is_cleaned(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    run.write_config({})
    (run.path / ".writing-1-config.json").write_text("half")
    (run.path / "checkpoints" / ".writing-1-step-00000001").mkdir(parents=True)
    assert run.checkpoints.paths() == []
    run.clean()
    assert not any(is_temporary(path) for path in run.path.rglob("*"))


def test_a_folder_is_a_run_or_is_refused(tmp_path):
    with pytest.raises(RunError, match="is not a folder"):
        RunDirectory.open(tmp_path / "none")
    with pytest.raises(RunError, match=r"no config\.json"):
        RunDirectory.open(tmp_path)
    (tmp_path / "letter.txt").write_text("dear …")
    with pytest.raises(RunError, match="is not empty and not a run"):
        RunDirectory.create(tmp_path)
    run = RunDirectory.create(tmp_path / "run")
    run.write_config({"a": 1})
    with pytest.raises(RunError, match="holds a run already"):
        RunDirectory.create(tmp_path / "run")
    with pytest.raises(RunError, match="has not finished"):
        _ = run.summary
    run.write_summary({"accuracy": 0.5})
    assert RunDirectory.open(tmp_path / "run").summary == {"accuracy": 0.5}
    (tmp_path / "run" / "config.json").write_text("[]")
    with pytest.raises(RunError, match="not a JSON object"):
        _ = run.config
    with pytest.raises(RunError, match="cannot be made"):
        RunDirectory.create(tmp_path / "letter.txt" / "run")


HOLD = """
import sys, time
from spherenet.runs import RunDirectory
with RunDirectory.open(sys.argv[1]).locked():
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_lock_keeps_others_out_and_dies_with_its_owner(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    run.write_config({})
    owner = subprocess.Popen([sys.executable, "-c", HOLD, str(run.path)], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout.readline() == "held\n"
        with pytest.raises(RunError, match="is in use by another process"), run.locked():
            pass
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    with run.locked():
        pass


@pytest.mark.skipif(os.name != "posix", reason="limits of a process are POSIX")
def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path):
    code = """
import resource, sys, torch
from pathlib import Path
from spherenet.errors import CheckpointError
from spherenet.runs import Checkpoint, Checkpoints
import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
checkpoints = Checkpoints(Path(sys.argv[1]))
checkpoints.save(Checkpoint(1, {"model": {"w": torch.zeros(10)}}, {}))
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    checkpoints.save(Checkpoint(2, {"model": {"w": torch.zeros(100_000)}}, {}))
except CheckpointError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "step-00000002 could not be written" in said.stdout
    assert "earlier ones are intact" in said.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    load_checkpoint(tmp_path / "step-00000001")
