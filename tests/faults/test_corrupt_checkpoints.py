"""Checkpoints that are truncated or have a flipped bit are named and skipped, and the previous one is used."""

import random
import shutil

import pytest

from faults.folders import assert_same_run
from faults.scale import BIT_FLIPS, CORRUPTIONS
from spherenet.runs import RunDirectory

POINT = 2
FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")
CUTS = {
    "cut to 0 bytes": lambda data: b"",
    "cut to 10 bytes": lambda data: data[:10],
    "cut to a half": lambda data: data[: len(data) // 2],
    "cut by one byte": lambda data: data[:-1],
    "missing": lambda data: None,
    "of zeros": lambda data: bytes(len(data)),
}
ALL = [(file, kind) for kind in CUTS for file in FILES]


@pytest.fixture
def resumes_from_step_6(children, interrupted, uninterrupted, folder):
    """Corrupt the newest checkpoint of a copy, resume it, and compare it with an uninterrupted run."""

    def check(number, file, change):
        run = interrupted(10, folder / str(number))  # its checkpoints are those of steps 6 and 9
        corrupt = RunDirectory(run).checkpoints.paths()[-1] / file
        data = change(corrupt.read_bytes())
        corrupt.unlink() if data is None else corrupt.write_bytes(data)
        done = children.run("train", "--resume", run)
        assert done.code == 0, done.output
        assert "step-00000009/" in done.output  # the corrupt file, or one that the corrupt manifest does not fit
        assert "training from step 6 to 14" in done.output
        assert_same_run(run, uninterrupted())
        shutil.rmtree(run)

    return check


def test_truncated_file_is_skipped(resumes_from_step_6, tried):
    for number, (file, kind) in enumerate(ALL[:: max(1, len(ALL) // CORRUPTIONS)]):
        resumes_from_step_6(number, file, CUTS[kind])
        tried(f"a file of the newest checkpoint {kind}")


def test_flipped_bit_is_detected(resumes_from_step_6, tried):
    chance = random.Random(0)

    def flipped(data):
        at = chance.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]

    for number in range(BIT_FLIPS):
        resumes_from_step_6(number, FILES[number % 4], flipped)
        tried("one bit flipped in a file of the newest checkpoint")


def test_resume_without_valid_checkpoint_changes_nothing(children, interrupted, folder, tried):
    """The run neither starts from the beginning nor changes a file."""
    run = interrupted(10, folder / "run")
    for checkpoint in RunDirectory(run).checkpoints.paths():
        (checkpoint / "model.safetensors").write_bytes(b"")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    done = children.run("train", "--resume", run)
    assert done.code == 2
    assert "has no valid checkpoint" in done.output
    assert "Traceback" not in done.output
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    tried("every checkpoint corrupt")


def test_doctor_names_the_corrupt_file(children, interrupted, folder, tried):
    run = interrupted(10, folder / "run")
    assert children.run("doctor", run).code == 0
    file = RunDirectory(run).checkpoints.paths()[0] / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    done = children.run("doctor", run)
    assert done.code == 1
    (line,) = [line for line in done.output.splitlines() if line.startswith("BAD")]
    assert "step-00000006" in line
    assert "optimizer.safetensors is corrupt" in line
    tried("spherenet doctor on a corrupt run")


@pytest.mark.parametrize("verb", ["evaluate", "predict", "export"])
def test_corrupt_model_is_not_used(children, interrupted, folder, tried, verb):
    run = interrupted(10, folder / "run")
    for name in ("step", "best"):
        for checkpoint in RunDirectory(run).checkpoints.paths(name):
            file = checkpoint / "model.safetensors"
            file.write_bytes(file.read_bytes()[:-100])
    target = folder / "target"
    extra = {"evaluate": [run], "predict": ["image.png", "--run", run], "export": [run, target]}[verb]
    done = children.run(verb, *extra)
    assert done.code == 2, done.output
    assert "model.safetensors is corrupt" in done.output
    assert not target.exists()
    tried("a corrupt model evaluated, used for prediction or exported")
