"""Fuzzed files of a run: a clean error, or exactly what stands in them; never a crash, a hang or a part."""

import json
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from command_line import one_sentence
from faults.folders import sign
from faults.mutation import answer, mutated_bytes, mutated_value
from faults.scale import FUZZ_INPUTS
from spherenet.cli.train import parser
from spherenet.errors import CheckpointError, RunError, SphereNetError
from spherenet.runs import MetricsFile, RunDirectory
from spherenet.runs.checkpoints import load_checkpoint
from spherenet.runs.directory import examine
from spherenet.training import StopSignals
from spherenet.training.build import augmentation_of, build_settings
from spherenet.training.config import TrainConfig
from spherenet.training.saved_runs import config_of, load_run
from training_problem import trainer

POINT = 11
WRONG = (ValueError, TypeError, RunError)
"""What the command line turns into one sentence and the exit code 2."""


def parsed(path, capsys):
    """The settings of a YAML file, as `spherenet train --config` comes to them."""
    try:
        arguments = parser().parse_args(["--config", str(path)])
    except SystemExit as left:
        if left.code != 2:
            raise
        said = capsys.readouterr().err
        assert one_sentence(said), said
        raise ValueError(said.strip()) from None
    config = TrainConfig.from_dict(parser().values(arguments))
    build_settings(config)
    augmentation_of(config)
    return config


def test_configurations_in_yaml(tmp_path, tried, capsys):
    path, chance = tmp_path / "my.yaml", random.Random(0)
    whole = TrainConfig(widths=[4, 4, 4], milestones=[3, 5], k=0.3)
    text = "".join(f"{name}: {json.dumps(value)}\n" for name, value in whole.as_dict().items()).encode()
    path.write_bytes(text)
    assert parsed(path, capsys) == whole
    refused = 0
    for number in range(FUZZ_INPUTS):
        if number % 2:
            path.write_bytes(mutated_bytes(text, chance))
        else:
            path.write_text(json.dumps(mutated_value(whole.as_dict(), chance)))
        _, sentence = answer(lambda file: parsed(file, capsys), path, WRONG)
        refused += sentence is not None
        tried("a fuzzed configuration in YAML")
    assert refused > FUZZ_INPUTS // 3


