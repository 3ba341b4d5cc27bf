"""The run directory: atomic files, metrics that are cut back, and checkpoints with checksums."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spherenet._util import atomic
from spherenet._util.atomic import atomic_file, atomic_folder, is_temporary, write_json
from spherenet._util.files import sync
from spherenet.errors import CheckpointError, RunError
from spherenet.runs import Checkpoint, Checkpoints, MetricsFile, RunDirectory
from spherenet.runs.checkpoints import load_checkpoint


def checkpoint(step, value=0.0):
    weight = torch.full((3, 4), float(value))
    return Checkpoint(
        step, {"model": {"weight": weight, "tied": weight}, "optimizer": {"exp_avg/weight": weight}}, {"x": [1]}
    )


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_number_that_cannot_be_written_again_is_not_read(tmp_path, number):
    (tmp_path / "config.json").write_text(f'{{"format": 1, "data": {{"test": {number}}}}}')
    with pytest.raises(RunError, match="is not a finite number"):
        _ = RunDirectory.open(tmp_path).config


def write_half_a_file(path):
    with atomic_file(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError


def write_half_a_folder(path):
    with atomic_folder(path) as temporary:
        (temporary / "half").touch()
        raise RuntimeError


def test_failed_write_keeps_the_old_file_and_no_temporary_one(tmp_path):
    path = tmp_path / "config.json"
    write_json(path, {"a": 1})
    with pytest.raises(RuntimeError):
        write_half_a_file(path)
    assert json.loads(path.read_text()) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.json"]


def test_failed_write_keeps_the_old_folder_and_no_temporary_one(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "old").touch()
    with pytest.raises(RuntimeError):
        write_half_a_folder(tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["folder", "old"]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_folder_replaces_another_one(tmp_path, monkeypatch, can_exchange):
    if not can_exchange:
        monkeypatch.setattr(atomic, "_exchange", lambda first, second: False)
    for name in ("old", "new"):
        with atomic_folder(tmp_path / "folder") as temporary:
            (temporary / name).touch()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["folder", "new"]


def test_files_written_beside_a_file_are_moved_with_it(tmp_path):
    """As for the external data of an ONNX file."""
    with atomic_file(tmp_path / "model.onnx") as temporary:
        temporary.write_text("model")
        temporary.with_name("model.onnx.data").write_text("data")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]


KILLED = """
import os, signal, sys
from pathlib import Path
from spherenet._util.atomic import {writer}
with {writer}(Path(sys.argv[1])) as new:
    (new if new.is_dir() else new.parent).joinpath("half").write_text("half")
    {end}
