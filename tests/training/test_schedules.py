"""Learning rate schedules, epochs, batch sizes that fit the data, AdamW and early stopping."""

import math
from dataclasses import replace

import pytest
import torch

from command_line import TINY, in_other_processes, one_sentence, spherenet
from spherenet.runs import RunDirectory
from spherenet.training import Evaluation, StopSignals, TrainConfig
from spherenet.training.effects import options_without_effect
from spherenet.training.optimizers import build_optimizer
from spherenet.training.run import train
from training_problem import StopAt, assert_equal, model, rows, run, trainer, weights


def test_step_schedule_is_unchanged_without_warmup():
    config = TrainConfig(iterations=100, learning_rate=0.3, milestones=[40, 80])
    assert [config.learning_rate_at(step) for step in (0, 39, 40, 79, 80, 99)] == [
        0.3 * 0.1**power for power in (0, 0, 1, 1, 2, 2)
    ]


def test_cosine_schedule_with_warmup_follows_the_formula():
    config = TrainConfig(iterations=50, learning_rate=2.0, schedule="cosine", warmup=10)
    rates = [config.learning_rate_at(step) for step in range(50)]
    assert rates[:10] == [pytest.approx(2 * (step + 1) / 10) for step in range(10)]
    for step in range(10, 50):
        assert rates[step] == pytest.approx(1 + math.cos(math.pi * (step - 10) / 40))
    assert 0 < rates[-1] < rates[-2]


@pytest.mark.parametrize(
    ("milestones", "late"), [([40, 99], ""), ([40, 100], "100"), ([100, 340], "100 340"), ([], ""), (None, "")]
)
def test_milestones_beyond_the_run_are_named(milestones, late):
    messages = options_without_effect(TrainConfig(iterations=100, milestones=milestones))
    assert messages == ([f"--milestones {late} has no effect in a run of 100 iterations."] if late else [])


def test_warmup_of_the_step_schedule_precedes_the_milestones():
    config = TrainConfig(iterations=20, learning_rate=1.0, warmup=4, milestones=[10])
    expected = [0.25, 0.5, 0.75, 1.0, 1.0, 0.1]
    assert [config.learning_rate_at(step) for step in (0, 1, 2, 3, 9, 10)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "cosine", "milestones": [3]}, "milestones must be none with the schedule cosine"),
        ({"warmup": 1000}, "warmup must be less than the 1000 iterations, got 1000"),
        ({"warmup": -1}, "warmup must be a finite number of at least 0"),
        ({"epochs": 0.0}, "epochs must be greater than 0"),
        ({"epochs": math.nan}, "epochs must be at most"),
        ({"epochs": math.inf}, "epochs must be at most"),
        ({"patience": 0}, "patience must be at least 1"),
    ],
)
def test_contradictions_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**options)


@pytest.mark.parametrize(("epochs", "iterations"), [(1, 31), (2.5, 78), (0.01, 1)])
def test_epochs_give_the_iterations(epochs, iterations):
    fitted, messages = TrainConfig(epochs=epochs, batch_size=128).fitted_to(4000)
    assert (fitted.iterations, messages) == (iterations, [])
    assert fitted.fitted_to(4000)[0] == fitted


def test_epochs_and_other_iterations_are_rejected():
    with pytest.raises(ValueError, match="iterations must be left out with epochs, got 70"):
        TrainConfig(epochs=2, iterations=70).fitted_to(4000)
    with pytest.raises(ValueError, match="warmup must be less than the 62 iterations, got 62"):
        TrainConfig(epochs=2, warmup=62).fitted_to(4000)


@pytest.mark.parametrize("file", [False, True])
def test_both_typed_options_are_rejected(file, capsys, tmp_path):
    """1,000 is the default: only the command line knows that it was typed."""
    (tmp_path / "my.yaml").write_text("epochs: 3\niterations: 7\n")
    options = ["--config", tmp_path / "my.yaml"] if file else ["--epochs", 2, "--iterations", 1000]
    assert spherenet("train", *options, "--output", tmp_path / "run") == 2
    said = capsys.readouterr().err
    assert "--epochs must be left out with --iterations" in said or "--iterations must be left out with epochs" in said
    assert one_sentence(said)
    assert not (tmp_path / "run").exists()


def test_default_batch_fits_few_images_and_is_recorded(tmp_path, capfd):
    tiny = TINY[:4] + TINY[6:]  # without --batch-size
    options = [*tiny[:4], "--eval-every", 3, "--threads", 1, "--train-images", 20]
    output = tmp_path / "run"
    assert spherenet("train", *options, "--epochs", 3, "--output", output) == 0
    assert "the batch size is 20, the number of training images, instead of 128." in capfd.readouterr().err
    config = RunDirectory.open(output).config
    assert (config["train"]["batch_size"], config["train"]["iterations"]) == (20, 3)
    assert config["requested"] == {"batch_size": 128, "iterations": 1000}
    (output / "summary.json").unlink()
    assert spherenet("train", "--resume", output) == 0
    assert "batch size" not in capfd.readouterr().err
    assert spherenet("train", "--resume", output) == 0
    assert "already finished" in capfd.readouterr().out
    assert spherenet("train", *options, "--batch-size", 21, "--output", tmp_path / "other") == 2
    assert "--batch-size must be at most the 20 training images, got 21" in capfd.readouterr().err


