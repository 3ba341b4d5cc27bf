"""Plans of grids: commands, data and estimated time; data are checked first; stopped grids; table widths."""

import io
import shlex
import subprocess
from dataclasses import replace
from statistics import median

import pytest
from grid_folders import finish_job, make_grid
from rich.console import Console

from command_line import one_sentence, spherenet
from spherenet.cli.options import config_from
from spherenet.cli.train import train_parser
from spherenet.runs import RunDirectory
from spherenet.training import TrainConfig
from spherenet_paper.experiments import EXPERIMENTS, find_experiment
from spherenet_paper.experiments.experiment import PRESETS
from spherenet_paper.experiments.jobs import Job, create_jobs
from spherenet_paper.experiments.plan import estimate, training_seconds
from spherenet_paper.experiments.runner import Result, stop_summary
from spherenet_paper.records import read_records
from spherenet_paper.report.tables import paper_tables


def dry_run(capsys, *arguments):
    assert spherenet(*arguments, "--dry-run") == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    return shown.out


def test_dry_run_prints_a_runnable_script_and_writes_nothing(tmp_path, capsys):
    folder = tmp_path / "my results"
    jobs = create_jobs(find_experiment("table1").cells("smoke"), folder / "smoke" / "table1", range(2))
    finish_job(jobs[0])
    script = dry_run(capsys, "reproduce", "table1", "--preset", "smoke", "--seeds", 2, "--output", folder)
    assert [path.name for path in folder.rglob("config.json")] == ["config.json"]
    lines = script.splitlines()
    assert lines[0] == "# table1, preset smoke: 8 runs (1 done, 7 to start), 1 at a time"
    comments = " ".join(line.removeprefix("# ") for line in lines if line.startswith("#"))  # wrapped at 80 characters
    assert "at a time data: mnist5k (8 runs): found at " in comments
    assert any("an estimate" in line for line in lines)
    assert all(len(line) <= 80 for line in lines if line.startswith("#"))
    assert "# done: sigmoid-0.3_softmax seed 0" in lines
    commands = [shlex.split(line) for line in lines if line.startswith("spherenet ")]
    assert len(commands) == 7
    parser = train_parser()
    for job, command in zip(jobs[1:], commands, strict=True):
        parsed = parser.parse_args(command[2:])
        assert config_from(parsed, TrainConfig) == job.config
        assert parsed.output == str(job.folder)
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


def test_engine_of_a_grid_is_that_of_its_cnns(tmp_path, capsys):
    grid = ("reproduce", "table1", "--preset", "smoke", "--output", tmp_path)
    script = dry_run(capsys, *grid, "--engine", "winograd")
    commands = [line for line in script.splitlines() if line.startswith("spherenet ")]
    for command in commands:
        assert ("engine=" in command) == ("--operator none" in command)
    assert any("engine=" in command for command in commands)
    assert "engine=" not in dry_run(capsys, *grid)


def test_dry_run_of_tune_lists_all_folds(tmp_path, capsys):
    options = ["--try-operators", "cosine", "none", "--number-of-folds", 2, "--epochs", 1, "--output", tmp_path]
    script = dry_run(capsys, "tune", *options)
    assert script.startswith("# tune: 4 runs (4 to start)")
    assert script.count("fold=") == 2  # fold 0 is the default
    assert script.count("--epochs 1.0") == 4
    assert list(tmp_path.iterdir()) == []


def test_dry_run_uses_torchrun_for_several_processes(tmp_path, capsys):
    options = ["--preset", "smoke", "--processes", 2, "--output", tmp_path]
    script = dry_run(capsys, "reproduce", "learnable", *options)
    assert "torchrun --standalone --nproc-per-node=2 -m spherenet train" in script


def test_missing_data_are_named_in_the_plan(tmp_path, capsys):
    options = ["--preset", "cpu", "--output", tmp_path, "--data-dir", tmp_path / "nowhere"]
    script = dry_run(capsys, "reproduce", "learnable", *options)
    assert "# data: cifar10 (2 runs): missing; it is downloaded before the first run" in script