BOMB = "\n".join(
    ["a: &a [x, x, x, x, x, x, x, x, x]"]
    + [f"{key}: &{key} [{', '.join([f'*{before}'] * 9)}]" for key, before in zip("bcdefghi", "abcdefgh", strict=True)]
)
HARM = {
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


@pytest.mark.parametrize("case", HARM)
def test_configurations_made_to_do_harm(children, folder, tried, case):
    """In a process of their own, which may be gone: one sentence of bounded length, and little memory."""
    (folder / "my.yaml").write_text(HARM[case])
    ordinary = children.run("train", "--config", folder / "nowhere.yaml").peak
    done = children.run("train", "--config", folder / "my.yaml", "--output", folder / "run", timeout=60)
    assert done.code == 2, (done.code, done.said[-500:])
    assert one_sentence(done.said), done.said[:500]
    assert len(done.said) < 2_000, done.said[:500]
    assert done.peak - ordinary < 128 * 1024  # kilobytes
    assert not (folder / "run").exists()
    tried("a configuration in YAML made to do harm")


@pytest.fixture
def run(whole, tmp_path):
    """A finished run of one's own."""
    shutil.copytree(whole(), tmp_path / "run")
    return tmp_path / "run"


def test_the_config_of_a_run(run, tried):
    path, chance = run / "config.json", random.Random(0)
    whole = path.read_bytes()
    weight = load_run(run, "last").model.head.weight

    def read(_):
        config_of(RunDirectory.open(run))
        loaded = load_run(run, "last")
        assert torch.equal(loaded.model.head.weight, weight)
        assert len(loaded.classes) == 10 or path.read_bytes() != whole

    for number in range(FUZZ_INPUTS):
        odd = json.dumps(mutated_value(json.loads(whole), chance)).encode()
        path.write_bytes(mutated_bytes(whole, chance) if number % 2 else odd)
        answer(read, None, (ValueError, TypeError, SphereNetError))
        tried("a fuzzed config.json of a run")


def test_metrics(tmp_path, tried):
    metrics, chance = MetricsFile(tmp_path / "metrics.jsonl"), random.Random(0)
    for step in range(8):
        metrics.append({"step": step, "split": "train", "loss": 1 / (step + 1), "nested": {"a": [1, 2]}})
    whole, rows = metrics.path.read_bytes(), metrics.read()
    read = 0
    for number in range(FUZZ_INPUTS):
        if number % 2:
            metrics.path.write_bytes(mutated_bytes(whole, chance))
        else:
            odd = mutated_value(rows, chance)
            metrics.path.write_text("".join(json.dumps(row) + "\n" for row in odd))
        found, sentence = answer(lambda file: file.read(), metrics, RunError)
        read += sentence is None
        if sentence is None:
            assert all(isinstance(row["step"], int) and isinstance(row["split"], str) for row in found)
            answer(lambda file: file.cut_back(4), metrics, RunError)
            kept = metrics.read()
            assert [json.dumps(row) for row in kept] == [json.dumps(row) for row in found if row["step"] <= 4]
        tried("a fuzzed metrics.jsonl")
    assert FUZZ_INPUTS // 20 < read < FUZZ_INPUTS


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint of the small training problem, and a trainer that can go on from it."""
    made = trainer(tmp_path / "small", iterations=4)
    made.train(StopSignals())
    return made.run_directory.checkpoints.paths()[-1]


FILES = ("manifest.json", "state.json", "model.safetensors", "optimizer.safetensors")


@pytest.mark.parametrize("file", FILES)
def test_a_checkpoint_by_accident(checkpoint, tried, file):
    """Whatever changed, the manifest tells."""
    path, chance = checkpoint / file, random.Random(0)
    whole = path.read_bytes()
    for _ in range(FUZZ_INPUTS // 4):
        data = mutated_bytes(whole, chance)
        path.write_bytes(data)
        _, sentence = answer(load_checkpoint, checkpoint, CheckpointError)
        assert sentence is not None or data == whole or file == "manifest.json"
        assert all(finding.part for finding in examine_anyway(checkpoint))
        tried("a checkpoint with a fuzzed file")


def examine_anyway(checkpoint):
    """The doctor's findings on the run of a checkpoint."""
    run = RunDirectory(checkpoint.parents[1])
    run.write_config({"format": 1})
    return examine(run.path)


def odd_manifest(checkpoint, chance):
    path = checkpoint / "manifest.json"
    path.write_text(json.dumps(mutated_value(json.loads(path.read_text()), chance)) + "\n")


def odd_state(checkpoint, chance):
    path = checkpoint / "state.json"
    path.write_text(json.dumps(mutated_value(json.loads(path.read_text()), chance)))
    sign(checkpoint)


def odd_header(checkpoint, chance):
    path = checkpoint / chance.choice(FILES[2:])
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.dumps(mutated_value(json.loads(whole[8 : 8 + length]), chance)).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + whole[8 + length :])
    sign(checkpoint)


def odd_tensors(checkpoint, chance):
    path = checkpoint / chance.choice(FILES[2:])
    tensors = load_file(path)
    name = chance.choice(sorted(tensors))
    tensor = tensors.pop(name)
    kind = chance.randrange(5)
    if kind == 1:
        tensors[name] = tensor.to(chance.choice([torch.int64, torch.bool, torch.float16, torch.float64]))
    elif kind == 2:
        tensors[name] = tensor.flatten()[:1].squeeze()
    elif kind == 3:
        tensors[chance.choice(["x", "", "step/x", "exp_avg/", "/", f"odd/{name}"])] = tensor
    elif kind == 4:
        tensors[name] = torch.zeros(chance.choice([(0,), (1, 1), (2, 3, 4)]))
    save_file(tensors, path)
    sign(checkpoint)


HOSTILE = {"manifest": odd_manifest, "state": odd_state, "header": odd_header, "tensors": odd_tensors}


@pytest.mark.parametrize("part", HOSTILE)
def test_a_checkpoint_on_purpose(checkpoint, tmp_path, tried, part):
    """Made by somebody who signs it anew: refused in one sentence, or trained on from where it says it is."""
    chance = random.Random(0)
    aside = tmp_path / "aside"
    shutil.copytree(checkpoint, aside)

    def go_on(_):
        prepared = trainer(tmp_path / "small", iterations=6)
        complaints = prepared.resume()
        assert all(len(sentence.splitlines()) == 1 for sentence in complaints)
        assert prepared.step >= 0
        if prepared.step < 6:
            prepared.train(StopSignals())

    for _ in range(FUZZ_INPUTS // 4):
        for later in (tmp_path / "small" / "checkpoints").iterdir():
            shutil.rmtree(later)
        shutil.copytree(aside, checkpoint)
        HOSTILE[part](checkpoint, chance)
        answer(go_on, None, (CheckpointError, ValueError))
        tried("a checkpoint changed and signed anew")
