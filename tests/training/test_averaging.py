"""Moving average of weights: its formula, norms, BatchNorm statistics, resuming, several processes, other commands."""

import json

import pytest
import torch

import spherenet as sn
from command_line import TINY, in_other_processes, one_sentence, spherenet
from spherenet.errors import CheckpointError
from spherenet.models.transformer import EmbeddingMatrix
from spherenet.runs import RunDirectory
from spherenet.runs.checkpoints import load_checkpoint
from spherenet.training import Processes, StopSignals, TrainConfig, evaluate
from spherenet.training.averaging import WeightAverage
from spherenet.training.build import build_data
from spherenet.training.sharding import require_shardable
from training_problem import SINGLE, StopAt, assert_equal, model, rows, run, trainer, weights

DECAY = 0.8
MUON = {"optimizer": "muon:momentum=0.6", "learning_rate": 0.3, "schedule": "linear", "milestones": None}


def states_after_each_step(path, network, iterations=6, **options):
    """Train and return the trainer and the state dict after each step."""
    states = []
    prepared = trainer(path, network, iterations=iterations, eval_every=iterations, **options)
    update = prepared.average.update

    def record(step):
        states.append(weights(prepared))
        assert len(states) == step
        update(step)

    prepared.average.update = record
    prepared.train(StopSignals())
    return prepared, states


def last_tensors(path):
    return load_checkpoint(RunDirectory(path).checkpoints.paths()[-1]).tensors


def mean_by_definition(states, name):
    factors = torch.tensor([DECAY ** (len(states) - 1 - index) for index in range(len(states))], dtype=torch.float64)
    stacked = torch.stack([state[name].double() for state in states])
    return (stacked * factors.view(-1, *[1] * (stacked.dim() - 1))).sum(0) / factors.sum()


@pytest.mark.parametrize("operator", [None, "sigmoid"])
def test_average_is_the_weighted_mean_of_all_steps(tmp_path, operator):
    prepared, states = states_after_each_step(tmp_path, model(operator=operator), average_weights=DECAY)
    saved = last_tensors(tmp_path)
    assert_equal(saved["trained"], weights(prepared))
    assert set(saved["model"]) == set(states[0])
    assert any(name.endswith("running_mean") for name in saved["model"])
    for name, average in saved["model"].items():
        if average.is_floating_point():
            torch.testing.assert_close(average.double(), mean_by_definition(states, name), rtol=1e-5, atol=1e-6)
            assert average.numel() == 1 or not torch.equal(average, states[-1][name])
        else:
            assert torch.equal(average, states[-1][name])


def test_training_is_the_same_with_an_average_and_evaluations_use_it(tmp_path):
    plain, _ = run(tmp_path / "plain")
    averaged, _ = run(tmp_path / "averaged", average_weights=DECAY)
    assert_equal(weights(plain), weights(averaged))
    trained, other = rows(tmp_path / "plain"), rows(tmp_path / "averaged")
    assert [row for row in trained if row["split"] == "train"] == [row for row in other if row["split"] == "train"]
    expected = model()
    saved = last_tensors(tmp_path / "averaged")
    expected.load_state_dict(saved["model"])
    evaluation = evaluate(expected, averaged.dataset.test, 3, SINGLE, batch_size=17)
    last = [row for row in other if row["split"] == "test"][-1]
    assert last["loss"] == pytest.approx(evaluation.loss, rel=1e-6)
    assert last["loss"] != pytest.approx([row for row in trained if row["split"] == "test"][-1]["loss"], rel=1e-4)
    assert averaged.evaluate().loss == last["loss"]
    assert_equal(weights(plain), weights(averaged))  # as before the evaluation


def test_best_checkpoint_is_the_average_that_was_evaluated(tmp_path):
    averaged, outcome = run(tmp_path, average_weights=DECAY, iterations=6, eval_every=6)
    checkpoints = RunDirectory(tmp_path).checkpoints
    assert checkpoints.steps("best", up_to=6) == [6]
    best = load_checkpoint(checkpoints.path(6, best=True)).tensors
    assert set(best) == {"model"}
    assert_equal(best["model"], load_checkpoint(checkpoints.path(6)).tensors["model"])
    assert outcome.accuracy == averaged.evaluate().accuracy


