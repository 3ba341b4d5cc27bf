"""Accidents and hostile files on the command line: one sentence, the right exit code, no partial files."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from command_line import TINY, one_sentence, spherenet
from faults.folders import sign
from made_runs import make_run
from spherenet._util.text import plain
from spherenet.cli.output import Reporters
from spherenet.errors import RunError
from spherenet.export import load_model
from spherenet.report.page import section_of_runs, write_page
from spherenet.report.runs import read_run
from spherenet.runs import RunDirectory
from spherenet.training import Reporter

ESCAPE = "\x1b]0;owned\x07\x1b[2J"


@pytest.mark.parametrize(
    "options",
    [
        ("--device", "meta"),
        ("--set", "lambda_floor=1e300", "--loss", "ga-linear"),
        ("--widths", 2**30, 2**30, 2**30),
        ("--batch-size", 2**62),
        ("--threads", 10**9),
    ],
    ids=str,
)
def test_impossible_options_are_rejected(tmp_path, capsys, options):
    code = spherenet("train", *TINY, *options, "--output", tmp_path / "run")
    said = capsys.readouterr().err
    assert code in (1, 2), said
    assert one_sentence(said), said
    assert "internal error" not in said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "cifar10"}, "cifar10 was not found in"),
        ({"image_size": 4096}, "image_size must keep mnist5k below"),
        ({"workers": 10**6}, "workers must be at most 256"),
        ({"threads": 10**6}, "threads must be at most"),
        ({"widths": [10**9] * 3}, "widths must be at most"),
        ({"workers": "many"}, "workers must be int"),
    ],
    ids=str,
)
def test_foreign_run_downloads_nothing_and_stays_within_limits(run, tmp_path, capsys, changes, message):
    """Evaluating a run from somebody else downloads nothing, creates no folder and respects the limits."""
    config = json.loads((run / "config.json").read_text())
    config["train"].update({**changes, "data_dir": str(tmp_path / "created"), "download": True})
    (run / "config.json").write_text(json.dumps(config))
    assert spherenet("evaluate", run) == 2
    said = capsys.readouterr().err
    assert one_sentence(said), said
    assert message in said
    assert not (tmp_path / "created").exists()


def test_title_is_not_markup(run, capsys):
    assert spherenet("report", run, "--title", "[/x] [bold]") == 0
    assert "[/x] [bold]" in capsys.readouterr().out


@pytest.mark.parametrize("summary", ["{}", '{"accuracy": "x", "seconds": null, "iterations": []}', ""])
def test_invalid_summary_is_handled(run, capsys, summary):
    (run / "summary.json").write_text(summary)
    code = spherenet("train", "--resume", run)
    said = capsys.readouterr().err
    assert code == (2 if summary == "" else 0), said
    assert "Traceback" not in said
    assert "internal error" not in said
    assert spherenet("report", run) == (2 if summary == "" else 0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool])
@pytest.mark.parametrize("verb", ["evaluate", "resume"])
def test_weights_must_be_floating_point(run, capsys, dtype, verb):
    (run / "summary.json").unlink()
    for each in ("step", "best"):
        for checkpoint in RunDirectory(run).checkpoints.paths(each):
            tensors = load_file(checkpoint / "model.safetensors")
            save_file({**tensors, "head.weight": tensors["head.weight"].to(dtype)}, checkpoint / "model.safetensors")
            sign(checkpoint)
    assert spherenet(*(["evaluate", run] if verb == "evaluate" else ["train", "--resume", run])) == 2
    said = capsys.readouterr().err
    assert one_sentence(said), said
    assert "head.weight" in said


def test_invalid_run_does_not_stop_a_report(tmp_path, run, capsys):
    """Rows have no accuracy, values of a wrong type, or a number too large for a float."""
    for name, row in {
        "none": {},
        "odd": {"accuracy": "high", "seconds": {}},
        "huge": {"accuracy": 10**400},
    }.items():
        path = make_run(tmp_path / name, [])
        RunDirectory(path).metrics.path.write_text(json.dumps({"step": 1, "split": "test", **row}) + "\n")
    page = tmp_path / "page.html"
    code = spherenet("report", tmp_path / "none", tmp_path / "odd", tmp_path / "huge", run, "-o", page)
    said = capsys.readouterr()
    assert code == 1
    assert said.err.count("has no evaluation yet") == 3
    assert "Traceback" not in said.err
    assert page.is_file()


def test_bug_is_reported_as_internal_error(run, capsys, monkeypatch):
    """A TypeError that Python raises inside the package is not wrong input."""
    import spherenet.cli.report as verb

    def broken(arguments):
        return len(arguments.runs) + "x"

    monkeypatch.setattr(verb, "run_report", broken)
    assert spherenet("report", run) == 70
    said = capsys.readouterr().err
    assert one_sentence(said)
    assert "internal error (TypeError: unsupported operand" in said
    assert "--debug" in said
    with pytest.raises(TypeError):
        spherenet("report", run, "--debug")


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("can't allocate memory: 8 B")]
)
def test_out_of_memory_is_one_sentence(run, capsys, monkeypatch, error):
    import spherenet.cli.report as verb

    def out_of_memory(arguments):
        raise error

    monkeypatch.setattr(verb, "run_report", out_of_memory)
    assert spherenet("report", run) == 1
    assert "not enough memory" in capsys.readouterr().err


def test_failing_reporter_is_removed():
    class Broken(Reporter):
        def stepped(self, step, loss, accuracy):
            raise BrokenPipeError

    class Counting(Reporter):
        steps = 0

        def stepped(self, step, loss, accuracy):
            self.steps += 1

    counting = Counting()
    reporters = Reporters([Broken(), counting])
    for step in range(3):
        reporters.stepped(step, 0.0, 0.0)
    assert counting.steps == 3


PARALLEL = """
import os, sys
import spherenet.training.run
from spherenet.cli import main
children = []
for _ in range(3):
    children.append(os.fork())
    if children[-1] == 0:
        os._exit(main(sys.argv[1:]))
sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
"""


def test_parallel_runs_without_output_get_different_folders(tmp_path):
    """Forks start at the same moment."""
    done = subprocess.run(
        [sys.executable, "-c", PARALLEL, "train", *map(str, TINY), "--iterations", "2", "--eval-every", "2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert len([run for run in (tmp_path / "runs").iterdir() if RunDirectory.open(run).finished]) == 3


def hostile_classes(run):
    config = json.loads((run / "config.json").read_text())
    config["classes"] = [f"{ESCAPE}[bold]{name}" for name in config["classes"]]
    (run / "config.json").write_text(json.dumps(config))


def test_terminal_escapes_and_markup_are_printed_as_text(run, capsys, tmp_path):
    hostile_classes(run)
    shutil.copy(run.parent / "run" / "config.json", tmp_path / "kept.json")
    image = tmp_path / "0.png"
    from PIL import Image

    Image.new("L", (28, 28)).save(image)
    for arguments in (["predict", image, "--run", run], ["evaluate", run], ["doctor", run]):
        spherenet(*arguments)
        said = capsys.readouterr()
        assert "\x1b]" not in said.out + said.err
        assert "\x1b[2J" not in said.out + said.err
    named = run.rename(tmp_path / f"a{ESCAPE}[red]b")
    assert spherenet("report", named) == 0
    said = capsys.readouterr().out
    assert "\x1b]" not in said
    assert "[red]b" in said
    assert plain(f"a{ESCAPE}\u202eb\n") == r"a\x1b]0;owned\x07\x1b[2J\u202eb\n"


def test_page_escapes_names(tmp_path):
    hostile = make_run(tmp_path / "<a href='http:x'>y<", [0.5])
    write_page([section_of_runs([read_run(hostile)])], tmp_path / "page.html", "title")
    text = (tmp_path / "page.html").read_text()
    assert '"name": "\\u003ca href' in text
    assert "<a href='http:x'" not in text


@pytest.mark.parametrize(
    "arguments",
    [
        ("data", "--workers", 2**40),
        ("bench", "--threads", 2**40),
    ],
    ids=lambda arguments: " ".join(map(str, arguments)),
)
def test_values_that_would_exhaust_the_machine_are_rejected(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert spherenet(*arguments) == 2
    assert one_sentence(message := capsys.readouterr().err), message
    assert " at most " in message or "from" in message


@pytest.mark.parametrize(
    "arguments",
    [
        ("data", "folder", "--data-dir", "~no-such-user/x"),
        ("data", "cifar10", "--data-dir", "~no-such-user/x"),
        ("predict", "x.png", "--run", "~no-such-user/x"),
    ],
)
def test_folder_of_an_unknown_user_is_reported_as_missing(arguments, capsys):
    assert spherenet(*arguments) == 2
    assert one_sentence(message := capsys.readouterr().err), message
    assert "~no-such-user" in message


def test_export_to_the_folder_of_an_unknown_user_is_written_to_that_name(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert spherenet("export", run, "~no-such-user/x") == 0
    load_model("~no-such-user/x")


def test_preprocessing_that_does_not_fit_the_network_is_one_sentence(run, tmp_path, capsys):
    from PIL import Image

    Image.new("L", (28, 28)).save(tmp_path / "0.png")
    assert spherenet("export", run, tmp_path / "model") == 0
    for folder, keys in ((run, ("preprocessing",)), (tmp_path / "model", ("metadata", "preprocessing"))):
        config = json.loads((folder / "config.json").read_text())
        preprocessing = config
        for key in keys:
            preprocessing = preprocessing[key]
        preprocessing["size"] = [1, 12]
        (folder / "config.json").write_text(json.dumps(config))
        capsys.readouterr()
        assert spherenet("predict", tmp_path / "0.png", "--run", folder) == 2
        assert one_sentence(message := capsys.readouterr().err), message
        assert "images of 1 × 12 with 1 channels" in message


def listing(run):
    return {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in [run, *run.rglob("*")]}


def test_doctor_changes_nothing(run):
    (run / ".lock").unlink(missing_ok=True)
    before = listing(run)
    assert spherenet("doctor", run) == 0
    assert not RunDirectory(run).in_use
    assert listing(run) == before


def test_owner_detects_that_its_lock_was_removed(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    run.write_config({})
    with run.locked():
        run.append({"step": 1, "split": "train"})
        (run.path / ".lock").unlink()
        with RunDirectory(run.path).locked(), pytest.raises(RunError, match=r"\.lock was removed"):
            run.append({"step": 2, "split": "train"})
    assert len(run.metrics.read()) == 1


def test_reader_of_a_live_run_reads_the_newer_checkpoint(run, monkeypatch):
    """The only checkpoint is replaced by a newer one while it is read."""
    from spherenet.runs import checkpoints as module

    checkpoints = RunDirectory(run).checkpoints
    for old in checkpoints.paths()[:-1]:
        shutil.rmtree(old)
    load, (first,) = module.load_checkpoint, checkpoints.paths()

    def racing(path):
        if path == first and path.exists():
            shutil.move(path, path.with_name("step-00000009"))
        return load(path)

    monkeypatch.setattr(module, "load_checkpoint", racing)
    newest, complaints = checkpoints.newest()
    assert newest is not None
    assert complaints == []


def test_checkpoint_may_disappear_while_a_run_is_opened(run, monkeypatch):
    from spherenet.runs import directory as module

    file_kind, (*_, newest) = module.file_kind, RunDirectory(run).checkpoints.paths()

    def racing(path):
        result = file_kind(path)
        if path == newest:
            shutil.rmtree(newest, ignore_errors=True)
        return result

    monkeypatch.setattr(module, "file_kind", racing)
    RunDirectory.open(run)
    assert not newest.exists()


def test_report_of_missing_or_invalid_folder_fails_cleanly(tmp_path, capsys):
    assert spherenet("report", tmp_path / "nowhere") == 2
    assert spherenet("report", tmp_path) == 2
    assert "Traceback" not in capsys.readouterr().err