def test_adamw_decays_plain_weights_only_and_apart_from_the_gradient():
    network = model(operator=None)
    optimizer = build_optimizer(TrainConfig(optimizer="adamw", weight_decay=0.5, learning_rate=0.1), network)
    groups = {group["name"]: group["weight_decay"] for group in optimizer.param_groups}
    assert groups == {"decay": 0.5, "no_decay": 0.0}
    before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    decayed = {id(parameter) for parameter in optimizer.param_groups[0]["params"]}
    assert decayed
    for name, parameter in network.named_parameters():
        factor = 1 - 0.1 * 0.5 if id(parameter) in decayed else 1  # with L2 inside Adam a step has the size 0.1
        torch.testing.assert_close(parameter.detach(), factor * before[name])


@pytest.mark.parametrize("options", [{"optimizer": "adamw"}, {"schedule": "cosine", "warmup": 3, "milestones": None}])
def test_new_options_resume_bit_for_bit(tmp_path, options):
    complete, _ = run(tmp_path / "complete", **options)
    stop = StopSignals()
    run(tmp_path / "run", stop=stop, reporter=StopAt(7, stop), **options)
    resumed = trainer(tmp_path / "run", **options)
    resumed.resume()
    resumed.run_directory.cut_back(resumed.step)
    resumed.train(StopSignals())
    assert_equal(weights(complete), weights(resumed))
    assert rows(tmp_path / "complete") == rows(tmp_path / "run")


PER_CLASS = torch.tensor([[14, 13, 13], [7, 6, 6], [20, 10, 10]])


def scripted(prepared, accuracies):
    """Replace the evaluations of a trainer by given accuracies, as a function of the step."""
    prepared.evaluate = lambda *_: Evaluation(1.0, accuracies[prepared.step], 40, PER_CLASS, None)
    return prepared


ACCURACIES = {2: 0.3, 4: 0.5, 6: 0.4, 8: 0.5, 10: 0.9, 12: 0.9}
"""The second evaluation is the best until the fifth; an equal accuracy is not better."""


@pytest.mark.parametrize(("patience", "last", "early"), [(1, 6, True), (2, 8, True), (3, 12, False), (None, 12, False)])
def test_patience_ends_the_run(tmp_path, patience, last, early):
    prepared = scripted(trainer(tmp_path, eval_every=2, patience=patience), ACCURACIES)
    outcome = prepared.train(StopSignals())
    assert (outcome.step, outcome.signal, outcome.stopped_early) == (last, None, early)
    assert RunDirectory(tmp_path).checkpoints.newest()[0].step == last


@pytest.mark.parametrize("stopped_at", [5, 7, 8])
def test_stopped_run_ends_at_the_same_step(tmp_path, stopped_at):
    complete = scripted(trainer(tmp_path / "complete", eval_every=2, patience=2), ACCURACIES)
    complete.train(StopSignals())
    stop = StopSignals()
    options = {"eval_every": 2, "patience": 2}
    scripted(trainer(tmp_path / "run", reporter=StopAt(stopped_at, stop), **options), ACCURACIES).train(stop)
    resumed = scripted(trainer(tmp_path / "run", **options), ACCURACIES)
    resumed.resume()
    outcome = resumed.train(StopSignals())
    assert (outcome.step, outcome.stopped_early) == (8, True)
    assert_equal(weights(complete), weights(resumed))


def test_two_processes_stop_early_at_the_same_step(tmp_path):
    """A learning rate of 0 keeps the accuracy: two evaluations after the first are not better."""
    options = [*TINY, "--iterations", 30, "--learning-rate", 0, "--no-batch-norm", "--patience", 2, "--batch-size", 33]
    done = in_other_processes("train", *options, "--output", tmp_path / "run", processes=2)
    assert done.returncode == 0, done.stderr
    summary = RunDirectory.open(tmp_path / "run").summary
    assert (summary["iterations"], summary["stopped_early"]) == (9, True)
    assert "done, stopped early without a better accuracy: 9 iterations" in done.stdout


def test_earlier_configurations_load():
    new = {"epochs", "schedule", "warmup", "patience", "bn_eval", "bn_lag_momentum", "bn_lag_variance",
           "bn_precise_images"}  # fmt: skip
    old = {name: value for name, value in TrainConfig(seed=3).as_dict().items() if name not in new}
    assert TrainConfig.from_dict(old) == TrainConfig(seed=3)


def test_fitted_configuration_is_used_by_the_library_too(tmp_path):
    config = TrainConfig(widths=[4, 4, 4], train_images=20, epochs=1, threads=1, probes=False)
    outcome = train(replace(config, eval_batch_size=500), tmp_path / "run")
    assert outcome.step == 1
