"""Checkpoints cut short or with a bit flipped: refused by name, the previous one is used, the run ends as it should."""

import random
import shutil

import pytest

from faults.folders import assert_same_run
from faults.scale import BIT_FLIPS, DAMAGES
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
def goes_on_from_6(children, interrupted, whole, folder):
    """Damage the newest checkpoint of a copy, go on, and compare with a run that nothing happened to."""

    def check(number, file, change):
        run = interrupted(10, folder / str(number))  # its checkpoints are those of steps 6 and 9
        damaged = RunDirectory(run).checkpoints.paths()[-1] / file
        data = change(damaged.read_bytes())
        damaged.unlink() if data is None else damaged.write_bytes(data)
        done = children.run("train", "--resume", run)
        assert done.code == 0, done.said
        assert "step-00000009/" in done.said  # and a file of it: the one, or one that its manifest no longer fits
        assert "training from step 6 to 14" in done.said
        assert_same_run(run, whole())
        shutil.rmtree(run)

    return check


def test_a_cut_file(goes_on_from_6, tried):
    for number, (file, kind) in enumerate(ALL[:: max(1, len(ALL) // DAMAGES)]):
        goes_on_from_6(number, file, CUTS[kind])
        tried(f"a file of the newest checkpoint {kind}")


def test_a_flipped_bit(goes_on_from_6, tried):
    chance = random.Random(0)

    def flipped(data):
        at = chance.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]

    for number in range(BIT_FLIPS):
        goes_on_from_6(number, FILES[number % 4], flipped)
        tried("one bit flipped in a file of the newest checkpoint")


def test_none_is_whole(children, interrupted, folder, tried):
    """Nothing to go on from is said, not papered over: the run neither begins again nor changes a file."""
    run = interrupted(10, folder / "run")
    for checkpoint in RunDirectory(run).checkpoints.paths():
        (checkpoint / "model.safetensors").write_bytes(b"")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    done = children.run("train", "--resume", run)
    assert done.code == 2
    assert "has no valid checkpoint" in done.said
    assert "Traceback" not in done.said
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    tried("every checkpoint damaged")


def test_the_doctor_names_the_damage(children, interrupted, folder, tried):
    run = interrupted(10, folder / "run")
    assert children.run("doctor", run).code == 0
    file = RunDirectory(run).checkpoints.paths()[0] / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    found = children.run("doctor", run)
    assert found.code == 1
    (line,) = [line for line in found.said.splitlines() if line.startswith("BAD")]
    assert "step-00000006" in line
    assert "optimizer.safetensors is damaged" in line
    tried("spherenet doctor on a damaged run")


@pytest.mark.parametrize("verb", ["evaluate", "predict", "export"])
def test_a_damaged_model_is_not_used(children, interrupted, folder, tried, verb):
    run = interrupted(10, folder / "run")
    for kind in ("step", "best"):
        for checkpoint in RunDirectory(run).checkpoints.paths(kind):
            file = checkpoint / "model.safetensors"
            file.write_bytes(file.read_bytes()[:-100])
    target = folder / "target"
    extra = {"evaluate": [run], "predict": ["picture.png", "--run", run], "export": [run, target]}[verb]
    done = children.run(verb, *extra)
    assert done.code == 2, done.said
    assert "model.safetensors is damaged" in done.said
    assert not target.exists()
    tried("a damaged model evaluated, used or exported")
