"""The training loop: equal to a plain torch loop, bit-identical when resumed, and equal with micro-batches."""

import pytest
import torch

import spherenet as sn
from spherenet.errors import TrainingError
from spherenet.models.transformer import EmbeddingMatrix
from spherenet.training import StopSignals, Trainer
from spherenet.training.evaluation import training_order
from training_problem import FLIP, SINGLE, StopAt, assert_equal, config, model, rows, run, split, trainer, weights


def plain_loop(network, chosen):
    """Train with a loop written by hand and return the loss of each step."""
    network = network.to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(sn.param_groups(network, chosen.weight_decay), lr=chosen.learning_rate, fused=True)
    order = training_order(torch.zeros(70, dtype=torch.int64), chosen, SINGLE)
    batches = split(70, 0).batches(order, device=torch.device("cpu"), augmentation=FLIP, seed=chosen.seed)
    losses = []
    for step in range(chosen.iterations):
        for group in optimizer.param_groups:
            group["lr"] = chosen.learning_rate * (0.1 if step >= 8 else 1)
        batch = next(batches)
        loss, _ = network(batch.images, batch.labels)
        optimizer.zero_grad()
        (loss + 1e-4 * sn.orthogonality(network)).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_trainer_equals_plain_torch_loop(tmp_path):
    reference = model()
    losses = plain_loop(reference, config())
    prepared, outcome = run(tmp_path)
    assert_equal(weights(prepared), reference.state_dict())
    logged = [row["loss"] for row in rows(tmp_path) if row["split"] == "train"]
    assert logged == pytest.approx([(a + b) / 2 for a, b in zip(losses[::2], losses[1::2], strict=True)], rel=1e-6)
    assert outcome.step == 12
    assert outcome.signal is None


def test_training_reaches_accuracy(tmp_path):
    _, outcome = run(tmp_path, iterations=60, milestones=(), eval_every=30)
    assert outcome.accuracy > 0.8


OPTIONS = {
    "default": {},
    "accumulate": {"accumulate": 3},
    "sgd": {"optimizer": "sgd", "learning_rate": 0.05},
    "keep_norms": {"keep_norms": True},
    "bfloat16": {"precision": "bfloat16"},
    "float16": {"precision": "float16"},
}


def transformer(operator="cosine"):
    torch.manual_seed(0)
    return sn.create_model("sphere-vit-tiny", 3, operator, widths=(8,), in_channels=1, input_size=8)


@pytest.mark.parametrize("operator", ["cosine", None])
def test_resumed_transformer_is_bit_identical_and_normalized(tmp_path, operator):
    """Every step is followed by the normalization of the weights, which a checkpoint must not repeat."""
    chosen = {"learning_rate": 0.02, "optimizer": "adamw", "weight_decay": 0.1}
    expected, _ = run(tmp_path / "uninterrupted", transformer(operator), **chosen)
    stop = StopSignals()
    trainer(tmp_path / "resumed", transformer(operator), reporter=StopAt(7, stop), **chosen).train(stop)
    resumed = trainer(tmp_path / "resumed", transformer(operator), **chosen)
    assert resumed.resume() == []
    resumed.train(StopSignals())
    assert_equal(weights(resumed), weights(expected))
    matrices = [module for module in expected.model.modules() if isinstance(module, EmbeddingMatrix)]
    errors = [(matrix.weight.detach().norm(dim=matrix.axis) - 1).abs().max().item() for matrix in matrices]
    assert (max(errors) < 1e-6) == (operator == "cosine")
    decayed = expected.optimizer.param_groups[0]["params"]
    assert len(decayed) == (1 if operator == "cosine" else 1 + len(matrices))  # the head, under plain softmax


@pytest.mark.parametrize("loss", ["adaface", "curricularface", "uniface"])
def test_resumed_run_keeps_what_a_loss_has_learned(tmp_path, loss):
    expected, _ = run(tmp_path / "uninterrupted", model(loss=loss))
    stop = StopSignals()
    trainer(tmp_path / "resumed", model(loss=loss), reporter=StopAt(7, stop)).train(stop)
    resumed = trainer(tmp_path / "resumed", model(loss=loss))
    assert resumed.resume() == []
    resumed.train(StopSignals())
    assert_equal(weights(resumed), weights(expected))
    state = {name for name in weights(expected) if name.startswith("criterion.")}
    assert (
        state
        == {
            "adaface": {"criterion.norm_mean", "criterion.norm_std"},
            "curricularface": {"criterion.progress"},
            "uniface": {"criterion.shift"},
        }[loss]
    )


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("stops", [[7], [4], [5, 6], [8]], ids=str)
def test_resumed_run_is_bit_identical(tmp_path, options, stops):
    chosen = OPTIONS[options]
    expected, outcome = run(tmp_path / "uninterrupted", **chosen)
    path = tmp_path / "resumed"
    for number, step in enumerate([*stops, None]):
        stop = StopSignals()
        prepared = trainer(path, reporter=StopAt(step, stop), **chosen)
        if number:
            assert prepared.resume() == []
            prepared.run_directory.metrics.cut_back(prepared.step)
        last = prepared.train(stop)
        assert last.step == (12 if step is None else step)
        assert last.signal == (None if step is None else 15)
    assert_equal(weights(prepared), weights(expected))
    assert rows(path) == rows(tmp_path / "uninterrupted")
    assert (last.accuracy, last.best_accuracy, last.best_step) == (
        outcome.accuracy, outcome.best_accuracy, outcome.best_step)  # fmt: skip


