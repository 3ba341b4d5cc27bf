"""The experiments of the paper, and the runner: skipping, resuming and failing jobs."""

import re
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from command_line import command, in_other_processes, one_sentence, spherenet
from spherenet.cli import main
from spherenet.cli.options import config_from
from spherenet.cli.train import train_parser
from spherenet.data import load_dataset
from spherenet.runs import RunDirectory
from spherenet.training import Choice, TrainConfig, build
from spherenet_paper.cli.experiments import TUNE_INSTEAD, tune_parser
from spherenet_paper.experiments import EXPERIMENTS, find_experiment
from spherenet_paper.experiments.experiment import PRESETS, paper_margin
from spherenet_paper.experiments.jobs import (
    Job,
    command_line,
    create_jobs,
    select_cells,
)
from spherenet_paper.experiments.runner import GridReporter, LocalLauncher, run_jobs
from spherenet_paper.report.grids import grid_of_runs

CELL_COUNTS = {"table1": 48, "table2": 36, "table3": 6, "table4": 10, "fig-convergence-resnet": 8,
              "fig-convergence-plain": 7, "fig-width": 8, "fig-ultradeep": 6, "learnable": 2, "fig-spherenorm": 40,
              "s-softmax": 6, "weight-decay": 4, "imagenet": 3, "magnitudes": 5, "margin-schedule": 22,
              "margin-forms": 43, "headline": 12, "fig-protocol": 4}  # fmt: skip


def run_in_process(arguments, log):
    """Run a job in this process, which saves importing torch."""
    return main(arguments)


@pytest.mark.parametrize("id", EXPERIMENTS)
def test_paper_preset_has_all_cells_with_the_papers_settings(id):
    cells = find_experiment(id).cells("paper")
    assert len(cells) == CELL_COUNTS[id]
    assert len({cell.name for cell in cells}) == len(cells)
    for cell in cells:
        if id != "imagenet":
            config = cell.config
            assert (config.iterations, config.milestones, config.optimizer) == (64_000, [34_000, 54_000], "adam")
            assert config.learning_rate == (1e-4 if cell.starts_from else 1e-3)


CENTERED = {"centered_weight": "weight", "centered_patch": "patch", "centered_w-cosine": "weight"}


def test_experiments_are_centered_in_our_own_cells_only():
    for experiment in EXPERIMENTS.values():
        for preset in PRESETS:
            for cell in experiment.cells(preset):
                own = CENTERED.get(cell.name.rpartition("_")[0], "none")
                assert cell.config.center == own, cell.name


def test_fig_spherenorm_compares_normalizations_at_the_same_batch_sizes():
    cells = {cell.name: cell.config for cell in find_experiment("fig-spherenorm").cells("cpu")}
    for size in (2, 4, 8, 16):
        for row in ("batchnorm", "groupnorm", "spherenorm", "centered_weight", "centered_patch"):
            assert cells[f"{row}_{size}"].batch_size == size
        assert cells[f"groupnorm_{size}"].group_norm == 8
        spherenorm = cells[f"spherenorm_{size}"]
        assert cells[f"centered_patch_{size}"] == replace(spherenorm, center="patch")
        assert cells[f"centered_weight_{size}"] == replace(spherenorm, center="weight")


def test_margin_forms_vary_one_option_at_a_time():
    cells = {cell.name: cell.config for cell in find_experiment("margin-forms").cells("cpu")}
    assert len(cells) == 43
    for name, loss in (("linear", "ga-linear"), ("cosine", "ga-cosine")):
        for scale, value in (("norm", "norm"), ("s10", 10.0), ("s30", 30.0)):
            without = cells[f"{name}_{scale}_m1"]
            options = {"m": 1, "margin_gradient": "full", "scale": value}
            assert (without.choice("loss"), without.annealing) == (Choice(loss, options), False)
            for margin, m in (("m1.2", 1.2), ("m1.5", 1.5), ("m4-annealed", 4.0)):
                full, detached = (cells[f"{name}_{scale}_{margin}_{gradient}"] for gradient in ("full", "detached"))
                assert detached == replace(full, loss=full.loss.replace("=full", "=detached"))
                assert full == replace(without, loss=without.loss.replace("m=1,", f"m={m:g},"), annealing=m == 4.0)


