"""Outputs of the command line: closed pipes and streams, files that are complete or unchanged, inputs kept."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys

import pytest
from safetensors.torch import load_file, save_file

from command_line import TINY, command, one_sentence, spherenet
from faults.folders import sign
from made_runs import make_run
from spherenet.export import load_model
from spherenet.runs import RunDirectory


def test_closed_pipe_does_not_stop_training(tmp_path):
    """Simulates `train … 2>&1 | head -1`."""
    run = tmp_path / "run"
    process = subprocess.Popen(
        command("train", *TINY, "--log-every", 1, "--output", run),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout.readline()
    process.stdout.close()
    assert process.wait(240) == 0
    assert RunDirectory(run).finished


def test_closed_pipe_of_another_verb_prints_no_error(run):
    script = 'set -o pipefail; "$@" 2>&1 | head -c 1 > /dev/null'
    done = subprocess.run(["bash", "-c", script, "sh", *command("doctor", run)], capture_output=True, text=True)
    assert done.returncode in (0, 141)
    assert done.stderr == ""


def test_json_contains_no_nan(run, capsys):
    for checkpoint in RunDirectory(run).checkpoints.paths():
        tensors = load_file(checkpoint / "model.safetensors")
        save_file({**tensors, "head.weight": tensors["head.weight"] * float("nan")}, checkpoint / "model.safetensors")
        sign(checkpoint)
    assert spherenet("evaluate", run, "--json") == 0

    def reject(name):
        raise AssertionError(name)

    assert json.loads(capsys.readouterr().out, parse_constant=reject)["loss"] is None


def test_json_of_names_that_cannot_be_encoded_is_escaped(run, capsys, tmp_path):
    from PIL import Image

    Image.new("L", (28, 28)).save(tmp_path / "0.png")
    config = json.loads((run / "config.json").read_text())
    config["classes"] = [f"\ud800é{name}" for name in config["classes"]]
    (run / "config.json").write_text(json.dumps(config))
    for arguments in (["predict", tmp_path / "0.png", "--run", run], ["evaluate", run, "--allow-changes"]):
        spherenet(*arguments, "--json")
        said = capsys.readouterr()
        assert "internal error" not in said.err
        assert "Traceback" not in said.err
    assert spherenet("predict", tmp_path / "0.png", "--run", run, "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["classes"][0]["class"].startswith("\ud800é")


@pytest.mark.parametrize(("option", "name"), [("--markdown", "target.md"), ("--csv", "target.csv")])
def test_report_files_are_complete_or_unchanged(tmp_path, monkeypatch, option, name):
    folder = make_run(tmp_path / "run", [0.5])
    target = tmp_path / name
    target.write_text("old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert spherenet("report", folder, option, target) == 2
    assert target.read_text() == "old"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(["run", name])


@pytest.mark.parametrize("through_link", [False, True])
def test_output_that_is_a_pipe_is_not_replaced(tmp_path, capsys, through_link):
    """The same holds for devices: a file in place of /dev/null would break other programs."""
    folder = make_run(tmp_path / "run", [0.5])
    os.mkfifo(tmp_path / "pipe.csv")
    target = tmp_path / "pipe.csv"
    if through_link:
        target = tmp_path / "link.csv"
        target.symlink_to("pipe.csv")
    assert spherenet("report", folder, "--csv", target) == 2
    assert one_sentence(message := capsys.readouterr().err), message
    assert "must be a regular file, got a pipe" in message
    assert stat.S_ISFIFO(target.stat().st_mode)
    assert target.is_symlink() == through_link


def test_confusion_image_is_complete_or_unchanged(run, tmp_path, monkeypatch):
    target = tmp_path / "confusion.png"
    target.write_text("old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert spherenet("evaluate", run, "--image", target) == 2
    assert target.read_text() == "old"


KILLED = """
import os, signal, sys
from pathlib import Path
from spherenet._util import atomic
from spherenet.cli import main
rename = os.replace
def dying(source, target):
    rename(source, target)
    os.kill(os.getpid(), signal.SIGKILL)