def test_accumulated_gradients_equal_those_of_the_batch(tmp_path):
    # Without BatchNorm, whose statistics are those of a micro-batch. In float64 only the order of additions differs.
    networks = [model(batch_norm=False, loss="ga-linear").double() for _ in range(2)]
    double = split(70, 0)
    batches = double.batches

    def in_double(*arguments, **options):
        return (batch._replace(images=batch.images.double()) for batch in batches(*arguments, **options))

    double.batches = in_double
    for network, accumulate in zip(networks, (1, 5), strict=True):
        prepared = trainer(tmp_path / str(accumulate), network, train=double, accumulate=accumulate, annealing=False)
        prepared._evaluate = lambda: None
        prepared.train(StopSignals())
    for one, five in zip(*(network.parameters() for network in networks), strict=True):
        torch.testing.assert_close(five, one, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("on_nan", ["stop", "skip"])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_fault_stops_or_is_skipped(tmp_path, on_nan, where):
    network = model()
    prepared = trainer(tmp_path, network, on_nan=on_nan)
    forward = network.forward

    def poisoned(images, labels=None):
        result = forward(images, labels)
        if labels is not None and network.training and prepared.step == 5:
            if where == "loss":
                return result[0] * float("nan"), result[1]
            result[0].register_hook(lambda gradient: gradient * float("inf"))
        return result

    network.forward = poisoned
    if on_nan == "skip":
        outcome = prepared.train(StopSignals())
        assert outcome.step == 12
        assert prepared.progress.skipped == 1
        assert all(tensor.isfinite().all() for tensor in weights(prepared).values())
        return
    message = rf"the {where} is not finite at step 5 .*learning rate 0.001.*images \d+"
    with pytest.raises(TrainingError, match=message):
        prepared.train(StopSignals())
    fault = rows(tmp_path)[-1]
    assert (fault["split"], fault["step"], len(fault["indices"])) == ("fault", 5, 16)
    checkpoint, warnings = prepared.run_directory.checkpoints.newest()
    assert (checkpoint.step, warnings) == (4, [])
    assert all(tensor.isfinite().all() for tensor in checkpoint.tensors["model"].values())


def test_skipped_step_does_not_change_buffers(tmp_path):
    network = model()
    prepared = trainer(tmp_path, network, on_nan="skip")
    before = {name: buffer.clone() for name, buffer in network.named_buffers()}
    prepared.forward = lambda images, labels: tuple(value * float("nan") for value in network(images, labels))
    prepared._step(iter([next(split(70, 0).batches([(0, torch.arange(16))], device=torch.device("cpu"),
                                                   augmentation=None))]), StopSignals())  # fmt: skip
    for name, buffer in network.named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_compiled_training_is_close_to_eager(tmp_path, monkeypatch):
    # Traced and run without code generation, which takes half a minute and belongs to torch.
    compile_model = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module: compile_model(module, backend="aot_eager"))
    eager, _ = run(tmp_path / "eager", iterations=3)
    compiled, _ = run(tmp_path / "compiled", iterations=3, compile=True)
    for name, tensor in weights(eager).items():
        torch.testing.assert_close(weights(compiled)[name], tensor, rtol=1e-3, atol=1e-4)


def test_custom_penalty_replaces_the_regularizers(tmp_path):
    values = []

    def penalty(network):
        values.append(network)
        return torch.zeros(())

    default = trainer(tmp_path)
    prepared = Trainer(model(), default.dataset, config(iterations=2), SINGLE, default.run_directory, penalty=penalty)
    prepared.train(StopSignals())
    assert values == [prepared.model] * 2


@pytest.mark.parametrize(("accumulate", "expected"), [(1, [0, 1, 2]), (2, [0, 1, 2])])
def test_lambda_is_set_once_per_step(tmp_path, accumulate, expected):
    network = model(loss="ga-linear")
    prepared = trainer(tmp_path, network, iterations=3, accumulate=accumulate)
    set_lambda, steps = prepared.set_lambda, []
    prepared.set_lambda = lambda step: (steps.append(step), set_lambda(step))
    prepared.train(StopSignals())
    assert steps == expected


def test_batch_larger_than_the_data_set_is_rejected(tmp_path):
    with pytest.raises(ValueError, match="batch_size must be at most the 70 training images, got 71"):
        run(tmp_path, batch_size=71)
