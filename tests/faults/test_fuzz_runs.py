"""Readers of mutated files of a run raise an error of one sentence or return the exact content."""

import json
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from command_line import one_sentence
from faults.folders import sign
from faults.mutation import call_reader, mutated_bytes, mutated_value
from faults.scale import FUZZ_INPUTS
from spherenet.cli.options import config_from
from spherenet.cli.train import train_parser
from spherenet.errors import CheckpointError, RunError, SphereNetError
from spherenet.runs import MetricsFile, RunDirectory
from spherenet.runs.checkpoints import load_checkpoint
from spherenet.runs.directory import examine
from spherenet.training import StopSignals
from spherenet.training.build import build_augmentation
from spherenet.training.config import TrainConfig
from spherenet.training.run_format import config_of
from spherenet.training.saved_runs import load_run
from training_problem import trainer

POINT = 11
WRONG = (ValueError, TypeError, RunError)
"""Errors for which the command line prints one sentence and returns the exit code 2."""


def parsed(path, capsys):
    """Return the configuration of a YAML file, as in `spherenet train --config`."""
    try:
        arguments = train_parser().parse_args(["--config", str(path)])
    except SystemExit as error:
        if error.code != 2:
            raise
        message = capsys.readouterr().err
        assert one_sentence(message), message
        raise ValueError(message.strip()) from None
    config = config_from(arguments, TrainConfig)
    build_augmentation(config)
    return config


def test_mutated_yaml_configuration(tmp_path, tried, capsys):
    path, chance = tmp_path / "my.yaml", random.Random(0)
    original = TrainConfig(widths=[4, 4, 4], milestones=[3, 5], operator="sigmoid:k=0.3")
    text = "".join(f"{name}: {json.dumps(value)}\n" for name, value in original.as_dict().items()).encode()
    path.write_bytes(text)
    assert parsed(path, capsys) == original
    rejected = 0
    for number in range(FUZZ_INPUTS):
        if number % 2:
            path.write_bytes(mutated_bytes(text, chance))
        else:
            path.write_text(json.dumps(mutated_value(original.as_dict(), chance)))
        _, message = call_reader(lambda file: parsed(file, capsys), path, WRONG)
        rejected += message is not None
        tried("a fuzzed configuration in YAML")
    assert rejected > FUZZ_INPUTS // 3


BOMB = "\n".join(
    ["a: &a [x, x, x, x, x, x, x, x, x]"]
    + [f"{key}: &{key} [{', '.join([f'*{before}'] * 9)}]" for key, before in zip("bcdefghi", "abcdefgh", strict=True)]
)
HOSTILE_YAML = {
    "nested lists": "[" * 50_000,
    "nested lists, closed": "widths: " + "[" * 5_000 + "]" * 5_000,
    "nested maps": "{a: " * 5_000,
    "an endless number": "iterations: " + "9" * 10_000,
    "a long key": "x" * 100_000 + ": 1",
    "a long value": "iterations: " + "x" * 1_000_000,
    "a value of many lines": "iterations: |\n" + "  x\n" * 100_000,
    "an anchor that contains itself": "widths: &a [*a]",
    "anchors that multiply to 387 million words": f"{BOMB}\nwidths: *i",
    "no text": "\x00\x01\x02",
}


@pytest.mark.parametrize("case", HOSTILE_YAML)
def test_hostile_yaml_ends_with_one_sentence(children, folder, tried, case):
    """In a child process, which may crash: one sentence of bounded length, and little memory."""
    (folder / "my.yaml").write_text(HOSTILE_YAML[case])
    ordinary = children.run("train", "--config", folder / "nowhere.yaml").peak
    done = children.run("train", "--config", folder / "my.yaml", "--output", folder / "run", timeout=240)
    assert done.code == 2, (done.code, done.output[-500:])
    assert one_sentence(done.output), done.output[:500]
    assert len(done.output) < 2_000, done.output[:500]
    assert done.peak - ordinary < 128 * 1024  # kilobytes
    assert not (folder / "run").exists()
    tried("a configuration in YAML designed to do harm")


@pytest.fixture
def run(uninterrupted, tmp_path):
    """Return a copy of a finished run."""
    shutil.copytree(uninterrupted(), tmp_path / "run")
    return tmp_path / "run"


def test_mutated_config_of_a_run(run, tried):
    path, chance = run / "config.json", random.Random(0)
    original = path.read_bytes()
    weight = load_run(run, "last").model.head.weight

    def read(_):
        config_of(RunDirectory.open(run))
        loaded = load_run(run, "last")
        assert torch.equal(loaded.model.head.weight, weight)
        assert list(loaded.classes) == [str(name) for name in json.loads(path.read_bytes())["classes"]]

    for number in range(FUZZ_INPUTS):
        mutated = json.dumps(mutated_value(json.loads(original), chance)).encode()
        path.write_bytes(mutated_bytes(original, chance) if number % 2 else mutated)
        call_reader(read, None, (ValueError, TypeError, SphereNetError))
        tried("a fuzzed config.json of a run")