@pytest.mark.parametrize("options", [{}, {"keep_norms": True}, MUON, {"bn_eval": ["precise", "lagging", "running"]}])
def test_resumed_run_with_an_average_is_bit_identical(tmp_path, options):
    options = {"average_weights": DECAY, **options}
    run(tmp_path / "whole", **options)
    path, stop = tmp_path / "resumed", StopSignals()
    run(path, stop=stop, reporter=StopAt(5, stop), **options)
    prepared = trainer(path, **options)
    assert prepared.resume() == []
    prepared.train(StopSignals())
    whole, resumed = (
        load_checkpoint(RunDirectory(tmp_path / name).checkpoints.path(12)) for name in ("whole", "resumed")
    )
    for group in ("model", "trained", "optimizer"):
        assert_equal(whole.tensors[group], resumed.tensors[group])
    assert rows(tmp_path / "whole") == rows(path)


@pytest.mark.parametrize("operator", [None, "cosine"])
def test_average_keeps_the_norms_that_muon_keeps(tmp_path, operator):
    run(tmp_path, model(operator=operator), average_weights=DECAY, **MUON)
    saved = last_tensors(tmp_path)
    names = [name for name, weight in saved["model"].items() if weight.dim() > 1 and "head" not in name]
    assert len(names) == 4
    for name in names:
        assert saved["model"][name].norm().item() == pytest.approx(len(saved["model"][name]) ** 0.5, rel=1e-5)
        assert not torch.equal(saved["model"][name], saved["trained"][name])


def test_average_keeps_the_norms_of_kernels_that_keep_norms_keeps(tmp_path):
    run(tmp_path, average_weights=DECAY, keep_norms=True, learning_rate=0.05)
    saved = last_tensors(tmp_path)
    assert len(saved["kept_norms"]) == 4
    for name, norms in saved["kept_norms"].items():
        torch.testing.assert_close(saved["model"][name].flatten(1).norm(dim=1), norms)
        assert not torch.allclose(saved["model"][name], saved["trained"][name])


def test_average_keeps_the_norms_of_a_normalized_transformer(tmp_path):
    torch.manual_seed(0)
    network = sn.create_model("sphere-vit-tiny", 3, widths=(8,), in_channels=1, input_size=8)
    run(tmp_path, network, average_weights=DECAY, learning_rate=0.05)
    saved = last_tensors(tmp_path)
    matrices = [(name, module) for name, module in network.named_modules() if isinstance(module, EmbeddingMatrix)]
    assert len(matrices) == 2 + 4 * 6
    for name, matrix in matrices:
        average, trained = (saved[group][f"{name}.weight"] for group in ("model", "trained"))
        torch.testing.assert_close(average.norm(dim=matrix.axis), torch.ones(average.shape[1 - matrix.axis]))
        assert not torch.allclose(average, trained)


def test_norms_of_transposed_kernels_and_opposite_weights():
    layer = torch.nn.ModuleList([sn.SphereConvTranspose2d(4, 6, 3, groups=2), sn.SphereLinear(3, 2)])
    optimizer = torch.optim.SGD(layer.parameters())
    average = WeightAverage(layer, optimizer, TrainConfig(average_weights=0.5, keep_norms=True))
    transposed, linear = layer[0].weight, layer[1].weight

    def norms():
        return torch.linalg.vector_norm(transposed.detach().unflatten(0, (2, 2)), dim=(1, 3, 4))

    before = norms()
    average.update(1)
    with torch.no_grad():
        transposed.copy_(transposed.flip(-1))
        linear.neg_()
    average.update(100)  # half of each
    with average.applied():
        torch.testing.assert_close(norms(), before)
        assert not torch.equal(transposed, transposed.flip(-1).neg())
        assert linear.isfinite().all()