@pytest.mark.parametrize("id", EXPERIMENTS)
def test_long_preset_uses_one_precision_and_states_its_claims(id):
    """Runs that are compared have the same precision, length and size."""
    experiment = find_experiment(id)
    cells = experiment.cells("long")
    assert bool(cells) == ("long" in experiment.presets)
    assert len({cell.name for cell in cells}) == len(cells)
    for cell in cells:
        assert (cell.config.data, cell.config.precision, cell.config.optimizer) == ("cifar10", "bfloat16", "adam")
    by_name = {cell.name: cell.config for cell in cells}
    for claim in experiment.claims_about(cells):
        for first, second in claim.pairs:
            for name in ("model", "iterations", "batch_size", "image_size", "widths", "milestones", "eval_every"):
                assert getattr(by_name[first], name) == getattr(by_name[second], name), (first, second, name)


def test_runs_of_fig_protocol_are_evaluated_in_four_ways_at_the_initial_learning_rate():
    for cell in find_experiment("fig-protocol").cells("long"):
        assert cell.config.bn_eval == ["running", "lagging", "batch", "precise"]
        assert cell.config.learning_rate_at(cell.config.iterations - 1) == cell.config.learning_rate


def test_paper_values_are_in_the_papers_source():
    """Compare with the LaTeX source of the paper if it is available."""
    source = Path(__file__).parents[2].parent / "shared" / "paper" / "deep-hyperspherical-learning.tex"
    if not source.exists():
        pytest.skip("the source of the paper is not available")
    text = source.read_text()
    for id in ("table1", "table2", "table3", "table4"):
        for cell in find_experiment(id).cells("paper"):
            assert f"{cell.paper:g}" in text, cell.name  # 91.70 is formatted as 91.7


@pytest.mark.parametrize("id", EXPERIMENTS)
def test_claims_compare_existing_cells(id):
    experiment = find_experiment(id)
    names = {cell.name for preset in ("paper", "long") for cell in experiment.cells(preset)}
    for claim in experiment.claims:
        assert claim.pairs
        for pair in claim.pairs:
            assert names.issuperset(pair), pair
    assert experiment.claims_about(experiment.cells("smoke")) is not None
    assert f"spherenet reproduce {id}" in experiment.description


@pytest.mark.parametrize("id", EXPERIMENTS)
@pytest.mark.parametrize("preset", PRESETS)
def test_command_line_of_a_cell_produces_its_configuration(id, preset):
    parser = train_parser()
    for cell in find_experiment(id).cells(preset):
        assert config_from(parser.parse_args(command_line(cell.config)), TrainConfig) == cell.config


@cache
def load_few(name, folder, **options):
    """Load every fifth digit for training and every tenth for testing; digits are sorted by class."""
    dataset = load_dataset(name, folder, **options)
    if name != "mnist5k":
        return dataset
    train, test = (part.subset(torch.arange(0, len(part), n)) for part, n in ((dataset.train, 5), (dataset.test, 10)))
    return replace(dataset, train=train, test=test)


@pytest.mark.parametrize("id", EXPERIMENTS)
def test_smoke_preset_runs_and_is_reported(id, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "load_dataset", load_few)  # grids in other processes load all digits
    experiment = find_experiment(id)
    cells = experiment.cells("smoke")
    folder = tmp_path / "smoke" / id
    results = run_jobs(create_jobs(cells, folder, range(1)), run_in_process, 1)
    assert [result.failure for result in results] == [None] * len(cells)
    grid = grid_of_runs(experiment, "smoke", folder)
    assert all(cell.runs for cell in grid.cells)
    assert spherenet("reproduce", id, "--preset", "smoke", "--output", tmp_path, "--page", tmp_path / "page.html") == 0
    assert (tmp_path / "page.html").stat().st_size > 1000


