"""BatchNorm protocols of evaluations: explicit oracles of the statistics, unchanged training, resuming, processes."""

import json

import pytest
import torch
from torch import nn

from command_line import TINY, in_other_processes, spherenet
from made_runs import make_run
from spherenet.errors import CheckpointError
from spherenet.report.runs import read_run
from spherenet.runs import RunDirectory
from spherenet.runs.checkpoints import load_checkpoint
from spherenet.training import StopSignals, TrainConfig, evaluate
from spherenet.training.evaluation import mixed_batches
from spherenet.training.run_export import model_card
from spherenet.training.saved_runs import load_run
from training_problem import SINGLE, StopAt, assert_equal, model, rows, run, trainer, weights

ALL = ["running", "lagging", "batch", "precise"]


class Network(nn.Module):
    """A convolution, BatchNorm of 1, 2 or 3 dimensions, and a classifier, with a loss as in `Classifier`."""

    def __init__(self, dims=2):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.dims = nn.Conv2d(1, 5, 3), dims
        self.norm = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dims](5, momentum=0.3)
        self.second = nn.Conv2d(5, 4, 3)
        self.norm2 = nn.BatchNorm2d(4)
        self.last = nn.Linear(4, 3)

    def features(self, images):
        hidden = self.first(images)
        shape = {1: (*hidden.shape[:2], -1), 2: hidden.shape, 3: (*hidden.shape[:3], -1, 1)}[self.dims]
        return hidden.reshape(shape), hidden.shape

    def forward(self, images, labels=None):
        hidden, shape = self.features(images)
        hidden = self.norm2(self.second(torch.relu(self.norm(hidden).reshape(shape))))
        scores = self.last(hidden.mean((2, 3)))
        return scores if labels is None else (nn.functional.cross_entropy(scores, labels), scores)


def evaluate_with(network, statistics, test):
    """Evaluate a copy of a network after its running statistics were replaced: the oracle of a protocol."""
    copy = Network(network.dims)
    copy.load_state_dict(network.state_dict())
    for name, (mean, variance) in statistics.items():
        layer = copy.get_submodule(name)
        layer.running_mean.copy_(mean)
        layer.running_var.copy_(variance)
    return evaluate(copy, test, 3, SINGLE, batch_size=17)


def moments(inputs):
    """Return mean and biased variance per channel by definition."""
    values = inputs.detach().double().movedim(1, 0).flatten(1)
    mean = values.mean(1)
    return mean, (values - mean[:, None]).square().mean(1)


@pytest.mark.parametrize(("dims", "variance"), [(1, 1.0), (2, 0.0), (3, 1.0)])
def test_lagging_statistics_follow_the_recursion(tmp_path, dims, variance):
    """Oracle: m ← 0.9m + 0.1μ and v ← 0.9v + 0.1σ² over the inputs of the layer, starting at 0 and `variance`."""
    network = Network(dims)
    seen = []

    def record(layer, inputs):
        if layer.training:
            seen.append(inputs[0].clone())

    network.norm.register_forward_pre_hook(record)
    options = {"bn_eval": ["lagging"], "bn_lag_momentum": 0.9, "bn_lag_variance": variance}
    prepared, _ = run(tmp_path, network, iterations=6, eval_every=6, **options)
    assert len(seen) == 6
    mean, spread = torch.zeros(5).double(), torch.full((5,), variance).double()
    for inputs in seen:
        batch_mean, batch_variance = moments(inputs)
        mean, spread = 0.9 * mean + 0.1 * batch_mean, 0.9 * spread + 0.1 * batch_variance
    state = prepared.protocols.state_dict()
    torch.testing.assert_close(state["norm.mean"].double(), mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state["norm.variance"].double(), spread, rtol=1e-5, atol=1e-6)
    statistics = {name: (state[f"{name}.mean"], state[f"{name}.variance"]) for name in ("norm", "norm2")}
    expected = evaluate_with(network, statistics, prepared.dataset.test)
    row = [row for row in rows(tmp_path) if row["split"] == "test"][-1]
    assert row["protocol"] == "lagging"
    assert (row["loss"], row["accuracy"]) == (expected.loss, expected.accuracy)


@pytest.mark.parametrize("images", [70, 33])
def test_precise_statistics_are_those_of_the_training_images(tmp_path, images):
    """Oracle: moments of all inputs of a layer, of batches that each layer normalizes by their own statistics."""
    network = Network()
    prepared, _ = run(tmp_path, network, iterations=4, eval_every=4, bn_eval=["precise"], bn_precise_images=images)
    copy = Network()
    copy.load_state_dict(network.state_dict())
    copy.train()
    first, second = [], []
    copy.norm.register_forward_pre_hook(lambda layer, inputs: first.append(inputs[0]))
    copy.norm2.register_forward_pre_hook(lambda layer, inputs: second.append(inputs[0]))
    train, used = prepared.dataset.train, []
    for _, indices in mixed_batches(len(train), 16, SINGLE, images):
        used += indices.tolist()
        batch = next(train.batches([(0, indices)], device=SINGLE.device, augmentation=None))
        copy(batch.images)
    assert len(set(used)) == images == len(used)
    statistics = {"norm": moments(torch.cat(first)), "norm2": moments(torch.cat(second))}
    expected = evaluate_with(network, statistics, prepared.dataset.test)
    row = [row for row in rows(tmp_path) if row["split"] == "test"][-1]
    assert row["loss"] == pytest.approx(expected.loss, rel=1e-5)
    assert row["accuracy"] == expected.accuracy


