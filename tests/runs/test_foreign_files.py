"""Links, pipes, devices and huge files instead of the files of a run are rejected and never followed."""

import os
import shutil
import signal
from contextlib import contextmanager

import pytest
import torch

from command_line import TINY, one_sentence, spherenet
from spherenet.errors import CheckpointError, RunError, SphereNetError
from spherenet.report.runs import read_run
from spherenet.runs import Checkpoint, RunDirectory
from spherenet.runs.directory import examine
from spherenet.training.saved_runs import load_run

SECONDS = 20
"""Time after which a reader counts as hanging."""


class Timeout(BaseException):
    """Not an Exception, so that error handlers do not catch it."""


@contextmanager
def no_hang():
    def fail(*_):
        raise Timeout

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def pipe(path):
    os.mkfifo(path)


def device(path):
    path.symlink_to("/dev/zero")


def huge(path):
    """Create a sparse file, which takes no disk space but all memory of an unbounded reader."""
    with open(path, "wb") as file:
        file.truncate(1 << 42)


def link(path):
    """Create a link to a valid file."""
    aside = path.with_name("elsewhere")
    shutil.copy(path.parent / "config.json.good" if path.name == "config.json" else __file__, aside)
    path.symlink_to(aside)


KINDS = {"a pipe": pipe, "a device": device, "a huge file": huge, "a link": link}
FILES = ("config.json", "metrics.jsonl", "summary.json", "checkpoints/step-00000006/manifest.json",
         "checkpoints/step-00000006/state.json", "checkpoints/step-00000006/model.safetensors")  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    run = tmp_path_factory.mktemp("trained") / "run"
    assert spherenet("train", *TINY, "--output", run) == 0
    return run


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def replaced(run, file, kind):
    path = run / file
    shutil.copy(run / "config.json", run / "config.json.good")
    path.unlink()
    KINDS[kind](path)
    (run / "config.json.good").unlink(missing_ok=True)


VERBS = {
    "doctor": lambda run: ["doctor", run],
    "evaluate": lambda run: ["evaluate", run, "--checkpoint", "last"],
    "export": lambda run: ["export", run, run.parent / "exported", "--checkpoint", "last"],
    "report": lambda run: ["report", run],
    "resume": lambda run: ["train", "--resume", run],
}
NEEDED = {"report": FILES[:3], "evaluate": (FILES[0], *FILES[3:]), "export": (FILES[0], *FILES[3:])}
"""Files that a command reads. The others may have any content as long as the command does not hang."""


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_command_ends_with_one_sentence(run, capsys, kind, verb):
    for file in FILES:
        copy = shutil.copytree(run, run.with_name("copy"))
        if verb == "resume":
            (copy / "summary.json").unlink()
        if not (verb == "resume" and file == "summary.json"):
            replaced(copy, file, kind)
        with no_hang():
            code = spherenet(*VERBS[verb](copy))
        errors = capsys.readouterr().err
        if file.startswith("checkpoints/") and code == 0 and verb != "report":  # the checkpoint before it is used
            assert "step-00000006" in errors
        elif file in NEEDED.get(verb, FILES) and file != "summary.json":
            assert code != 0 or verb == "resume", (file, errors)
        if code != 0 and verb != "doctor":
            assert one_sentence(errors), (file, errors)
        assert "Traceback" not in errors
        shutil.rmtree(copy)
        shutil.rmtree(run.parent / "exported", ignore_errors=True)


def test_doctor_names_what_is_not_a_regular_file(run, capsys):
    replaced(run, "metrics.jsonl", "a pipe")
    with no_hang():
        assert spherenet("doctor", run) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("BAD")]
    assert "metrics.jsonl" in line
    assert "regular file" in line


def test_metrics_are_not_written_through_a_link_or_into_a_pipe(run):
    outside = run.parent / "outside"
    outside.write_text("precious\n")
    metrics = RunDirectory(run).metrics
    metrics.path.unlink()
    metrics.path.symlink_to(outside)
    with pytest.raises(RunError, match="could not be written"):
        metrics.append({"step": 1, "split": "train"})
    assert outside.read_text() == "precious\n"
    metrics.path.unlink()
    os.mkfifo(metrics.path)
    with no_hang(), pytest.raises(RunError, match="could not be written"):
        metrics.append({"step": 1, "split": "train"})


def test_resume_does_not_remove_checkpoints_through_a_link(run, capsys):
    """If `checkpoints` is a link to another run, resuming would remove the newer checkpoints of that run."""
    other = shutil.copytree(run, run.with_name("other"))
    for checkpoint in RunDirectory(other).checkpoints.paths():
        checkpoint.rename(checkpoint.with_name(checkpoint.name.replace("0000", "0009", 1)))
    before = sorted(path.name for path in (other / "checkpoints").iterdir())
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").symlink_to(other / "checkpoints")
    (run / "summary.json").unlink()
    assert spherenet("train", "--resume", run) == 2
    assert one_sentence(message := capsys.readouterr().err), message
    assert "checkpoints must be a folder, got a link" in message
    assert sorted(path.name for path in (other / "checkpoints").iterdir()) == before


def test_linked_checkpoint_is_not_loaded(run):
    other = shutil.copytree(run, run.with_name("other"))
    newest = RunDirectory(run).checkpoints.paths()[-1]
    shutil.rmtree(newest)
    newest.symlink_to(other / "checkpoints" / newest.name)
    with pytest.raises(SphereNetError, match="got a link"):
        load_run(run, "last")
    findings = examine(run)
    assert any("got a link" in finding.message for finding in findings if not finding.valid)


@pytest.mark.parametrize("name", ["notes", "tensorboard", ".lock", "checkpoints/step-00000006/extra"])
def test_links_anywhere_in_a_run_are_rejected(run, name):
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(run.parent)
    with pytest.raises(RunError, match="must be a regular file or a folder, got a link"):
        RunDirectory.open(run)
    with pytest.raises(RunError):
        read_run(run)


def test_checkpoint_is_not_saved_into_a_linked_folder(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    run.write_config({})
    (tmp_path / "elsewhere").mkdir()
    run.checkpoints.folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="got a link"):
        run.checkpoints.save(Checkpoint(1, {"model": {"w": torch.zeros(2)}}, {}))
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("kind", ["a pipe", "a device", "a huge file"])
def test_option_files_and_saved_models_must_be_regular_files(tmp_path, capsys, kind):
    KINDS[kind](tmp_path / "my.yaml")
    with no_hang():
        assert spherenet("train", "--config", tmp_path / "my.yaml", "--output", tmp_path / "run") == 2
    assert one_sentence(message := capsys.readouterr().err), message
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").touch()
    KINDS[kind](model / "config.json")
    with no_hang():
        assert spherenet("predict", __file__, "--run", model) == 2
    assert one_sentence(message := capsys.readouterr().err), message
