"""Cross-validation of settings: folds, the best mean, its configuration."""

import errno
import json
import os

import pytest
import torch
from grid_folders import finish_job

from command_line import spherenet
from spherenet.cli import main
from spherenet.data import load_dataset
from spherenet.runs import RunDirectory
from spherenet.training import TrainConfig
from spherenet_paper.experiments.jobs import (
    create_settings,
    create_tuning_jobs,
)


def test_tune_selects_the_best_mean_and_writes_a_configuration(tmp_path, capsys, monkeypatch):
    from spherenet_paper.experiments import runner

    monkeypatch.setattr(runner.LocalLauncher, "__call__", lambda self, arguments, log: main(arguments))
    options = ["--widths", 4, 4, 4, "--batch-size", 16, "--iterations", 30, "--eval-every", 30,
               "--eval-batch-size", 500, "--learning-rate", 0.01]  # fmt: skip
    arguments = ["tune", *options, "--try-operators", "sigmoid:k=0.3", "sigmoid:k=5.0", "none",
                 "--number-of-folds", 2, "--output", tmp_path / "tune", "--best", tmp_path / "best.yaml",
                 "--json"]  # fmt: skip
    assert spherenet(*arguments) == 0
    output = capsys.readouterr().out
    result = json.loads(output[output.index('{\n  "scores"') :])
    means = {row["setting"]: row["mean"] for row in result["scores"]}
    assert result["best"] == max(means, key=means.get)
    names = {path.name for path in (tmp_path / "tune").iterdir()}
    assert names == {"sigmoid_k0.3_softmax", "sigmoid_k5_softmax", "none_softmax"}
    folds = [RunDirectory.open(run).config["images"] for run in (tmp_path / "tune").glob("*/fold-*")]
    assert folds == [{"train": 2000, "test": 2000}] * 6
    assert spherenet("train", "--config", tmp_path / "best.yaml", "--iterations", 1, "--output", tmp_path / "run") == 0
    assert RunDirectory.open(tmp_path / "run").config["images"] == {"train": 4000, "test": 1000}


def test_tune_without_a_finished_run_prints_no_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("spherenet_paper.experiments.runner.LocalLauncher.__call__", lambda self, arguments, log: 1)
    options = ["--widths", 4, 4, 4, "--try-operators", "cosine", "--number-of-folds", 2, "--output", tmp_path]
    assert spherenet("tune", *options) == 1
    assert "held-out" not in "".join(capsys.readouterr())


def test_folds_are_disjoint_and_stratified():
    from spherenet.training.build import split_folds

    dataset = load_dataset("mnist5k")
    folds = [split_folds(dataset, 3, fold) for fold in range(3)]
    positions = torch.cat([fold.test._positions for fold in folds])
    assert sorted(positions.tolist()) == list(range(4000))
    for fold in folds:
        assert len(fold.train) + len(fold.test) == 4000
        counts = fold.test.labels.bincount()
        assert counts.max() - counts.min() <= 1


def test_subsample_is_stratified_and_keeps_the_test_split():
    from spherenet.training.build import subsample

    dataset = load_dataset("mnist5k")
    few = subsample(dataset, 37)
    counts = few.train.labels.bincount(minlength=10)
    assert len(few.train) == len(set(few.train._positions.tolist())) == 37
    assert counts.max() - counts.min() <= 1
    assert few.test is dataset.test
    for wrong in (9, 4001):
        with pytest.raises(ValueError, match=rf"from 10 \(one image per class\) to 4000 \(all images\), got {wrong}"):
            subsample(dataset, wrong)


def test_tune_passes_the_options_of_operators_and_losses_on(tmp_path, capsys):
    options = ["--try-operators", "sigmoid:k=0.70", "cosine", "--try-losses", "s-cosine:s=10"]
    assert spherenet("tune", *options, "--dry-run", "--output", tmp_path) == 0
    commands = [line for line in capsys.readouterr().out.splitlines() if " train " in line]
    assert sum("--operator sigmoid:k=0.7 " in line for line in commands) == 3
    assert all("--loss s-cosine:s=10 " in line for line in commands)
    assert len(commands) == 6


def test_tune_does_not_count_runs_with_other_options(tmp_path, capsys):
    settings = create_settings(TrainConfig(widths=[4, 4, 4], iterations=2), ["cosine"], ["softmax"])
    for job in create_tuning_jobs(settings, tmp_path / "runs", 2):
        finish_job(job)
    options = ["--widths", 4, 4, 4, "--try-operators", "cosine", "--number-of-folds", 2, "--output", tmp_path / "runs"]
    assert spherenet("tune", *options, "--iterations", 2) == 0
    assert "50.00%" in capsys.readouterr().out
    best = tmp_path / "best.yaml"
    assert spherenet("tune", *options, "--iterations", 3, "--best", best) == 1
    said = capsys.readouterr()
    assert said.err.count("was run with --iterations 2, not 3") == 2
    assert said.out == ""
    assert not best.exists()


@pytest.mark.parametrize("target", ["output", "best"])
def test_tune_on_a_read_only_disk_is_one_sentence(target, tmp_path, capsys, monkeypatch):
    disk = tmp_path / "disk"
    disk.mkdir()

    def mkdir(path, *arguments, **options):
        if str(path).startswith(str(disk)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return made(path, *arguments, **options)

    made = os.mkdir
    monkeypatch.setattr(os, "mkdir", mkdir)
    places = {"output": tmp_path / "runs", "best": tmp_path / "best.yaml"} | {target: disk / "a"}
    assert spherenet("tune", "--output", places["output"], "--best", places["best"]) == 2
    assert capsys.readouterr().err == f"spherenet tune: {disk}: Read-only file system.\n"