def test_batch_protocol_uses_the_statistics_of_each_test_batch(tmp_path):
    network = Network()
    prepared, _ = run(tmp_path, network, iterations=4, eval_every=4, bn_eval=["batch"])
    copy = Network()
    copy.load_state_dict(network.state_dict())
    copy.train()
    test, loss, sizes = prepared.dataset.test, 0.0, []
    for _, indices in mixed_batches(40, 17, SINGLE):
        batch = next(test.batches([(0, indices)], device=SINGLE.device, augmentation=None))
        sizes.append(len(indices))
        loss += copy(batch.images, batch.labels)[0].item() * len(indices)
    assert sizes == [20, 20]
    row = [row for row in rows(tmp_path) if row["split"] == "test"][-1]
    assert row["loss"] == pytest.approx(loss / 40, rel=1e-6)


def test_training_and_running_rows_are_the_same_with_other_protocols(tmp_path):
    plain, first = run(tmp_path / "plain")
    several, second = run(tmp_path / "several", bn_eval=ALL)
    assert_equal(weights(plain), weights(several))
    assert (first.best_step, first.best_accuracy) == (second.best_step, second.best_accuracy)
    kept = [row for row in rows(tmp_path / "several") if row.get("protocol", "running") == "running"]
    assert kept == rows(tmp_path / "plain")
    named = [row["protocol"] for row in rows(tmp_path / "several") if row["split"] == "test"]
    assert named == 2 * ALL
    losses = {row["protocol"]: row["loss"] for row in rows(tmp_path / "several") if row["split"] == "test"}
    assert len(set(losses.values())) == 4


def test_skipped_step_leaves_the_lagging_statistics_alone(tmp_path):
    prepared = trainer(tmp_path, on_nan="skip", bn_eval=["lagging"], iterations=2)
    factors, states = [float("nan"), 0.0], [copied(prepared)]
    prepared.penalty = lambda network: factors.pop(0) * sum(parameter.sum() for parameter in network.parameters())
    prepared.reporter.stepped = lambda *_: states.append(copied(prepared))
    prepared.train(StopSignals())
    assert_equal(states[0], states[1])
    assert any(not torch.equal(states[1][name], states[2][name]) for name in states[1])


def copied(prepared):
    return {name: tensor.clone() for name, tensor in prepared.protocols.state_dict().items()}


def test_resumed_run_has_the_same_statistics_and_rows(tmp_path):
    options = {"bn_eval": ["batch", "lagging", "precise", "running"], "bn_lag_momentum": 0.9}
    complete, _ = run(tmp_path / "complete", **options)
    stop = StopSignals()
    run(tmp_path / "run", stop=stop, reporter=StopAt(7, stop), **options)
    resumed = trainer(tmp_path / "run", **options)
    assert resumed.resume() == []
    resumed.run_directory.cut_back(resumed.step)
    resumed.train(StopSignals())
    assert_equal(weights(complete), weights(resumed))
    assert_equal(complete.protocols.state_dict(), resumed.protocols.state_dict())
    assert rows(tmp_path / "complete") == rows(tmp_path / "run")


def test_checkpoints_without_or_with_other_statistics(tmp_path):
    run(tmp_path)
    added = trainer(tmp_path, bn_eval=["lagging"])
    assert any("has no lagging BatchNorm statistics: they start here" in message for message in added.resume())
    name = next(iter(added.protocols.state_dict()))
    for wrong in ({}, {name: torch.zeros(99)}, {name: torch.zeros(4, dtype=torch.int64)}):
        state = {**added.protocols.state_dict(), "further": torch.zeros(1), **wrong}
        if not wrong:
            del state[name]
        with pytest.raises(CheckpointError, match=f"its lagging {name} is missing or another one"):
            added.protocols.load_state_dict(state, "the checkpoint")