TINY = TrainConfig(iterations=2, batch_size=8, widths=[4, 4, 4], eval_every=2, eval_batch_size=500)


def test_finished_jobs_are_skipped_and_a_failing_job_does_not_stop_others(tmp_path):
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


def test_run_with_other_settings_is_rejected(tmp_path):
    job = Job("one", tmp_path / "one", TINY)
    assert run_jobs([job], run_in_process, 1)[0].failure is None
    other = Job("one", tmp_path / "one", replace(TINY, learning_rate=0.1))
    assert "was run with --learning-rate 0.001, not 0.1" in run_jobs([other], run_in_process, 1)[0].failure


def test_unfinished_job_is_resumed(tmp_path):
    job = Job("one", tmp_path / "one", TINY)
    assert run_jobs([job], run_in_process, 1)[0].failure is None
    (job.folder / "summary.json").unlink()
    assert job.arguments()[:2] == ["train", "--resume"]
    assert run_jobs([job], run_in_process, 1)[0].failure is None


def test_run_in_use_by_another_process_is_waited_for(tmp_path):
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
            # Stop while it waits; before the first launch it would not start at all.
            interrupted = pool.submit(run_jobs, [job], launch, 1, stopped=lambda: len(codes) > 2).result(120)
            assert "in use by another process" in interrupted[0].failure


