"""The paper's experiments as typed lists, and the runner that makes them: skipping, going on, failing alone."""

import json
import re
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import pytest

from command_line import command, in_other_processes, one_sentence, spherenet
from spherenet.cli import main
from spherenet.cli.train import parser as train_parser
from spherenet.experiments.experiment import (
    IDS,
    Job,
    command_line,
    describe_grid,
    find_experiment,
    jobs_of,
    selected,
    words_of,
)
from spherenet.experiments.runner import GridReporter, Here, run_jobs
from spherenet.report.grids import read_grid
from spherenet.runs import RunDirectory
from spherenet.training.config import TrainConfig

SPEC_CELLS = {"table1": 48, "table2": 36, "table3": 6, "table4": 10, "fig-convergence-resnet": 8,
              "fig-convergence-plain": 7, "fig-width": 8, "fig-ultradeep": 6, "learnable": 2, "fig-spherenorm": 20,
              "s-softmax": 6, "weight-decay": 4, "imagenet": 3, "margin-schedule": 22}  # fmt: skip


def here(arguments, log):
    """Run a job in this process: no import of torch for each."""
    return main(arguments)


@pytest.mark.parametrize("id", IDS)
def test_the_paper_preset_has_every_cell_with_the_paper_s_settings(id):
    cells = find_experiment(id).cells("paper")
    assert len(cells) == SPEC_CELLS[id]
    assert len({cell.name for cell in cells}) == len(cells)
    for cell in cells:
        if id != "imagenet":
            config = cell.config
            assert (config.iterations, config.milestones, config.optimizer) == (64_000, [34_000, 54_000], "adam")
            assert config.learning_rate == (1e-4 if cell.starts_from else 1e-3)


def test_the_tables_hold_the_paper_s_numbers():
    """Against the numbers as printed in the paper's source, row by row, where it is at hand."""
    source = Path(__file__).parents[2].parent / "shared" / "paper" / "deep-hyperspherical-learning.tex"
    if not source.exists():
        pytest.skip("the paper's source is not here")
    text = source.read_text()
    for id in ("table1", "table2", "table3", "table4"):
        for cell in find_experiment(id).cells("paper"):
            assert f"{cell.paper:g}" in text, cell.name  # 91.7 stands for 91.70


@pytest.mark.parametrize("id", IDS)
def test_claims_name_cells(id):
    experiment = find_experiment(id)
    names = {cell.name for cell in experiment.cells("paper")}
    for claim in experiment.claims:
        assert claim.pairs
        for pair in claim.pairs:
            assert names.issuperset(pair), pair
    assert experiment.claims_of(experiment.cells("smoke")) is not None
    assert f"spherenet reproduce {id}" in words_of(id)


@pytest.mark.parametrize("id", IDS)
@pytest.mark.parametrize("preset", ["paper", "cpu", "smoke"])
def test_a_cell_s_command_line_makes_its_configuration(id, preset):
    parser = train_parser()
    for cell in find_experiment(id).cells(preset):
        parsed = parser.values(parser.parse_args(command_line(cell.config)))
        assert TrainConfig.from_dict(parsed) == cell.config


@pytest.mark.parametrize("id", IDS)
def test_smoke(id, tmp_path):
    experiment = find_experiment(id)
    cells = experiment.cells("smoke")
    folder = tmp_path / "smoke" / id
    describe_grid(experiment, "smoke", folder)
    results = run_jobs(jobs_of(cells, folder, range(1)), here, 1)
    assert [result.failure for result in results] == [None] * len(cells)
    grid = read_grid(folder)
    assert all(cell.runs for cell in grid.cells)
    assert spherenet("report", folder, "-o", tmp_path / "page.html") == 0


TINY = TrainConfig(iterations=2, batch_size=8, widths=[4, 4, 4], eval_every=2, eval_batch_size=500)


def test_finished_jobs_are_skipped_and_failing_ones_stop_nobody(tmp_path):
    jobs = [
        Job("good", tmp_path / "good", TINY),
        Job("bad", tmp_path / "bad", replace(TINY, model="cnn-1000")),
        Job("after bad", tmp_path / "after", TINY, after=tmp_path / "bad"),
        Job("also good", tmp_path / "also", replace(TINY, seed=1)),
    ]
    calls = []

    def launch(arguments, log):
        calls.append(arguments)
        return main(arguments)

    first = run_jobs(jobs, launch, 1)
    assert [result.failure is None for result in first] == [True, False, False, True]
    assert "which it starts from, failed" in first[2].failure
    assert len(calls) == 3
    calls.clear()
    again = run_jobs(jobs, launch, 2)
    assert [result.failure is None for result in again] == [True, False, False, True]
    assert len(calls) == 1