def test_network_without_batch_norm_is_told_that_protocols_do_not_apply(tmp_path):
    messages = []
    reporter = StopAt(None, None)
    reporter.warned = messages.append
    run(tmp_path / "run", model(batch_norm=False), bn_eval=ALL, reporter=reporter)
    assert messages == ["bn_eval has no effect: the network has no BatchNorm layers with running statistics."]
    test = [row for row in rows(tmp_path / "run") if row["split"] == "test"]
    assert [(row["step"], "protocol" in row) for row in test] == [(6, False), (12, False)]
    run(tmp_path / "default", model(batch_norm=False), reporter=reporter)
    assert len(messages) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bn_eval": []}, "bn_eval must be different names of statistics, got none"),
        ({"bn_eval": ["batch", "batch"]}, "bn_eval must be different names of statistics, got batch batch"),
        ({"bn_eval": ["median"]}, "bn_eval must be one of running, lagging, batch, precise, got 'median'"),
        ({"bn_lag_momentum": 1.0}, "bn_lag_momentum must be at least 0 and below 1"),
        ({"bn_lag_momentum": float("nan")}, "bn_lag_momentum must be at least 0 and below 1"),
        ({"bn_lag_variance": -1.0}, "bn_lag_variance must be a finite number of at least 0"),
        ({"bn_precise_images": 0}, "bn_precise_images must be at least 1"),
    ],
)
def test_wrong_options_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**options)


def test_batches_of_one_image_have_no_statistics(tmp_path):
    with pytest.raises(ValueError, match="eval_batch_size must be at least 2 with batch in bn_eval, got 1"):
        trainer(tmp_path, bn_eval=["batch"], eval_batch_size=1)
    with pytest.raises(ValueError, match="bn_precise_images must be at least 2, two images per process, got 1"):
        trainer(tmp_path, bn_eval=["precise"], bn_precise_images=1)
    with pytest.raises(ValueError, match=r"batch_size must be at least 2 with feature_batch_norm \(two images per"):
        trainer(tmp_path, batch_size=1, feature_batch_norm=True)
    statistics = trainer(tmp_path, bn_eval=["batch"]).protocols
    with pytest.raises(ValueError, match="bn_eval must not have batch for fewer than 2 images, got 1"):
        statistics.require_batches(range(1))


def test_two_processes_evaluate_all_protocols_and_save_the_statistics_of_the_main_one(tmp_path):
    options = [*TINY, "--set", f"bn_eval=[{', '.join(ALL)}]", "bn_lag_momentum=0.5"]
    done = in_other_processes("train", *options, "--output", tmp_path / "run", processes=2)
    assert done.returncode == 0, done.stderr
    test = [row for row in rows(tmp_path / "run") if row["split"] == "test"]
    assert [row["protocol"] for row in test] == 2 * ALL
    assert {row["count"] for row in test} == {1000}
    saved = load_checkpoint(RunDirectory(tmp_path / "run").checkpoints.paths()[-1])
    assert {name.rpartition(".")[2] for name in saved.tensors["lagging"]} == {"mean", "variance"}


def test_reports_and_cards_do_not_mix_protocols(tmp_path, capsys):
    path = tmp_path / "run"
    options = [*TINY, "--set", "bn_eval=[batch, running]", "probes=false"]
    assert spherenet("train", *options, "--output", path) == 0
    test = {name: [row for row in rows(path) if row.get("protocol") == name] for name in ("batch", "running")}
    reported = read_run(path)
    assert reported.curve("test", "accuracy").values == [row["accuracy"] for row in test["batch"]]
    assert reported.curve("test", "accuracy", "running").values == [row["accuracy"] for row in test["running"]]
    summary = json.loads((path / "summary.json").read_text())
    assert (summary["protocol"], summary["accuracy"]) == ("batch", test["batch"][-1]["accuracy"])
    card = model_card(load_run(path, "last"))
    assert card.accuracy == test["running"][-1]["accuracy"]  # a saved model has the running statistics
    capsys.readouterr()
    assert spherenet("report", path, "--markdown", tmp_path / "r.md", "-o", tmp_path / "r.html") == 0
    shown = capsys.readouterr().out
    assert "BatchNorm statistics" in shown
    final = [f"{test[name][-1]['accuracy']:.2%}" for name in ("batch", "running")]
    lines = (tmp_path / "r.md").read_text().splitlines()
    assert f"| run | {final[0]} | {final[1]} |" in lines
    assert all(value in shown for value in final)
    assert "Final test accuracy by BatchNorm statistics" in (tmp_path / "r.html").read_text()


def test_runs_of_earlier_versions_have_no_table_of_protocols(tmp_path, capsys):
    assert spherenet("report", make_run(tmp_path / "run", [0.1, 0.2])) == 0
    assert "BatchNorm statistics" not in capsys.readouterr().out


def test_mixed_batches_contain_each_image_once():
    """The order is random, so that a split sorted by class does not give batches of one class."""
    order = [indices for _, indices in mixed_batches(103, 10, SINGLE)]
    assert sorted(torch.cat(order).tolist()) == list(range(103))
    assert {len(indices) for indices in order} == {10, 11}
    assert order[0].tolist() != sorted(order[0].tolist())
