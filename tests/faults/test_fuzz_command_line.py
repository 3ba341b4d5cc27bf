"""Commands with mutated runs, models and option files end with a result or one sentence, in bounded time and memory."""

import json
import random
import shutil
import signal
from contextlib import contextmanager

import pytest
from PIL import Image

from command_line import spherenet
from faults.fork_server import build_data
from faults.mutation import TIMEOUT, mutated_bytes, mutated_value
from faults.scale import COMMAND_LINES
from spherenet.training import run as training
from spherenet.training.config import TrainConfig

POINT = 15
CODES = {0, 1, 2}
"""Allowed exit codes; 70 is an internal error."""

FILES = ("config.json", "metrics.jsonl", "summary.json", "checkpoints/{step}/manifest.json",
         "checkpoints/{step}/state.json", "checkpoints/{step}/model.safetensors")  # fmt: skip


class Timeout(BaseException):
    """Not an Exception, so that error handlers do not catch it."""


@contextmanager
def no_hang(arguments):
    def fail(*_):
        raise Timeout(arguments)

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(TIMEOUT)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def image(tmp_path):
    Image.new("L", (12, 12)).save(tmp_path / "image.png")
    return tmp_path / "image.png"


@pytest.fixture
def run(uninterrupted, tmp_path):
    return shutil.copytree(uninterrupted(), tmp_path / "run")


def mutated_file(content, name, chance):
    """Return the content of a file with some bytes or, in JSON files, some values changed."""
    if chance.random() < 0.5:
        return mutated_bytes(content, chance)
    if name.endswith(".json"):
        return json.dumps(mutated_value(json.loads(content), chance)).encode() + b"\n"
    if name.endswith(".jsonl"):
        rows = mutated_value([json.loads(line) for line in content.splitlines()], chance)
        return "".join(json.dumps(row) + "\n" for row in rows).encode()
    return mutated_bytes(content, chance)


def run_command(arguments, capsys):
    """Run a command and return its exit code, which must be allowed. An error is one sentence of bounded length."""
    with no_hang(arguments):
        code = spherenet(*arguments)
    errors = capsys.readouterr().err
    assert code in CODES, (code, arguments, errors)
    assert "Traceback" not in errors
    assert "internal error" not in errors, (arguments, errors)
    assert len(errors) < 20_000
    assert not any(ord(character) < 32 and character != "\n" for character in errors)
    return code


def test_mutated_runs(run, image, tmp_path, capsys, monkeypatch, tried):
    monkeypatch.setattr(training, "build_data", build_data)  # the digits that the run was trained on
    chance = random.Random(0)
    step = sorted((run / "checkpoints").glob("step-*"))[-1].name
    files = [name.format(step=step) for name in FILES]
    contents = {name: (run / name).read_bytes() for name in files}
    target, aside = tmp_path / "exported", shutil.copytree(run, tmp_path / "aside")
    verbs = {
        "doctor": lambda: ["doctor", run],
        "report": lambda: ["report", run],
        "predict": lambda: ["predict", image, "--run", run, "--checkpoint", "last"],
        "export": lambda: ["export", run, target, "--overwrite", "--checkpoint", "last"],
        "resume": lambda: ["train", "--resume", run],
        "doctor --json": lambda: ["doctor", run, "--json"],
    }
    codes = set()
    for _ in range(COMMAND_LINES * 6 // 10):
        verb = chance.choice(list(verbs))
        name = chance.choice(files)
        if verb == "resume":
            (run / "summary.json").unlink()
        if (run / name).exists():
            (run / name).write_bytes(mutated_file(contents[name], name, chance))
        codes.add(run_command(verbs[verb](), capsys))
        (run / name).write_bytes(contents[name])
        if verb == "resume":  # it changes other files
            shutil.rmtree(run)
            shutil.copytree(aside, run)
        tried(f"{verb} of a run with a mutated file")
    assert {0, 2} <= codes


def test_mutated_models(run, image, tmp_path, capsys, tried):
    chance, model = random.Random(1), tmp_path / "model"
    assert spherenet("export", run, model) == 0
    capsys.readouterr()
    contents = {path.name: path.read_bytes() for path in model.iterdir() if path.name != "README.md"}
    codes = set()
    for _ in range(COMMAND_LINES * 2 // 10):
        name = chance.choice(sorted(contents))
        (model / name).write_bytes(mutated_file(contents[name], name, chance))
        codes.add(run_command(["predict", image, "--run", model, *chance.choice([[], ["--json"]])], capsys))
        (model / name).write_bytes(contents[name])
        tried("predict with a mutated model")
    assert 2 in codes


def test_mutated_option_files(tmp_path, capsys, tried):
    """Option files for --config, without training."""
    chance, path = random.Random(2), tmp_path / "my.yaml"
    values = TrainConfig(widths=[4, 4, 4], milestones=[3], iterations=1).as_dict()
    text = "".join(f"{name}: {json.dumps(value)}\n" for name, value in values.items()).encode()
    codes = set()
    for number in range(COMMAND_LINES * 2 // 10):
        mutated = json.dumps(mutated_value(values, chance)).encode() if number % 2 else mutated_bytes(text, chance)
        path.write_bytes(mutated)
        # The output folder cannot be created, so that nothing is trained with valid options.
        codes.add(run_command(["train", "--config", path, "--output", path / "run"], capsys))
        tried("train with mutated options")
    assert codes <= {1, 2}