def test_results_of_other_settings_are_not_mixed_in(tmp_path):
    job = Job("one", tmp_path / "one", TINY)
    assert run_jobs([job], here, 1)[0].failure is None
    other = Job("one", tmp_path / "one", replace(TINY, learning_rate=0.1))
    assert "was run with learning_rate = 0.001, not 0.1" in run_jobs([other], here, 1)[0].failure


def test_a_started_job_goes_on(tmp_path):
    job = Job("one", tmp_path / "one", TINY)
    assert run_jobs([job], here, 1)[0].failure is None
    (job.folder / "summary.json").unlink()
    assert job.arguments()[:2] == ["train", "--resume"]
    assert run_jobs([job], here, 1)[0].failure is None


def test_a_run_that_another_process_has_is_waited_for(tmp_path):
    job = Job("one", tmp_path / "one", TINY)
    assert not job.in_use()
    assert not job.folder.exists()
    job.folder.mkdir()
    codes = []

    def launch(arguments, log):
        codes.append(main(arguments))
        return codes[-1]

    with ThreadPoolExecutor(1) as pool:
        with RunDirectory(job.folder).locked():
            running = pool.submit(run_jobs, [job], launch, 1)
            while not codes:
                time.sleep(0.1)
            assert not wait([running], 0.5).done
        assert [result.failure for result in running.result(120)] == [None]
        assert codes == [2, 0]
        with RunDirectory(job.folder).locked():
            (job.folder / "summary.json").unlink()
            # Stopped while it waits: before the first launch it would not start at all.
            left = pool.submit(run_jobs, [job], launch, 1, stopped=lambda: len(codes) > 2).result(120)
            assert "in use by another process" in left[0].failure