def test_mutated_metrics(tmp_path, tried):
    metrics, chance = MetricsFile(tmp_path / "metrics.jsonl"), random.Random(0)
    for step in range(8):
        metrics.append({"step": step, "split": "train", "loss": 1 / (step + 1), "nested": {"a": [1, 2]}})
    original, rows = metrics.path.read_bytes(), metrics.read()
    read = 0
    for number in range(FUZZ_INPUTS):
        if number % 2:
            metrics.path.write_bytes(mutated_bytes(original, chance))
        else:
            mutated = mutated_value(rows, chance)
            metrics.path.write_text("".join(json.dumps(row) + "\n" for row in mutated))
        result, message = call_reader(lambda file: file.read(), metrics, RunError)
        read += message is None
        if message is None:
            assert all(isinstance(row["step"], int) and isinstance(row["split"], str) for row in result)
            call_reader(lambda file: file.cut_back(4), metrics, RunError)
            kept = metrics.read()
            assert [json.dumps(row) for row in kept] == [json.dumps(row) for row in result if row["step"] <= 4]
        tried("a fuzzed metrics.jsonl")
    assert FUZZ_INPUTS // 20 < read < FUZZ_INPUTS


ROW = b'{"step": 1, "split": "train"}\n'
LARGE_METRICS = {
    "many rows": ROW * 600_000,
    "a nested row": b'{"step": 1, "split": "", "a": [' + b"[]," * 5_000_000 + b"[]]}\n",
    "a row without an end": ROW + b"[" * 20_000_000,
}


@pytest.mark.parametrize("case", LARGE_METRICS)
def test_doctor_reads_large_metrics_in_little_memory(run, children, tried, case):
    ordinary = children.run("doctor", run).peak
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(LARGE_METRICS[case])
    done = children.run("doctor", run, timeout=240)
    assert done.code == (1 if case == "a nested row" else 0), done.output
    assert "internal error" not in done.output
    assert done.peak - ordinary < 48 * 1024  # kilobytes
    tried("a metrics.jsonl designed to fill the memory")


@pytest.fixture
def checkpoint(tmp_path):
    """Return a checkpoint of the small training problem."""
    prepared = trainer(tmp_path / "small", iterations=4)
    prepared.train(StopSignals())
    return prepared.run_directory.checkpoints.paths()[-1]


FILES = ("manifest.json", "state.json", "model.safetensors", "optimizer.safetensors")


@pytest.mark.parametrize("file", FILES)
def test_corrupt_file_of_a_checkpoint_is_detected(checkpoint, tried, file):
    """The manifest reveals every change."""
    path, chance = checkpoint / file, random.Random(0)
    original = path.read_bytes()
    for _ in range(FUZZ_INPUTS // 4):
        data = mutated_bytes(original, chance)
        path.write_bytes(data)
        _, message = call_reader(load_checkpoint, checkpoint, CheckpointError)
        unchanged = data == original or (message is None and json.loads(data) == json.loads(original))
        assert (message is None) == unchanged, data
        assert all(finding.valid for finding in examine_run_of(checkpoint)) == unchanged
        tried("a checkpoint with a fuzzed file")


def examine_run_of(checkpoint):
    """Return the findings of `doctor` on the run of a checkpoint."""
    run = RunDirectory(checkpoint.parents[1])
    run.write_config({"format": 1})
    return examine(run.path)


def mutate_manifest(checkpoint, chance):
    path = checkpoint / "manifest.json"
    path.write_text(json.dumps(mutated_value(json.loads(path.read_text()), chance)) + "\n")


def mutate_state(checkpoint, chance):
    path = checkpoint / "state.json"
    path.write_text(json.dumps(mutated_value(json.loads(path.read_text()), chance)))
    sign(checkpoint)


def mutate_header(checkpoint, chance):
    path = checkpoint / chance.choice(FILES[2:])
    original = path.read_bytes()
    length = int.from_bytes(original[:8], "little")
    header = json.dumps(mutated_value(json.loads(original[8 : 8 + length]), chance)).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + original[8 + length :])
    sign(checkpoint)


def mutate_tensors(checkpoint, chance):
    path = checkpoint / chance.choice(FILES[2:])
    tensors = load_file(path)
    name = chance.choice(sorted(tensors))
    tensor = tensors.pop(name)
    operation = chance.randrange(5)
    if operation == 1:
        tensors[name] = tensor.to(chance.choice([torch.int64, torch.bool, torch.float16, torch.float64]))
    elif operation == 2:
        tensors[name] = tensor.flatten()[:1].squeeze()
    elif operation == 3:
        tensors[chance.choice(["x", "", "step/x", "exp_avg/", "/", f"unknown/{name}"])] = tensor
    elif operation == 4:
        tensors[name] = torch.zeros(chance.choice([(0,), (1, 1), (2, 3, 4)]))
    save_file(tensors, path)
    sign(checkpoint)


HOSTILE = {"manifest": mutate_manifest, "state": mutate_state, "header": mutate_header, "tensors": mutate_tensors}


@pytest.mark.parametrize("mutation", HOSTILE)
def test_hostile_checkpoint_is_rejected_or_resumed(checkpoint, tmp_path, tried, mutation):
    """The attacker writes a new manifest. The checkpoint is rejected with one sentence, or can be resumed."""
    chance = random.Random(0)
    aside = tmp_path / "aside"
    shutil.copytree(checkpoint, aside)

    def resume(_):
        prepared = trainer(tmp_path / "small", iterations=6)
        messages = prepared.resume()
        assert all(len(message.splitlines()) == 1 for message in messages)
        if prepared.step < 6:
            assert prepared.train(StopSignals()).step == 6

    for _ in range(FUZZ_INPUTS // 4):
        for later in (tmp_path / "small" / "checkpoints").iterdir():
            shutil.rmtree(later)
        shutil.copytree(aside, checkpoint)
        HOSTILE[mutation](checkpoint, chance)
        call_reader(resume, None, (CheckpointError, ValueError))
        tried("a checkpoint changed and with a new checksum")
