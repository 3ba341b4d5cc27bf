"""The verbs reproduce, tune and theory: outputs, limits and messages."""

import json
import os

import pytest
from grid_folders import finish_job, make_grid

from command_line import TINY, one_sentence, spherenet
from spherenet.training import TrainConfig
from spherenet_paper.experiments.jobs import create_settings, create_tuning_jobs, read_score
from spherenet_paper.report.csv_tables import grids_as_csv
from spherenet_paper.report.pages import grids_page
from spherenet_paper.report.verdicts import verdict_rows


def test_best_setting_of_tune_is_complete_or_unchanged(tmp_path, monkeypatch, capsys):
    settings = create_settings(TrainConfig(widths=[4, 4, 4]), ["cosine"], ["softmax"])
    for job in create_tuning_jobs(settings, tmp_path / "runs", 2):
        finish_job(job)
    target = tmp_path / "best.yaml"
    target.write_text("old")
    tune = ["tune", "--widths", 4, 4, 4, "--try-operators", "cosine", "--number-of-folds", 2, "--output",
            tmp_path / "runs", "--best", target]  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        assert spherenet(*tune) == 2
    assert target.read_text() == "old"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["best.yaml", "runs"]
    capsys.readouterr()
    assert spherenet(*tune) == 0
    assert "operator: cosine" in target.read_text()
    assert spherenet("train", "--config", target, "--output", target / "run") == 2  # a valid file of options
    assert "--config" not in capsys.readouterr().err


def test_invalid_folds_are_ignored_by_tuning(tmp_path):
    jobs = create_tuning_jobs({"x": TrainConfig()}, tmp_path, 4)
    for job, summary in zip(jobs, ['{"accuracy": 0.5}', "{}", "nonsense", '{"accuracy": 0.9}'], strict=True):
        (finish_job(job) / "summary.json").write_text(summary)
    change = json.loads((jobs[3].folder / "config.json").read_text())
    change["train"]["seed"] = 5  # a run with other options
    (jobs[3].folder / "config.json").write_text(json.dumps(change))
    assert read_score("x", TrainConfig(), tmp_path, 4).accuracies == [0.5]


def test_markdown_and_csv_escape_names(tmp_path):
    cells = {"=cmd()": ("@row | <img src=x>", "[link](http://x)", 90.0, {0: [0.5]})}
    folder = make_grid(tmp_path / "grid", cells)
    grid = folder.read()
    page, table = grids_page([grid], verdict_rows([grid])), grids_as_csv([grid])
    assert "<img" not in page
    assert "[link](http" not in page
    assert "'=cmd()" in table
    assert ",'@row" in table


@pytest.mark.parametrize(
    "arguments",
    [
        ("reproduce", "table1", "--seeds", 2**40),
        ("reproduce", "table1", "--jobs", 2**40),
        ("reproduce", "table1", "--processes", 2**40),
        ("tune", "--number-of-folds", 2**40),
        ("tune", "--jobs", 2**40),
        ("theory", "conditioning", "--n", 2**20),
        ("theory", "conditioning", "--depths", 2**20),
        ("theory", "operators", "--m", 2**40),
    ],
    ids=lambda arguments: " ".join(map(str, arguments)),
)
def test_values_that_would_exhaust_the_machine_are_rejected(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert spherenet(*arguments) == 2
    assert one_sentence(message := capsys.readouterr().err), message
    assert " at most " in message or "from" in message


@pytest.mark.parametrize("options", [[], ["--only", "x"], ["--dry-run"], ["--list"]], ids=" ".join)
def test_reproduce_names_the_presets_of_an_experiment(capsys, options):
    assert spherenet("reproduce", "headline", *options) == 2
    assert capsys.readouterr().err == (
        "spherenet reproduce: --preset must be paper or long or smoke for headline, got cpu; "
        "try spherenet reproduce headline --preset long.\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tune", "--jbos=3"], "unknown option --jbos, did you mean --jobs?"),
        (["theory", "phase", "x.png", "--sed", "3"], "unknown option --sed, did you mean --seed?"),
        (["theory", "conditioning", "--n", "2"], "--k must be from 2"),
    ],
)
def test_invalid_option_is_named(arguments, message, capsys):
    assert spherenet(*arguments) == 2
    assert message in capsys.readouterr().err


def test_data_folder_of_embedded_data_is_refused(tmp_path, capsys):
    assert spherenet("tune", *TINY, "--data-dir", tmp_path, "--output", tmp_path / "tune") == 2
    assert "mnist5k" in capsys.readouterr().err
    assert not (tmp_path / "tune").exists()


def test_completion_knows_the_verbs_of_the_study(capsys):
    assert spherenet("completion", "bash") == 0
    script = capsys.readouterr().out
    assert "reproduce" in script
    assert "phase" in script
