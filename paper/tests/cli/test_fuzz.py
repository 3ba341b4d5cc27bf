"""Every verb of the study with mutated files or options ends with a result or one sentence."""

import json
import random

import pytest
from grid_folders import finish_job
from PIL import Image

from faults.commands import TINY, mutated_file, mutated_options, options_of, run_command
from faults.mutation import mutated_bytes, mutated_value
from faults.scale import COMMAND_LINES
from spherenet.cli.main import verb_parser
from spherenet_paper.experiments import find_experiment
from spherenet_paper.experiments.jobs import create_jobs, create_settings, create_tuning_jobs
from spherenet_paper.experiments.runner import LocalLauncher

POINT = 15


@pytest.fixture
def no_training(monkeypatch):
    """Let every run of a grid fail at once instead of starting a process."""
    monkeypatch.setattr(LocalLauncher, "__call__", lambda self, arguments, log: 2)


TUNE = ["tune", "--widths", 4, 4, 4, "--milestones", 3, "--iterations", 1, "--batch-size", 32, "--try-operators",
        "cosine", "none", "--number-of-folds", 2]  # fmt: skip


@pytest.fixture
def grids(tmp_path):
    """Return the folder of a finished tuning and the folder of finished experiments."""
    tuned, reproduced = tmp_path / "tuned", tmp_path / "reproduced"
    settings = create_settings(TINY, ["cosine", "none"], ["softmax"])
    experiment = find_experiment("table3")
    folder = reproduced / "smoke" / "table3"
    for job in create_tuning_jobs(settings, tuned, 2) + create_jobs(experiment.cells("smoke"), folder, range(1)):
        finish_job(job)
    return tuned, reproduced


def test_mutated_grids(grids, no_training, capsys, tried):
    chance, (tuned, reproduced) = random.Random(3), grids
    files = {root: sorted(path for path in root.rglob("*.json*") if path.is_file()) for root in grids}
    best = tuned.with_name("best.yaml")
    verbs = {
        "tune": (tuned, [*TUNE, "--output", tuned, "--best", best]),
        "tune --json": (tuned, [*TUNE, "--output", tuned, "--json"]),
        "reproduce": (reproduced, ["reproduce", "table3", "--preset", "smoke", "--output", reproduced]),
    }
    codes = set()
    for root, arguments in verbs.values():
        assert run_command(arguments, capsys) == 0, root  # every run is finished
    for _ in range(COMMAND_LINES // 8):
        verb = chance.choice(list(verbs))
        root, arguments = verbs[verb]
        path = chance.choice(files[root])
        content = path.read_bytes()
        path.write_bytes(mutated_file(content, path.name, chance))
        codes.add(run_command(arguments, capsys))
        path.write_bytes(content)
        tried(f"{verb} with a mutated file of a run")
    assert 1 in codes


def test_mutated_images(tmp_path, capsys, tried):
    chance, codes = random.Random(5), set()
    originals = {}
    for suffix in ("png", "jpg", "bmp", "gif", "tif"):
        Image.effect_noise((12, 8), 50).save(tmp_path / f"original.{suffix}")
        originals[suffix] = (tmp_path / f"original.{suffix}").read_bytes()
    for _ in range(COMMAND_LINES // 25):
        suffix = chance.choice(list(originals))
        path = tmp_path / f"mutated.{suffix}"
        path.write_bytes(mutated_bytes(originals[suffix], chance))
        codes.add(run_command(["theory", "phase", path, *chance.choice([[], ["--json"]])], capsys))
        tried("theory phase of a mutated image")
    assert {0, 2} <= codes


def test_mutated_option_files(tmp_path, capsys, tried):
    chance, path, codes = random.Random(2), tmp_path / "my.yaml", set()
    for _ in range(COMMAND_LINES // 20):
        path.write_text(json.dumps(mutated_value(TINY.as_dict(), chance)))
        # The output folder cannot be created, so that nothing is trained with valid options.
        codes.add(run_command(["tune", "--config", path, "--output", path / "run"], capsys))
        tried("tune with mutated options")
    assert codes <= {1, 2}


def test_unexpected_options(grids, no_training, tmp_path, capsys, monkeypatch, tried):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")  # some values are valid names of files to write
    Image.new("L", (12, 12)).save(tmp_path / "image.png")
    chance, (tuned, reproduced) = random.Random(6), grids
    labs = {lab.prog.split()[-1]: lab for lab in verb_parser("theory").labs}
    conditioning = ["theory", "conditioning", "--c", 1, 2, "--depths", 2, "--steps", 0]
    commands = {
        "reproduce": (["reproduce", "table3", "--preset", "smoke", "--output", reproduced], verb_parser("reproduce")),
        "tune": ([*TUNE, "--output", tuned], verb_parser("tune")),
        "theory operators": (["theory", "operators"], labs["operators"]),
        "theory color": (["theory", "color"], labs["color"]),
        "theory phase": (["theory", "phase", tmp_path / "image.png"], labs["phase"]),
        "theory conditioning": (conditioning, labs["conditioning"]),
    }
    codes = set()
    for _ in range(COMMAND_LINES // 12):
        verb = chance.choice(list(commands))
        arguments, parser = commands[verb]
        codes.add(run_command([*arguments, *mutated_options(options_of(parser), chance)], capsys))
        tried(f"{verb} with unexpected options")
    assert {0, 2} <= codes
