"""The first and last lines of `spherenet train`: in a log, in a terminal, in a pipe, after a resumed run."""

import json
import re
import shlex

import pytest

from cli.test_in_a_terminal import in_a_terminal
from command_line import TINY, in_other_processes, spherenet
from spherenet.cli.run_text import aligned, result_text

LABELS = ["data", "images", "network", "device", "kernels", "output"]


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """Return the folder and the completed process of a run whose output is not a terminal."""
    folder = tmp_path_factory.mktemp("logged") / "my run"
    done = in_other_processes("train", *TINY, "--output", folder)
    assert done.returncode == 0, done.stderr
    return folder, done


def header(lines):
    """Return {label: text} of the lines before the first step."""
    rows = [line.partition("  ")[2].partition(": ") for line in lines]
    return {label: text for label, _, text in rows[: len(LABELS)]}


def test_log_starts_with_what_is_trained(logged):
    folder, done = logged
    lines = done.stderr.splitlines()
    rows = header(lines)
    assert list(rows) == LABELS
    config = json.loads((folder / "config.json").read_text())
    assert rows["data"] == "mnist5k, 10 classes"
    assert rows["images"] == "4,000 train, 1,000 test, 1×28×28"
    assert re.fullmatch(r"cnn-3, cosine operator, loss softmax, [1-9][\d,]* parameters", rows["network"])
    summary = json.loads((folder / "summary.json").read_text())
    assert f"{summary['parameters']:,} parameters" in rows["network"]
    assert rows["device"] == f"cpu ({config['hardware']['processor']}, 1 thread), float32"
    assert rows["kernels"] == config["implementation"]
    assert rows["output"] == str(folder)
    assert lines[len(LABELS)].endswith("training from step 0 to 6")


def test_pipe_ends_with_numbers_and_commands_that_work(logged):
    folder, done = logged
    first, *rows = done.stdout.splitlines()
    assert first == f"done: 6 iterations, in {folder}"
    assert [row[2:17].strip() for row in rows] == ["test accuracy", "best", "time", "next", "", ""]
    summary = json.loads((folder / "summary.json").read_text())
    assert f"{summary['accuracy']:.2%}" in rows[0]
    assert f"{summary['best_accuracy']:.2%} at step {summary['best_step']}" in rows[1]
    program, *words = shlex.split(rows[3].partition("next")[2])
    assert program == "spherenet"
    assert spherenet(*words) == 0
    assert [shlex.split(row)[:2] for row in rows[4:]] == [["spherenet", "predict"], ["spherenet", "export"]]
    assert all(str(folder) in shlex.split(row) for row in rows[4:])


def test_terminal_shows_the_header_above_one_bar(tmp_path):
    code, shown = in_a_terminal("train", *TINY, "--output", tmp_path / "run")
    assert code == 0
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown).replace("\r", "\n")
    lines = [line for line in plain.splitlines() if line.strip()]
    assert [line.split()[0] for line in lines[: len(LABELS)]] == LABELS
    assert lines[-1].strip() == f"spherenet export {tmp_path / 'run'} MODEL"


def test_resumed_run_describes_the_present_machine(tmp_path, capsys):
    """The record of an earlier version may lack keys."""
    options = [*TINY, "--iterations", 4, "--output", tmp_path / "run"]
    assert spherenet("train", *options) == 0
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    del config["hardware"], config["implementation"]
    path.write_text(json.dumps(config))
    capsys.readouterr()
    assert spherenet("train", "--resume", tmp_path / "run", "--iterations", 6, "--allow-changes") == 0
    assert "data: mnist5k, 10 classes" in capsys.readouterr().err


def test_unknown_numbers_of_a_damaged_summary_are_named():
    text = result_text({}, "run", "already finished")
    assert text.startswith("already finished: None iterations, in run\n")
    assert "test accuracy  unknown" in text


def test_rows_are_aligned():
    assert aligned([("a", "1"), ("long", "2"), ("", "3")]) == ["  a     1", "  long  2", "        3"]