os.replace = dying
sync = atomic.sync
def dying_sync(path):
    if Path(path) == Path(sys.argv[1]).parent:
        os.kill(os.getpid(), signal.SIGKILL)
    sync(path)
atomic.sync = dying_sync
main(["export", sys.argv[2], sys.argv[1], "--overwrite"])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux exchanges two folders atomically")
def test_killed_export_leaves_the_old_or_the_new_model(run, tmp_path):
    target = tmp_path / "model"
    assert spherenet("export", run, target) == 0
    killed = subprocess.run([sys.executable, "-c", KILLED, str(target), str(run)], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    load_model(target)


@pytest.mark.parametrize(("verb", "closed"), [("evaluate", ">&-"), ("doctor", ">&- 2>&-")])
def test_streams_that_are_closed_from_the_start(run, verb, closed):
    words = ["sh", "-c", f'exec "$@" {closed}', "sh", *command(verb, run)]
    ended = subprocess.run(words, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr


def test_training_without_stderr(tmp_path):
    words = ["sh", "-c", 'exec "$@" 2>&-', "sh", *command("train", *TINY, "--output", tmp_path / "run")]
    ended = subprocess.run(words, capture_output=True, text=True)
    assert ended.returncode == 0
    assert ended.stdout.startswith("done: ")


@pytest.mark.parametrize("arguments", [["evaluate", "RUN"], ["data"]], ids=lambda words: words[0])
def test_pipe_that_is_closed_after_one_line_gives_141(run, arguments):
    words = [str(run) if word == "RUN" else word for word in arguments]
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(command(*words), stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_tables_in_a_pipe_are_complete(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    other = shutil.copytree(trained, tmp_path / ("a-long-name-of-a-run-" * 4))
    assert spherenet("report", trained, other) == 0
    assert other.name in capsys.readouterr().out


@pytest.mark.parametrize("columns", [10, 40, 60, 80, 100])
def test_tables_in_narrow_terminals_do_not_cut_words_or_numbers(columns, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    long_name = make_run(tmp_path / ("long-" * 30), [0.1, 0.1234])
    for arguments, words in {
        ("data",): ["handwritten", "10,000", "class/name.jpg"],
        ("report", long_name, make_run(tmp_path / "b", [0.2, 0.5678])): ["12.34%", "56.78%"],
    }.items():
        assert spherenet(*arguments) == 0
        output = capsys.readouterr().out
        assert "…" not in output
        assert all(word in output for word in words)
        lines = [len(line) for line in output.splitlines() if line.startswith(("┃", "│", "└"))]
        assert len(set(lines)) == 1
        assert lines[0] <= max(columns, 130)


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["predict", "a.png", "--csv", "b.png"], "--csv must end in .csv, got"),
        (["report", "RUN", "--csv", "RUN/config.json"], "--csv must end in .csv, got"),
        (["report", "RUN", "--markdown", "page.csv", "--csv", "page.csv"], "--markdown must end in .md, got"),
    ],
    ids=["predict", "report", "two outputs"],
)
def test_outputs_with_the_name_of_another_kind_of_file_are_refused(run, capsys, arguments, option):
    before = (run / "config.json").read_bytes()
    assert spherenet(*(word.replace("RUN", str(run)) for word in arguments)) == 2
    assert option in capsys.readouterr().err
    assert (run / "config.json").read_bytes() == before


def test_pairs_are_not_replaced_by_their_roc(run, tmp_path, capsys):
    pairs = tmp_path / "pairs.csv"
    pairs.write_text("first,second,same\na.png,b.png,1\n")
    (tmp_path / "x.csv").write_text("file,label,x0\na.png,,1\n")
    assert spherenet("verify", tmp_path / "x.csv", pairs, "--roc", tmp_path / "x.csv") == 2
    assert "--roc must not be a file that is read" in capsys.readouterr().err
    assert spherenet("verify", run, pairs, "--roc", pairs) == 2
    assert "--roc must not be a file that is read" in capsys.readouterr().err
    assert pairs.read_text().startswith("first,second,same")
