"""Names that UTF-8 cannot encode and values of a stranger's config.json; outputs that consist of two files."""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from command_line import command, one_sentence, spherenet
from spherenet._util.atomic import write_json
from spherenet._util.files import read_json, to_json
from spherenet._util.text import csv_cell
from spherenet.data.embeddings import Embeddings, read_embeddings, write_embeddings
from spherenet.errors import DataError
from spherenet.export import load_metadata, load_model

SMALL = ["--image-size", 16, "--widths", 4, 4, 4, "--batch-size", 4, "--iterations", 2, "--workers", 0, "--threads", 1]
FOREIGN = os.fsdecode(b"caf\xe9")  # a name in the encoding of another system
linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no names that are not valid UTF-8")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images") / "images"
    generator = np.random.default_rng(0)
    for name in ("ant", "bee"):
        (folder / name).mkdir(parents=True)
        for index in range(8):
            pixels = generator.integers(0, 255, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{index}.png")
    return folder


@pytest.fixture(scope="module")
def trained(images, tmp_path_factory):
    run = tmp_path_factory.mktemp("trained") / "run"
    assert spherenet("train", "--data", images, *SMALL, "--output", run) == 0
    return run


@pytest.fixture
def hostile(trained, tmp_path):
    """A run whose config.json has half of a surrogate pair, Markdown and terminal escapes where others have text."""
    run = shutil.copytree(trained, tmp_path / "hostile")
    config = read_json(run / "config.json")
    config["classes"] = ["half \ud800", "[x](javascript:1)"]
    config["started"] = "<script>alert(1)</script>"
    config["images"]["train"] = "[x](javascript:2)"
    config["history"] = [{"command": "spherenet train\x1b[2J \udce9"}]
    write_json(run / "config.json", config)
    return run


@linux
def test_folders_with_names_that_are_not_utf8_can_be_used(images, tmp_path, capsys):
    data, run = shutil.copytree(images, tmp_path / FOREIGN), tmp_path / "run"
    assert spherenet("train", "--data", data, *SMALL, "--output", run) == 0
    assert spherenet("train", "--resume", run, "--iterations", 4, "--allow-changes") == 0
    assert read_json(run / "config.json")["train"]["data_dir"] == str(data)
    assert spherenet("evaluate", run) == 0
    capsys.readouterr()


@linux
def test_run_and_model_that_could_not_be_read_are_not_written(trained, images, tmp_path, capsys):
    for arguments in (
        ["train", "--data", images, *SMALL, "--output", tmp_path / FOREIGN],
        ["export", trained, tmp_path / FOREIGN],
    ):
        assert spherenet(*arguments) == 2
        said = capsys.readouterr().err
        assert "must be a path in UTF-8, because safetensors reads no others." in said
        assert one_sentence(said)
    assert not (tmp_path / FOREIGN).exists()


@linux
@pytest.mark.parametrize("verb", ["export", "evaluate"])
def test_names_that_are_not_utf8_are_printed(trained, tmp_path, verb):
    arguments = [trained, tmp_path / f"{FOREIGN}.pt2"] if verb == "export" else [trained, "--image", f"{FOREIGN}.png"]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    run = subprocess.run(command(verb, *arguments), capture_output=True, cwd=tmp_path, env=environment, timeout=240)
    assert (run.returncode, run.stderr) == (0, b"")
    assert b"caf\\udce9" in run.stdout


@pytest.mark.parametrize("target", ["model.onnx", "model.pt2", "model"])
def test_run_with_hostile_values_can_be_exported(hostile, tmp_path, target, capsys):
    assert spherenet("export", hostile, tmp_path / target) == 0
    assert one_sentence(capsys.readouterr().out)
    if target == "model":
        load_model(tmp_path / target)
        assert load_metadata(tmp_path / target)["classes"][0] == "half \ud800"
        card = (tmp_path / target / "README.md").read_text(encoding="utf-8")
        assert "[x](javascript" not in card
        assert "<script>" not in card
        assert "\x1b" not in card
    else:
        record = json.loads((tmp_path / "model.preprocessing.json").read_bytes())
        assert record["classes"][0] == "half \ud800"


def test_json_escapes_only_what_utf8_cannot_encode():
    assert to_json({"name": "café"}).encode() == '{\n  "name": "café"\n}\n'.encode()
    assert json.loads(to_json({"name": FOREIGN}).encode()) == {"name": FOREIGN}


@pytest.mark.parametrize("name", ["=1+1", "＝1+1", "＠SUM(1)", "－1", "+1"])
def test_cells_are_no_formulas(name, tmp_path):
    assert csv_cell(name) == f"'{name}"
    write_embeddings(Embeddings(np.ones((1, 2), np.float32), [name], [name]), tmp_path / "x.npy")
    assert (tmp_path / "x.files.csv").read_text(encoding="utf-8").splitlines()[1] == f"./{name},'{name}"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no named pipes")
@pytest.mark.parametrize("name", ["x.npy", "x.files.csv", "x.csv"])
def test_embeddings_that_are_a_pipe_are_refused(tmp_path, name):
    write_embeddings(Embeddings(np.ones((1, 2), np.float32), ["a"], [""]), tmp_path / "x.npy")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    errors = []

    def read():
        try:
            read_embeddings(tmp_path / ("x.csv" if name == "x.csv" else "x.npy"))
        except DataError as error:
            errors.append(str(error))

    thread = threading.Thread(target=read, daemon=True)  # it would wait forever
    thread.start()
    thread.join(20)
    assert [error.rpartition(": ")[2] for error in errors] == ["must be a regular file, got a pipe."]


def killed_at(change, monkeypatch):
    """Let the given rename or removal of a file, counted from 1, raise as if the process was killed there."""
    counted = 0

    def interrupt(original):
        def changed(*arguments, **options):
            nonlocal counted
            counted += 1
            if counted == change:
                raise KeyboardInterrupt
            return original(*arguments, **options)

        return changed

    monkeypatch.setattr("spherenet._util.atomic.os.replace", interrupt(os.replace))
    monkeypatch.setattr("spherenet._util.atomic.Path.unlink", interrupt(Path.unlink))


@pytest.mark.parametrize("change", [1, 2, 3])
def test_embeddings_never_stand_beside_names_of_other_images(tmp_path, change, monkeypatch):
    old = Embeddings(np.zeros((2, 2), np.float32), ["old-a", "old-b"], ["", ""])
    new = Embeddings(np.ones((2, 2), np.float32), ["new-a", "new-b"], ["", ""])
    write_embeddings(old, tmp_path / "x.npy")
    with monkeypatch.context() as patched:
        killed_at(change, patched)
        with pytest.raises(KeyboardInterrupt):
            write_embeddings(new, tmp_path / "x.npy")
    try:
        values, files, _ = read_embeddings(tmp_path / "x.npy")
    except DataError:
        return
    assert (values.max(), files) in [(0, old.files), (1, new.files)]


def test_killed_export_leaves_no_preprocessing_of_another_file(trained, tmp_path, monkeypatch):
    target = tmp_path / "model.pt2"
    assert spherenet("export", trained, target) == 0
    before = target.read_bytes()
    for change in range(1, 6):
        with monkeypatch.context() as patched:
            killed_at(change, patched)
            spherenet("export", trained, target, "--with-preprocessing", "--overwrite")
        record = json.loads((tmp_path / "model.preprocessing.json").read_bytes())
        if target.exists() and target.read_bytes() == before:
            assert record["input"]["dtype"] == "float32"
        elif target.exists():
            assert record["input"]["dtype"] == "uint8"


def test_folder_in_place_of_a_second_file_changes_nothing(tmp_path):
    (tmp_path / "x.npy").write_bytes(b"old")
    (tmp_path / "x.files.csv").mkdir()
    with pytest.raises(IsADirectoryError):
        write_embeddings(Embeddings(np.ones((1, 2), np.float32), ["a"], [""]), tmp_path / "x.npy")
    assert (tmp_path / "x.npy").read_bytes() == b"old"


def test_closed_stdin_is_one_sentence(images, tmp_path):
    process = ["sh", "-c", 'exec "$@" <&-', "sh", *command("predict", "-")]
    run = subprocess.run(process, capture_output=True, text=True, timeout=240)
    assert run.returncode == 2
    assert "stdin must be open to read a list of paths from it (-), got a closed one." in run.stderr
    assert one_sentence(run.stderr)