def test_gpus_are_dealt_out(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    seen = []

    def run(self, command, environment, log):
        seen.append(environment.get("CUDA_VISIBLE_DEVICES"))
        if len(seen) == 1:
            self(["train"], log)  # while the first is running
        return 0

    monkeypatch.setattr(Here, "_run", run)
    Here(processes=2, gpus=["4", "5", "7"], at_once=2)(["train"], tmp_path / "log")
    assert seen == ["4,5", "7,4"]
    assert Here()(["train"], tmp_path / "log") == 0
    assert seen[-1] is None


def test_fine_tuning_waits_for_its_source(tmp_path):
    order = []

    class Watch(GridReporter):
        def running(self, job):
            order.append(job.name)

    cells = [cell for cell in find_experiment("s-softmax").cells("smoke") if cell.name in ("fine-tuned", "softmax")]
    results = run_jobs(jobs_of(cells[::-1], tmp_path, range(1)), here, 2, Watch())
    assert [result.failure for result in results] == [None, None]
    assert order == ["softmax seed 0", "fine-tuned seed 0"]


def test_selecting_cells_brings_what_they_start_from():
    cells = find_experiment("s-softmax").cells("smoke")
    assert [cell.name for cell in selected(cells, ["fine-tuned"])] == ["softmax", "fine-tuned"]
    assert len(selected(cells, [])) == 6


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_grid_goes_on(tmp_path, number):
    """SIGTERM to the grid: its runs save and leave. SIGKILL: they go on alone. Called again it ends with every cell."""
    arguments = ["reproduce", "weight-decay", "--preset", "smoke", "--output", tmp_path, "--jobs", 2]
    running = subprocess.Popen(command(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    for line in running.stderr:
        if "begins" in line:
            break
    time.sleep(1)
    running.send_signal(number)
    running.stderr.read()
    running.stderr.close()
    assert running.wait(120) in (130, -number)
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "cosine" in done.stdout
    runs = list((tmp_path / "smoke" / "weight-decay").glob("*/seed-0"))
    assert len(runs) == 4
    assert all(RunDirectory.open(run).finished for run in runs)


def test_each_run_may_be_a_distributed_job(tmp_path):
    only = ["reproduce", "weight-decay", "--preset", "smoke", "--only", "cosine_free"]
    done = in_other_processes(*only, "--processes", 2, "--output", tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    run = RunDirectory.open(tmp_path / "smoke" / "weight-decay" / "cosine_free" / "seed-0")
    assert run.finished
    assert run.config["processes"] == 2


WRONG = {
    "id": (["reproduce", "table5"], r"id must be one of .* Did you mean 'table\d'\?"),
    "no id": (["reproduce"], "ID is missing"),
    "cell": (["reproduce", "table1", "--only", "cosin"], "--only must be one of .* Did you mean 'cosine"),
    "seeds": (["reproduce", "table1", "--seeds", "0"], "--seeds must be at least 1, got 0"),
    "no data": (["reproduce", "imagenet"], "imagenet has no cells in the preset cpu"),
    "folds": (["tune", "--number-of-folds", "1"], "--number-of-folds must be at least 2"),
    "operator": (["tune", "--try-operators", "cos"], "--try-operators must be one of"),
    "loss": (["tune", "--try-losses", "w"], "--try-losses must be one of"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input(case, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments, message = WRONG[case]
    assert spherenet(*arguments) == 2
    said = capsys.readouterr().err
    assert re.search(message, said)
    assert one_sentence(said)
    assert list(tmp_path.iterdir()) == []


def test_the_list(capsys):
    assert spherenet("reproduce", "--list") == 0
    said = capsys.readouterr().out
    assert all(id in said for id in IDS)
    assert spherenet("reproduce", "table3", "--list", "--preset", "paper") == 0
    said = capsys.readouterr().out
    assert "sigmoid-0.1" in said
    assert "86.29" in said
    assert "spherenet reproduce table3" in said


def test_tune_chooses_by_folds_and_writes_a_configuration(tmp_path, capsys, monkeypatch):
    from spherenet.experiments import runner

    monkeypatch.setattr(runner.Here, "__call__", lambda self, arguments, log: main(arguments))
    options = ["--widths", 4, 4, 4, "--batch-size", 16, "--iterations", 30, "--eval-every", 30,
               "--eval-batch-size", 500, "--learning-rate", 0.01]  # fmt: skip
    arguments = ["tune", *options, "--try-operators", "sigmoid", "none", "--try-k", 0.3, 5.0, "--number-of-folds", 2,
                 "--output", tmp_path / "tune", "--best", tmp_path / "best.yaml", "--json"]  # fmt: skip
    assert spherenet(*arguments) == 0
    said = capsys.readouterr().out
    result = json.loads(said[said.index('{\n  "scores"') :])
    means = {row["setting"]: row["mean"] for row in result["scores"]}
    assert result["best"] == max(means, key=means.get)
    names = {path.name for path in (tmp_path / "tune").iterdir()}
    assert names == {"sigmoid_k0.3_softmax", "sigmoid_k5_softmax", "none_softmax"}
    folds = [RunDirectory.open(run).config["pictures"] for run in (tmp_path / "tune").glob("*/fold-*")]
    assert folds == [{"train": 2000, "test": 2000}] * 6
    assert spherenet("train", "--config", tmp_path / "best.yaml", "--iterations", 1, "--output", tmp_path / "run") == 0
    assert RunDirectory.open(tmp_path / "run").config["pictures"] == {"train": 4000, "test": 1000}


def test_folds_share_no_pictures_and_are_stratified():
    import torch

    from spherenet.data import load_dataset
    from spherenet.training.build import in_folds

    dataset = load_dataset("mnist5k")
    parts = [in_folds(dataset, 3, fold) for fold in range(3)]
    seen = torch.cat([part.test._positions for part in parts])
    assert sorted(seen.tolist()) == list(range(4000))
    for part in parts:
        assert len(part.train) + len(part.test) == 4000
        counts = part.test.labels.bincount()
        assert counts.max() - counts.min() <= 1


def test_fewer_training_pictures_are_stratified_and_the_test_pictures_stay():
    from spherenet.data import load_dataset
    from spherenet.training.build import with_fewer

    dataset = load_dataset("mnist5k")
    few = with_fewer(dataset, 37)
    counts = few.train.labels.bincount(minlength=10)
    assert len(few.train) == len(set(few.train._positions.tolist())) == 37
    assert counts.max() - counts.min() <= 1
    assert few.test is dataset.test
    for wrong in (9, 4001):
        with pytest.raises(ValueError, match=f"from 10, one of each class, to the 4000 there are, got {wrong}"):
            with_fewer(dataset, wrong)


@pytest.mark.parametrize(
    ("options", "last"),
    [({}, 5.0), ({"lambda_floor": 20.0}, 20.0), ({"lambda_floor": 150.0}, 150.0), ({"annealing": False}, 0.0)],
)
def test_annealing_ends_where_it_is_told(options, last):
    from spherenet.data import load_dataset
    from spherenet.training.build import build_model, iteration_setter

    dataset = load_dataset("mnist5k")
    config = TrainConfig(loss="ga-linear", iterations=600, widths=[4, 4, 4], lambda_floor_at=0.5, **options)
    model = build_model(config, dataset)
    set_iteration = iteration_setter(config, model)
    set_iteration(600)
    assert model.criterion.current_lambda == last
    set_iteration(299)
    assert model.criterion.current_lambda > last or last in (0.0, 150.0)