"""


@pytest.mark.parametrize("writer", ["atomic_file", "atomic_folder"])
def test_next_write_removes_what_a_killed_process_left(tmp_path, writer):
    killed = KILLED.format(writer=writer, end="os.kill(os.getpid(), signal.SIGKILL)")
    subprocess.run([sys.executable, "-c", killed, str(tmp_path / "target")], timeout=240)
    (left,) = tmp_path.iterdir()
    assert is_temporary(left)
    (tmp_path / ".writing-notes").mkdir()  # not one of ours
    (tmp_path / left.name.replace("-new", "-old")).mkdir()  # may be the only copy of an earlier folder
    write_json(tmp_path / "other.json", 1)
    assert not left.exists()
    assert len(list(tmp_path.iterdir())) == 3


def test_unfinished_folder_of_a_running_process_is_kept(tmp_path):
    waiting = KILLED.format(writer="atomic_folder", end="print('ready', flush=True); sys.stdin.read()")
    arguments = [sys.executable, "-c", waiting, str(tmp_path / "target")]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        with atomic_file(tmp_path / "own.json") as own:  # also in one process
            write_json(tmp_path / "other.json", 1)
            own.write_text("1")
        assert len([entry for entry in tmp_path.iterdir() if is_temporary(entry)]) == 1
        process.communicate()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["other.json", "own.json", "target"]
    assert (tmp_path / "target" / "half").read_text() == "half"


def test_folder_that_is_removed_before_it_is_locked_is_created_again(tmp_path, monkeypatch):
    original, calls = atomic._locked, []

    def removed_first(folder, *, alone=False):
        if not alone and not calls:
            calls.append(folder)
            folder.rmdir()
        return original(folder, alone=alone)

    monkeypatch.setattr(atomic, "_locked", removed_first)
    write_json(tmp_path / "a.json", 1)
    assert calls
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_file_does_not_replace_a_folder(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match="a folder has that name"):
        write_json(tmp_path / "folder", {})
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_mode_of_a_file_follows_the_umask(tmp_path):
    previous = os.umask(0o027)
    try:
        with atomic_file(tmp_path / "file") as temporary:
            temporary.unlink()
            os.close(os.open(temporary, os.O_CREAT | os.O_WRONLY, 0o600))  # as safetensors creates its files
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_error_names_the_target_instead_of_the_temporary_file(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        write_json(tmp_path / "missing" / "config.json", {})
    assert caught.value.filename == str(tmp_path / "missing" / "config.json")


def test_sync_does_not_follow_links_or_open_pipes(tmp_path):
    (tmp_path / "file").touch()
    sync(tmp_path / "file")
    sync(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    for name, kind in (("link", "a link"), ("pipe", "a pipe")):
        with pytest.raises(OSError, match=f"must be a regular file, got {kind}"):
            sync(tmp_path / name)


def test_json_with_nan_is_rejected(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "x.json", {"loss": float("nan")})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [3, 4000, 4096, 20_000])
@pytest.mark.parametrize("unfinished", [b"", b'{"step": 9', b"x" * 10_000])
def test_last_row_is_read_from_the_end(tmp_path, size, unfinished):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    assert metrics.tail() is None
    for count in (0, 1, 2, 50):
        lines = [
            json.dumps({"step": at, "split": "train", "note": "a" * (size if at % 2 else 3)}) for at in range(count)
        ]
        metrics.path.write_bytes("".join(f"{line}\n" for line in lines).encode() + unfinished)
        assert metrics.tail() == metrics.last()[1]
    metrics.path.write_bytes(b"not JSON\n")
    with pytest.raises(RunError, match=r"metrics\.jsonl is corrupt: line at the end is not JSON\."):
        metrics.tail()


def test_unfinished_line_of_metrics_is_ignored(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    assert metrics.read() == []
    metrics.append({"step": 1, "split": "train", "loss": float("nan"), "nested": {"a": [float("inf")]}})
    metrics.append({"step": 2, "split": "test", "loss": 0.5})
    assert metrics.read()[0] == {"step": 1, "split": "train", "loss": None, "nested": {"a": [None]}}
    with open(metrics.path, "a") as file:
        file.write('{"step": 3, "spl')  # left by a killed process
    assert [row["step"] for row in metrics.read()] == [1, 2]
    metrics.cut_back(1)
    assert [row["step"] for row in metrics.read()] == [1]
    assert metrics.path.read_text().endswith("}\n")


@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"step": -1, "split": "test"}', '{"step": true, "split": "test"}',
                                  '{"step": 1}', "[" * 100_000])  # fmt: skip
def test_corrupt_line_is_named(tmp_path, line):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.path.write_text(f'{{"step": 1, "split": "test"}}\n{line}\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl is corrupt: line 2"):
        metrics.read()


def filled_metrics(folder, rows=10):
    file = MetricsFile(folder / "metrics.jsonl")
    for step in range(rows):
        file.append({"step": step, "split": "train"})
    return file


def test_rows_are_read_one_by_one_without_a_bound_and_as_a_list_with_one(tmp_path, monkeypatch):
    file = filled_metrics(tmp_path)
    monkeypatch.setattr("spherenet.runs.metrics.MOST_READ", 9)
    assert [row["step"] for row in file.rows()] == list(range(10))
    assert file.last() == (10, {"step": 9, "split": "train"})
    assert file.count_valid() == (10, None)
    with pytest.raises(RunError, match=r"must have at most 9 rows and .* bytes to be read at once"):
        file.read()
    monkeypatch.setattr("spherenet.runs.metrics.MOST_READ", 10)
    assert len(file.read()) == 10
    monkeypatch.setattr("spherenet.runs.metrics.LARGEST_READ", 100)
    with pytest.raises(RunError, match="and 100 bytes to be read at once"):
        file.read()


@pytest.mark.parametrize("length", [99, 100, 101, 250])
def test_line_that_is_too_long_is_corrupt(tmp_path, monkeypatch, length):
    monkeypatch.setattr("spherenet.runs.metrics.LARGEST_ROW", 100)
    file = filled_metrics(tmp_path, 2)
    row = b'{"step": 2, "split": "train"}'
    with file.path.open("ab") as stream:
        stream.write(row.ljust(length) + b"\n" + row + b"\n")
    assert len(MetricsFile(file.path)) == 4
    if length <= 100:
        assert len(file.read()) == 4
        return
    assert file.count_valid() == (2, f"{file.path} is corrupt: line 3 has more than 100 bytes.")
    file.cut_back(10)
    assert [row["step"] for row in file.read()] == [0, 1, 2]
    assert (tmp_path / "metrics-corrupt.jsonl").stat().st_size > 90 + length


def test_checkpoint_round_trip_is_bit_identical(tmp_path):
    path = Checkpoints(tmp_path).save(checkpoint(7, 1 / 3))
    loaded = load_checkpoint(path)
    assert loaded.step == 7
    assert loaded.state == {"x": [1]}
    assert torch.equal(loaded.tensors["model"]["weight"], torch.full((3, 4), 1 / 3))
    assert set(loaded.tensors["model"]) == {"weight", "tied"}


def test_last_two_and_best_checkpoints_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert checkpoints.newest() == (None, [])
    for step in (5, 10, 15, 20):
        checkpoints.save(checkpoint(step))
        checkpoints.save(checkpoint(step), best=step < 15)
    assert [path.name for path in checkpoints.paths()] == ["step-00000015", "step-00000020"]
    assert [path.name for path in checkpoints.paths("best")] == ["best-00000010"]
    checkpoints.remove_after(15)
    assert [path.name for path in checkpoints.paths()] == ["step-00000015"]


def test_saving_a_step_again_replaces_its_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(checkpoint(5, 1))
    checkpoints.save(checkpoint(5, 2))
    newest, _ = checkpoints.newest()
    assert newest.tensors["model"]["weight"][0, 0] == 2


CORRUPTIONS = {
    "empty": lambda data: b"",
    "ten bytes": lambda data: data[:10],
    "half": lambda data: data[: len(data) // 2],
    "one byte short": lambda data: data[:-1],
    "a bit flipped": lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
}


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_corrupt_checkpoint_is_named_and_the_previous_one_used(tmp_path, file, corruption):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(checkpoint(1))
    corrupt = checkpoints.save(checkpoint(2)) / file
    corrupt.write_bytes(CORRUPTIONS[corruption](corrupt.read_bytes()))
    newest, errors = checkpoints.newest()
    assert newest.step == 1
    assert len(errors) == 1
    assert "step-00000002" in errors[0]


@pytest.mark.parametrize(
    "manifest", ["[]", "{}", '{"state.json": 3}', '{"state.json": "x", "../a": "y"}', "[" * 100_000]
)
def test_hostile_manifest_is_rejected(tmp_path, manifest):
    path = Checkpoints(tmp_path).save(checkpoint(1))
    (path / "manifest.json").write_text(manifest + "\n")
    with pytest.raises(CheckpointError):
        load_checkpoint(path)


def test_pickle_in_a_checkpoint_is_rejected_without_running_it(tmp_path):
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


def test_unfinished_files_of_a_killed_process_are_removed(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    run.write_config({})
    (run.path / ".writing-1-config.json").write_text("half")
    (run.path / "checkpoints" / ".writing-1-step-00000001").mkdir(parents=True)
    assert run.checkpoints.paths() == []
    run.clean()
    assert not any(is_temporary(path) for path in run.path.rglob("*"))


def test_folder_that_is_not_a_run_is_rejected(tmp_path):
    with pytest.raises(RunError, match="is not a folder"):
        RunDirectory.open(tmp_path / "none")
    with pytest.raises(RunError, match=r"no config\.json"):
        RunDirectory.open(tmp_path)
    (tmp_path / "letter.txt").write_text("dear …")
    with pytest.raises(RunError, match="is not empty and not a run"):
        RunDirectory.create(tmp_path)
    run = RunDirectory.create(tmp_path / "run")
    run.write_config({"a": 1})
    with pytest.raises(RunError, match="contains a run"):
        RunDirectory.create(tmp_path / "run")
    with pytest.raises(RunError, match="has not finished"):
        _ = run.summary
    run.write_summary({"accuracy": 0.5})
    assert RunDirectory.open(tmp_path / "run").summary == {"accuracy": 0.5}
    (tmp_path / "run" / "config.json").write_text("[]")
    with pytest.raises(RunError, match="not a JSON object"):
        _ = run.config
    with pytest.raises(RunError, match="cannot be created"):
        RunDirectory.create(tmp_path / "letter.txt" / "run")


HOLD = """
import sys, time
from spherenet.runs import RunDirectory
with RunDirectory.open(sys.argv[1]).locked():
    print("held", flush=True)
    time.sleep(60)
"""


def test_lock_excludes_other_processes_and_ends_with_its_owner(tmp_path):
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


@pytest.mark.skipif(os.name != "posix", reason="process limits of POSIX")
def test_full_disk_keeps_the_earlier_checkpoint(tmp_path):
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
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "step-00000002 could not be written" in done.stdout
    assert "earlier ones are valid" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    load_checkpoint(tmp_path / "step-00000001")
