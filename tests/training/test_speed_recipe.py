"""The speed recipe: Muon in a run, learning rates, resumed runs, initial weights, test-time augmentation, --recipe."""

import json

import pytest
import torch
from torch import nn

import spherenet as sn
from command_line import one_sentence, spherenet
from spherenet.optim import MixedOptimizer
from spherenet.training import StopSignals, TrainConfig
from spherenet.training.build import build_model
from spherenet.training.optimizers import build_optimizer, set_learning_rates
from spherenet.training.recipes import RECIPES, recipe
from training_problem import StopAt, assert_equal, model, rows, run, trainer, weights

MUON = {"optimizer": "muon:momentum=0.6", "learning_rate": 0.1, "schedule": "linear", "milestones": None}
SMALL = ["--widths", "4", "4", "4", "--train-images", "200", "--batch-size", "50", "--eval-batch-size", "500",
         "--threads", "1"]  # fmt: skip


def test_groups_have_the_rates_of_the_recipe():
    network = sn.create_model("air", widths=(8, 8, 16))
    config = TrainConfig(**{**RECIPES["speed"], "batch_size": 100, "epochs": None, "iterations": 80})
    optimizer = build_optimizer(config, network)
    assert isinstance(optimizer, MixedOptimizer)
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    groups = {names[id(group["params"][0])]: group for group in optimizer.param_groups}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == sum(
        parameter.requires_grad for parameter in network.parameters()
    )
    filters, head = groups["features.groups.0.first.weight"], groups["head.weight"]
    whitening, rest = groups["features.whitening.bias"], groups["features.groups.0.first_norm.bias"]
    assert (filters["algorithm"], filters["momentum"], filters["norm"]) == ("muon", 0.6, "frobenius")
    assert (head["algorithm"], head["momentum"], head["nesterov"]) == ("sgd", 0.85, True)
    assert len(filters["params"]) == 6
    for step, factor, early in ((0, 1, 1), (15, 65 / 80, 0.5), (30, 50 / 80, 0), (79, 1 / 80, 0)):
        set_learning_rates(optimizer, config, step)
        assert filters["lr"] == pytest.approx(0.24 * factor)
        assert head["lr"] == pytest.approx(67 / 256 / 16 * factor)
        assert rest["lr"] == pytest.approx(5.3 * factor)
        assert whitening["lr"] == pytest.approx(5.3 * early)
    # The decay of a step at the full rate is 2e-6 per image, whatever the rate.
    for group in (head, rest, whitening):
        assert group["rate"] * group["weight_decay"] == pytest.approx(2e-6 * 100)


def test_linear_schedule_falls_to_zero():
    config = TrainConfig(iterations=10, learning_rate=2.0, schedule="linear", warmup=2)
    assert [config.learning_rate_at(step) for step in range(10)] == pytest.approx(
        [1.0, 2.0, 2.0, 1.75, 1.5, 1.25, 1.0, 0.75, 0.5, 0.25]
    )


@pytest.mark.parametrize("operator", [None, "cosine"])
def test_resumed_run_with_muon_is_bit_identical(tmp_path, operator):
    whole, _ = run(tmp_path / "whole", model(operator=operator), **MUON)
    path, stop = tmp_path / "resumed", StopSignals()
    run(path, model(operator=operator), stop=stop, reporter=StopAt(5, stop), **MUON)
    prepared = trainer(path, model(operator=operator), **MUON)
    assert prepared.resume() == []
    prepared.train(StopSignals())
    assert_equal(weights(whole), weights(prepared))
    assert rows(tmp_path / "whole") == rows(path)


def test_training_with_muon_keeps_the_norms_of_filters_and_learns(tmp_path):
    prepared, outcome = run(tmp_path, iterations=40, eval_every=40, **MUON)
    for layer in prepared.model.features.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            assert layer.weight.norm().item() == pytest.approx(len(layer.weight) ** 0.5, rel=1e-5)
    assert outcome.accuracy > 0.8


@pytest.mark.parametrize("operator", [None, "cosine"])
def test_dirac_start_copies_channels(tmp_path, operator):
    dataset = trainer(tmp_path, **MUON).dataset
    config = TrainConfig(model="cnn-9", operator=operator, widths=[4, 4, 8], initialization="dirac")
    network = build_model(config, dataset)
    convolutions = [layer for layer in network.features.modules() if isinstance(layer, nn.Conv2d)]
    for layer in convolutions:
        expected = torch.zeros_like(layer.weight[: layer.in_channels])
        expected[torch.arange(layer.in_channels), torch.arange(layer.in_channels), 1, 1] = 1
        assert torch.equal(layer.weight[: layer.in_channels], expected)
        assert layer.weight[layer.in_channels :].abs().sum() > 0 or layer.in_channels == layer.out_channels


def test_last_evaluation_reports_both_accuracies(tmp_path):
    _, outcome = run(tmp_path, tta="mirror-shift")
    tests = [row for row in rows(tmp_path) if row["split"] == "test"]
    assert "tta_accuracy" not in tests[0]
    assert tests[-1]["tta_accuracy"] == outcome.tta_accuracy
    assert outcome.tta_accuracy is not None
    resumed = trainer(tmp_path, tta="mirror-shift")
    resumed.resume()
    assert resumed.train(StopSignals()).tta_accuracy == outcome.tta_accuracy
    assert run(tmp_path / "without")[1].tta_accuracy is None


def test_recipe_trains_evaluates_and_can_be_overridden(tmp_path, capsys):
    options = ["--recipe", "speed", "--data", "mnist5k", *SMALL, "--output", tmp_path / "run"]
    assert spherenet("train", *options, "--iterations", "4", "--seed", "5") == 0
    assert "with test-time augmentation" in capsys.readouterr().out
    config = json.loads((tmp_path / "run" / "config.json").read_text())["train"]
    assert (config["model"], config["optimizer"], config["iterations"], config["epochs"]) == (
        "air",
        "muon:momentum=0.6",
        4,
        None,
    )
    assert (config["seed"], config["learning_rate"], config["batch_size"]) == (5, 0.24, 50)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert spherenet("evaluate", tmp_path / "run", "--tta", "mirror-shift", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["accuracy"], result["tta_accuracy"]) == (summary["accuracy"], summary["tta_accuracy"])


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_valid_and_shown(name, capsys):
    TrainConfig(**recipe(name))
    assert spherenet("train", "--recipe", name, "--print-config") == 0
    shown = capsys.readouterr().out
    assert f"model: {RECIPES[name]['model']}" in shown


def test_unknown_recipe_is_refused(capsys):
    assert spherenet("train", "--recipe", "sped") == 2
    message = capsys.readouterr().err
    assert one_sentence(message)
    assert "--recipe must be one of 'speed', 'paper-cifar', 'paper-imagenet', got 'sped'. Did you mean" in message


def test_sharded_heads_have_no_test_time_augmentation():
    with pytest.raises(ValueError, match=r"^tta must be none with --shard-head"):
        TrainConfig(shard_head=True, tta="mirror")