def test_frozen_whitening_is_not_changed_by_the_average():
    network = sn.create_model("air", widths=(4, 4, 8))
    before = network.features.whitening.weight.clone()
    average = WeightAverage(network, torch.optim.SGD(network.parameters()), TrainConfig(average_weights=0.9))
    with torch.no_grad():
        network.features.whitening.bias.add_(1)
    for step in range(1, 8):
        average.update(step)
    with average.applied():
        assert torch.equal(network.features.whitening.weight, before)
        torch.testing.assert_close(network.features.whitening.bias.detach(), torch.ones(24))


def test_changed_averaging_of_a_resumed_run(tmp_path):
    run(tmp_path, iterations=4)
    prepared = trainer(tmp_path, average_weights=DECAY)
    assert prepared.resume() == ["the checkpoint of step 4 has no average of weights: it starts here."]
    assert_equal(prepared.average.state_dict(), weights(prepared))
    prepared.train(StopSignals())
    trained = last_tensors(tmp_path)["trained"]
    without = trainer(tmp_path)
    assert without.resume() == []
    assert_equal(weights(without), trained)


def test_average_that_does_not_fit_is_refused(tmp_path):
    prepared, _ = run(tmp_path, iterations=4, average_weights=DECAY)
    state = prepared.average.state_dict()
    state.pop("head.weight")
    with pytest.raises(CheckpointError, match=r"^this does not fit the model: it lacks head\.weight\.$"):
        prepared.average.load_state_dict(state, "this")
    spare = prepared.average.state_dict() | {"criterion.spare": torch.tensor(7)}
    with pytest.raises(CheckpointError, match=r"^this does not fit the model: it has unexpected criterion\.spare\.$"):
        prepared.average.load_state_dict(spare, "this")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1.0, r"^average_weights must be less than 1, got 1\.0\.$"),
        (-0.1, r"^average_weights must be a finite number of at least 0, got -0\.1\.$"),
        (float("nan"), r"^average_weights must be a finite number of at least 0, got nan\.$"),
    ],
)
def test_wrong_decay_is_refused(value, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(average_weights=value)


def test_commands_use_the_average(tmp_path, capsys):
    run_path = tmp_path / "run"
    assert spherenet("train", *TINY, "--average-weights", 0.9, "--output", run_path) == 0
    assert json.loads((run_path / "config.json").read_text())["train"]["average_weights"] == 0.9
    capsys.readouterr()
    assert spherenet("evaluate", run_path, "--json") == 0
    accuracy = json.loads(capsys.readouterr().out)["accuracy"]
    summary = json.loads((run_path / "summary.json").read_text())
    assert accuracy in (summary["accuracy"], summary["best_accuracy"])
    saved = last_tensors(run_path)
    assert_equal(saved["model"], sn.load_run(run_path).model.state_dict())
    assert spherenet("train", *TINY, "--average-weights", 1.5, "--output", tmp_path / "other") == 2
    message = capsys.readouterr().err
    assert one_sentence(message)
    assert "--average-weights must be less than 1, got 1.5" in message


def test_two_processes_have_one_average(tmp_path):
    options = [*TINY, "--average-weights", 0.9]
    done = in_other_processes("train", *options, "--output", tmp_path / "run", processes=2)
    assert done.returncode == 0, done.stderr
    saved = last_tensors(tmp_path / "run")
    assert set(saved) == {"model", "trained", "optimizer"}
    last = [row for row in rows(tmp_path / "run") if row["split"] == "test"][-1]
    run_of_one = sn.load_run(tmp_path / "run")
    test = build_data(TrainConfig()).test
    evaluation = evaluate(run_of_one.model, test, 10, SINGLE, batch_size=500)
    assert last["accuracy"] == evaluation.accuracy
    assert last["loss"] == pytest.approx(evaluation.loss, rel=1e-5)


def test_sharded_weights_have_no_average():
    two = Processes(0, 2, torch.device("cpu"))
    require_shardable(TrainConfig(average_weights=0.9), two)
    for options in ({"sharding": "fsdp"}, {"shard_head": True}):
        with pytest.raises(ValueError, match=r"^average_weights must be 0 if weights are sharded, got 0\.9\.$"):
            require_shardable(TrainConfig(average_weights=0.9, **options), two)