@pytest.mark.parametrize("verb", ["reproduce", "tune"])
def test_data_are_checked_before_the_first_run(verb, tmp_path, capsys, monkeypatch):
    """A data set that cannot be read stops the grid with one sentence, not each of its runs."""
    monkeypatch.setattr(
        "spherenet_paper.experiments.runner.LocalLauncher.__call__", lambda *_: pytest.fail("a run started")
    )
    corrupt = tmp_path / "data" / "cifar-10-batches-bin"
    corrupt.mkdir(parents=True)
    (corrupt / "data_batch_1.bin").write_bytes(b"short")
    output = ["--output", tmp_path / "runs", "--data-dir", tmp_path / "data"]
    arguments = ["learnable"] if verb == "reproduce" else ["--data", "cifar10", "--no-download"]
    assert spherenet(verb, *arguments, *output) == 2
    *announced, said = capsys.readouterr().err.strip().splitlines()
    assert one_sentence(said)
    assert f"spherenet {verb}: no run was started: {2 if verb == 'reproduce' else 9} need cifar10" in said
    assert "data: cifar10" in announced[0]
    assert not (tmp_path / "runs").exists()


def test_smoke_run_says_which_data_it_used(tmp_path, capsys, monkeypatch):
    def launch(self, arguments, log):
        return spherenet(*arguments)

    monkeypatch.setattr("spherenet_paper.experiments.runner.LocalLauncher.__call__", launch)
    options = ["--preset", "smoke", "--only", "sigmoid-0.3", "--output", tmp_path]
    assert spherenet("reproduce", "learnable", *options) == 0
    shown = capsys.readouterr()
    assert "learnable  data: mnist5k (1 run): found at" in shown.err
    assert "preset smoke, data mnist5k" in " ".join(shown.out.split())


SHARED_CORES = ("margin-forms", "fig-spherenorm", "magnitudes")
"""Experiments whose runs shared their cores with other processes, so that their seconds are not those of the work."""


def test_estimate_agrees_with_the_committed_runs():
    """The constants are fitted: half of the estimates are too high, most of them by less than a factor of two."""
    ratios = []
    for record in read_records():
        if record.key.seed or not record.key.preset.startswith("cpu") or record.key.experiment in SHARED_CORES:
            continue
        config = TrainConfig.from_dict(record.run.config["train"])
        ratios.append(training_seconds(config) / record.run.summary["seconds"])
    assert len(ratios) > 80
    assert median(ratios) == pytest.approx(1, abs=0.2)
    assert sum(0.5 <= ratio <= 2 for ratio in ratios) >= 0.7 * len(ratios)


def test_estimate_scales_with_measured_and_remaining_work(tmp_path):
    config = TrainConfig(widths=[4, 4, 4], iterations=100)
    jobs = [Job(str(index), tmp_path / str(index), replace(config, seed=index)) for index in range(4)]
    assert estimate(jobs).core_seconds == pytest.approx(4 * training_seconds(config))
    finish_job(jobs[0])  # it took one second
    assert estimate(jobs).core_seconds == pytest.approx(3)
    run = RunDirectory.create(jobs[1].folder)
    run.write_config({"format": 1, "train": jobs[1].config.as_dict()})
    run.append({"step": 75, "split": "train"})
    assert estimate(jobs).core_seconds == pytest.approx(2.25)
    assert "1 finished runs" in estimate(jobs).basis


@pytest.mark.parametrize("id", EXPERIMENTS)
def test_every_experiment_has_an_estimate(id):
    for preset in PRESETS:
        for cell in find_experiment(id).cells(preset):
            assert training_seconds(cell.config) > 0


def test_summary_of_a_stopped_grid_counts_what_is_true(tmp_path):
    jobs = [Job(str(index), tmp_path / str(index), TrainConfig()) for index in range(5)]
    finish_job(jobs[0])
    RunDirectory.create(jobs[1].folder).write_config({"format": 1})
    results = [Result(jobs[0], None), Result(jobs[1], "stopped at step 3.", True), Result(jobs[2], "stopped", True),
               Result(jobs[3], "exit code 2: wrong"), Result(jobs[4], "stopped", True)]  # fmt: skip
    assert stop_summary(results) == "1 of 5 runs done, 1 stopped, 2 not started, 1 failed"


def test_wide_tables_fit_80_columns(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    columns = [f"loss number {index}" for index in range(8)]
    cells = {f"c{index}": ("sigmoid-0.3", column, 91.0, {seed: [0.1 + seed / 99] for seed in range(3)})
             for index, column in enumerate(columns)}  # fmt: skip
    console = Console(file=io.StringIO(), width=80)
    for table in paper_tables(make_grid(tmp_path / "grid", cells).read()):
        console.print(table)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert text.count("11.01 ± 1.01 (3)") == 8  # no number is broken
    for id, experiment in EXPERIMENTS.items():
        preset = next(preset for preset in ("cpu", "long", "paper") if experiment.cells(preset))
        assert spherenet("reproduce", id, "--list", "--preset", preset) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