def test_gpus_are_distributed_over_runs(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    devices = []

    def run(self, command, environment, log):
        devices.append(environment.get("CUDA_VISIBLE_DEVICES"))
        if len(devices) == 1:
            self(["train"], log)  # while the first run is active
        return 0

    monkeypatch.setattr(LocalLauncher, "_run", run)
    LocalLauncher(processes=2, gpus=["4", "5", "7"], at_once=2)(["train"], tmp_path / "log")
    assert devices == ["4,5", "7,4"]
    assert LocalLauncher()(["train"], tmp_path / "log") == 0
    assert devices[-1] is None


def test_fine_tuning_starts_after_its_source(tmp_path):
    order = []

    class OrderRecorder(GridReporter):
        def running(self, job):
            order.append(job.name)

    cells = [cell for cell in find_experiment("s-softmax").cells("smoke") if cell.name in ("fine-tuned", "softmax")]
    results = run_jobs(create_jobs(cells[::-1], tmp_path, range(1)), run_in_process, 2, OrderRecorder())
    assert [result.failure for result in results] == [None, None]
    assert order == ["softmax seed 0", "fine-tuned seed 0"]


def test_selecting_a_cell_includes_the_cell_it_starts_from():
    cells = find_experiment("s-softmax").cells("smoke")
    assert [cell.name for cell in select_cells(cells, ["fine-tuned"])] == ["softmax", "fine-tuned"]
    assert len(select_cells(cells, [])) == 6


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_killed_grid_is_resumed(tmp_path, number, monkeypatch, capsys):
    """On SIGTERM the runs save and exit, on SIGKILL they continue alone. A second call finishes every cell."""
    arguments = ["reproduce", "weight-decay", "--preset", "smoke", "--output", tmp_path, "--jobs", 2]
    running = subprocess.Popen(command(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    for line in running.stderr:
        if re.search(": (begins|started)", line):
            break
    time.sleep(1)
    running.send_signal(number)
    running.stderr.read()
    running.stderr.close()
    assert running.wait(240) in (130, -number)
    monkeypatch.setattr(LocalLauncher, "__call__", lambda self, arguments, log: main(arguments))
    code, (output, errors) = spherenet(*arguments), capsys.readouterr()
    assert code == 0, errors
    assert "cosine" in output
    runs = list((tmp_path / "smoke" / "weight-decay").glob("*/seed-0"))
    assert len(runs) == 4
    assert all(RunDirectory.open(run).finished for run in runs)


def test_runs_of_a_grid_can_be_distributed(tmp_path):
    only = ["reproduce", "weight-decay", "--preset", "smoke", "--only", "cosine_free"]
    done = in_other_processes(*only, "--processes", 2, "--output", tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    run = RunDirectory.open(tmp_path / "smoke" / "weight-decay" / "cosine_free" / "seed-0")
    assert run.finished
    assert run.config["processes"] == 2


INVALID = {
    "id": (["reproduce", "table5"], r"id must be one of .* Did you mean 'table\d'\?"),
    "no id": (["reproduce"], "ID must be the name of an experiment"),
    "cell": (["reproduce", "table1", "--only", "cosin"], "--only must be one of .* Did you mean 'cosine"),
    "seeds": (["reproduce", "table1", "--seeds", "0"], "--seeds must be at least 1, got 0"),
    "no data": (
        ["reproduce", "imagenet"],
        "--preset must be paper or smoke for imagenet, got cpu; try spherenet",
    ),
    "folds": (["tune", "--number-of-folds", "1"], "--number-of-folds must be at least 2"),
    "operator": (["tune", "--try-operators", "cos"], "--try-operators must be one of"),
    "fixed operator": (
        ["tune", "--operator", "linear"],
        "--operator must be left out of tune, which has --try-operators",
    ),
    "fixed loss": (["tune", "--loss", "a"], "--loss must be left out of tune, which has --try-losses, got a."),
    "fold": (["tune", "--set", "fold=1"], "fold must be left out of tune"),
    "k that is not finite": (["tune", "--try-operators", "sigmoid:k=nan"], "--try-operators sigmoid: k must be"),
    "k without a sigmoid": (["tune", "--try-operators", "cosine:k=1"], "--try-operators cosine has no option 'k'"),
    "s without a use": (["tune", "--try-losses", "softmax:s=3"], "--try-losses softmax has no option 's'"),
    "loss": (["tune", "--try-losses", "w"], "--try-losses must be one of"),
}


def test_help_of_tune_does_not_list_options_that_it_refuses():
    text = tune_parser().format_help()
    assert "--try-operators" in text
    assert "--learning-rate" in text
    assert not [option for option in TUNE_INSTEAD if re.search(rf"--{option}(?![-\w])", text)]


@pytest.mark.parametrize("case", INVALID)
def test_invalid_input_exits_with_one_sentence(case, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments, message = INVALID[case]
    assert spherenet(*arguments) == 2
    message_shown = capsys.readouterr().err
    assert re.search(message, message_shown)
    assert one_sentence(message_shown)
    assert list(tmp_path.iterdir()) == []


def test_list_shows_experiments_and_cells(capsys):
    assert spherenet("reproduce", "--list") == 0
    output = capsys.readouterr().out
    assert all(id in output for id in EXPERIMENTS)
    assert spherenet("reproduce", "table3", "--list", "--preset", "paper") == 0
    output = capsys.readouterr().out
    assert "sigmoid-0.1" in output
    assert "86.29" in output
    assert "spherenet reproduce table3" in output


@pytest.mark.parametrize(
    ("options", "last"),
    [({}, 5.0), ({"lambda_floor": 20.0}, 20.0), ({"lambda_floor": 150.0}, 150.0), ({"annealing": False}, 0.0)],
)
def test_annealing_ends_at_its_floor(options, last):
    from spherenet.training.build import build_model, lambda_setter

    dataset = load_dataset("mnist5k")
    options = {**paper_margin("ga-linear"), "lambda_floor_at": 0.5, **options}
    config = TrainConfig(iterations=600, widths=[4, 4, 4], **options)
    model = build_model(config, dataset)
    set_iteration = lambda_setter(config, model)
    set_iteration(600)
    assert model.criterion.lambda_ == last
    set_iteration(299)
    assert model.criterion.lambda_ > last or last in (0.0, 150.0)
