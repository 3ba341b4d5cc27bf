"""The loop against a plain torch loop, itself interrupted, and batches in pieces."""

import pytest
import torch

import spherenet as sn
from spherenet.training import StopSignals
from spherenet.training.evaluation import training_order
from training_problem import (
    FLIP,
    StopAt,
    assert_equal,
    model,
    orthogonality,
    rows,
    run,
    settings,
    split,
    trainer,
    weights,
)


def plain_loop(made, chosen):
    """What the engine does, as one writes it by hand."""
    made = made.to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(sn.param_groups(made, chosen.weight_decay), lr=chosen.learning_rate, fused=True)
    order = training_order(70, chosen.batch_size, chosen.seed, 0, lambda indices: indices, 1)
    batches = split(70, 0).batches(order, device=torch.device("cpu"), augmentation=FLIP, seed=chosen.seed)
    losses = []
    for step in range(chosen.iterations):
        for group in optimizer.param_groups:
            group["lr"] = chosen.learning_rate * (0.1 if step >= 8 else 1)
        batch = next(batches)
        loss, _ = made(batch.images, batch.labels)
        optimizer.zero_grad()
        (loss + orthogonality(made)).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_the_engine_is_a_plain_torch_loop(tmp_path):
    reference = model()
    losses = plain_loop(reference, settings())
    prepared, outcome = run(tmp_path)
    assert_equal(weights(prepared), reference.state_dict())
    logged = [row["loss"] for row in rows(tmp_path) if row["split"] == "train"]
    assert logged == pytest.approx([(a + b) / 2 for a, b in zip(losses[::2], losses[1::2], strict=True)], rel=1e-6)
    assert outcome.step == 12
    assert outcome.signal is None


def test_it_learns(tmp_path):
    _, outcome = run(tmp_path, iterations=60, milestones=(), eval_every=30)
    assert outcome.accuracy > 0.8


OPTIONS = {
    "as it is": {},
    "with pieces": {"accumulate": 3},
    "sgd": {"optimizer": "sgd", "learning_rate": 0.05},
    "norms kept": {"keep": True},
    "bfloat16": {"precision": "bfloat16"},
    "float16": {"precision": "float16"},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("stops", [[7], [4], [5, 6], [8]], ids=str)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, options, stops):
    chosen = OPTIONS[options]
    whole, outcome = run(tmp_path / "whole", **chosen)
    parts = tmp_path / "parts"
    for number, step in enumerate([*stops, None]):
        stop = StopSignals()
        prepared = trainer(parts, reporter=StopAt(step, stop), **chosen)
        if number:
            assert prepared.resume() == []
            prepared.run_directory.metrics.cut_back(prepared.step)
        left = prepared.train(stop)
        assert left.step == (12 if step is None else step)
        assert left.signal == (None if step is None else 15)
    assert_equal(weights(prepared), weights(whole))
    assert rows(parts) == rows(tmp_path / "whole")
    assert (left.accuracy, left.best_accuracy, left.best_step) == (
        outcome.accuracy, outcome.best_accuracy, outcome.best_step)  # fmt: skip


def test_pieces_add_up_to_the_batch(tmp_path):
    # Without BatchNorm, whose statistics are those of a piece. float64 leaves only the order of the additions.
    made = [model(batch_norm=False, loss="ga-linear").double() for _ in range(2)]
    double = split(70, 0)
    plain = double.batches

    def in_double(*arguments, **options):
        return (batch._replace(images=batch.images.double()) for batch in plain(*arguments, **options))

    double.batches = in_double
    for number, accumulate in enumerate((1, 5)):
        made[number].criterion.annealing = None
        prepared = trainer(tmp_path / str(accumulate), made[number], train=double, accumulate=accumulate)
        prepared.evaluate = lambda: pytest.fail("not evaluated")
        prepared._evaluate = lambda: None
        prepared.train(StopSignals())
    for one, five in zip(made[0].parameters(), made[1].parameters(), strict=True):
        torch.testing.assert_close(five, one, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("on_nan", ["stop", "skip"])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_loss_that_is_not_finite(tmp_path, on_nan, where):
    from spherenet.errors import TrainingError

    made = model()
    prepared = trainer(tmp_path, made, on_nan=on_nan)
    forward = made.forward

    def poisoned(images, labels=None):
        answer = forward(images, labels)
        if labels is not None and made.training and prepared.step == 5:
            if where == "loss":
                return answer[0] * float("nan"), answer[1]
            answer[0].register_hook(lambda gradient: gradient * float("inf"))
        return answer

    made.forward = poisoned
    if on_nan == "skip":
        outcome = prepared.train(StopSignals())
        assert outcome.step == 12
        assert prepared.progress.skipped == 1
        assert all(tensor.isfinite().all() for tensor in weights(prepared).values())
        return
    with pytest.raises(
        TrainingError, match=rf"the {where} is not finite at step 5 .*learning rate 0.001.*pictures \d+"
    ):
        prepared.train(StopSignals())
    fault = rows(tmp_path)[-1]
    assert (fault["split"], fault["step"], len(fault["indices"])) == ("fault", 5, 16)
    found, complaints = prepared.run_directory.checkpoints.newest()
    assert (found.step, complaints) == (4, [])
    assert all(tensor.isfinite().all() for tensor in found.tensors["model"].values())


def test_skipping_a_step_leaves_no_trace_in_running_means(tmp_path):
    made = model()
    prepared = trainer(tmp_path, made, on_nan="skip")
    before = {name: buffer.clone() for name, buffer in made.named_buffers()}
    prepared.forward = lambda images, labels: tuple(value * float("nan") for value in made(images, labels))
    prepared._step(iter([next(split(70, 0).batches([(0, torch.arange(16))], device=torch.device("cpu"),
                                                   augmentation=None))]), StopSignals())  # fmt: skip
    for name, buffer in made.named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_compiled_training_is_close_to_eager(tmp_path, monkeypatch):
    # Traced and run without code generation, which takes half a minute and is torch's own.
    compile_model = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module: compile_model(module, backend="aot_eager"))
    eager, _ = run(tmp_path / "eager", iterations=3)
    compiled, _ = run(tmp_path / "compiled", iterations=3, compile=True)
    for name, tensor in weights(eager).items():
        torch.testing.assert_close(weights(compiled)[name], tensor, rtol=1e-3, atol=1e-4)


def test_the_learning_rate_falls_at_the_milestones():
    chosen = settings(milestones=(4, 8), learning_rate=1.0)
    assert [chosen.learning_rate_at(step) for step in (0, 3, 4, 7, 8)] == pytest.approx([1, 1, 0.1, 0.1, 0.01])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"iterations": 0}, "iterations must be at least 1, got 0"),
        ({"learning_rate": float("nan")}, "learning_rate must be a finite number"),
        ({"optimizer": "lion"}, "optimizer must be one of adam, sgd, got 'lion'"),
        ({"precision": "half"}, "precision must be one of"),
    ],
)
def test_wrong_settings(change, message):
    with pytest.raises(ValueError, match=message):
        settings(**change)


def test_a_batch_larger_than_the_set_is_refused(tmp_path):
    with pytest.raises(ValueError, match="batch_size must be at most the 70 training pictures, got 71"):
        run(tmp_path, batch_size=71)
