"""No training step waits for the device: operations that would wait raise an error here.

These tests need no GPU. On the CPU, checks of values are switched off as on a GPU, the trainer takes its path for GPUs,
and every operation or method that needs a value on the host raises an error.
"""

import math
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import spherenet as sn
from spherenet import functional
from spherenet.errors import TrainingError
from spherenet.losses import arguments as label_checks
from spherenet.training import StopSignals
from spherenet.training.deferred import DeferredSums, sum_dtype
from spherenet.training.evaluation import training_order
from training_problem import StopAt, assert_equal, model, rows, trainer, weights

WAITING_OPERATIONS = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "unique", "_unique2",
                      "unique_consecutive", "bincount", "repeat_interleave.Tensor")  # fmt: skip
WAITING_METHODS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__")


class WouldWaitError(AssertionError):
    pass


class NoWaiting(TorchDispatchMode):
    """Raise an error for operations that need values on the host."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        if name in WAITING_OPERATIONS or f"{name}.{operation._overloadname}" in WAITING_OPERATIONS or by_mask:
            raise WouldWaitError(f"{operation} waits for the device")
        return operation(*args, **(kwargs or {}))


@contextmanager
def no_waiting():
    with pytest.MonkeyPatch.context() as patch, NoWaiting():
        for name in WAITING_METHODS:

            def refuse(*_, name=name, **__):
                raise WouldWaitError(f"Tensor.{name} waits for the device")

            patch.setattr(torch.Tensor, name, refuse)
        patch.setattr(functional, "can_read_values", lambda tensor: False)
        patch.setattr(label_checks, "can_read_values", lambda tensor: False)
        yield


@pytest.mark.parametrize("wait", [lambda t: t.item(), lambda t: bool(t > 0), lambda t: t.reshape(1)[t.reshape(1) > 0],
                                  lambda t: t.tolist(), lambda t: torch.nonzero(t), lambda t: t.cpu()])  # fmt: skip
def test_waiting_is_detected(wait):
    with no_waiting(), pytest.raises(WouldWaitError):
        wait(torch.ones(()))


LOSSES = {
    "softmax": sn.SoftmaxLoss,
    "w": lambda: sn.WSoftmaxLoss("sigmoid"),
    "ga": lambda: sn.GASoftmaxLoss("linear"),
    "a": sn.ASoftmaxLoss,
    "s": lambda: sn.SSoftmaxLoss("cosine"),
    "cosface": sn.CosFaceLoss,
    "arcface": sn.ArcFaceLoss,
}


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("operator", ["cosine", "linear", "sigmoid", "learnable"])
def test_layers_regularizers_and_optimizer_do_not_wait(operator, backend):
    network = nn.Sequential(
        sn.SphereConv2d(3, 6, 3, padding=1, operator=operator, rescale="learned", bias=True),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        sn.SphereConv2d(6, 6, 3, groups=2, operator=operator),
        nn.Flatten(),
        sn.SphereLinear(6 * 4 * 4, 8, operator=operator),
        sn.AngularHead(8, 5),
    )
    loss = sn.WSoftmaxLoss("linear")
    optimizer = torch.optim.Adam(sn.param_groups(network, 5e-4), fused=True)
    sn.keep_norms(optimizer, network)
    images, labels = torch.randn(4, 3, 6, 6), torch.tensor([0, 1, 2, 3])
    with no_waiting(), sn.backend(backend):
        for form in ("raw", "normalized"):
            total = loss(network(images), labels) + 1e-4 * sn.orthogonality(network, form)
            total.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert total.isfinite()


@pytest.mark.parametrize("name", LOSSES)
def test_losses_do_not_wait(name):
    loss, head = LOSSES[name](), sn.AngularHead(8, 5)
    features, labels = torch.randn(4, 8, requires_grad=True), torch.tensor([0, 1, 2, -100])
    with no_waiting():
        loss(head(features), labels).backward()
        loss(head(features), torch.full((4, 5), 0.2)).backward()
    assert features.grad.isfinite().all()


def on_device(path, network=None, **options):
    """Return a trainer on the CPU that takes its path for GPUs."""
    prepared = trainer(path, network, **options)
    config = prepared.config
    prepared.deferred = DeferredSums(torch.device("cpu"), config.batch_size, sticky=config.on_nan == "stop")
    return prepared


OPTIONS = {
    "adam": {},
    "sgd": {"optimizer": "sgd", "learning_rate": 0.05},
    "accumulate, keep_norms": {"accumulate": 2, "keep_norms": True},
    "skip": {"on_nan": "skip"},
    "bfloat16": {"precision": "bfloat16"},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_trainer_steps_do_not_wait(tmp_path, options):
    prepared = on_device(tmp_path, **OPTIONS[options])
    count, train = 2 * prepared.config.accumulate, prepared.dataset.train
    order = training_order(train.labels, prepared.config, prepared.processes)
    source = train.batches(order, device=torch.device("cpu"), augmentation=None)
    batches = iter([next(source) for _ in range(count)])
    prepared.model.train()
    with no_waiting():
        for _ in range(2):
            assert prepared._step(batches, StopSignals()) is False
    assert prepared.deferred.fetch().images == 2 * prepared.config.batch_size


@pytest.mark.parametrize("options", OPTIONS)
def test_deferred_sums_do_not_change_the_run(tmp_path, options):
    plain, deferred = (
        trainer(tmp_path / "plain", **OPTIONS[options]),
        on_device(tmp_path / "deferred", **OPTIONS[options]),
    )
    outcomes = [prepared.train(StopSignals()) for prepared in (plain, deferred)]
    assert_equal(weights(deferred), weights(plain))
    assert rows(tmp_path / "deferred") == rows(tmp_path / "plain")
    assert replace(outcomes[0], seconds=0) == replace(outcomes[1], seconds=0)


def poison(network, prepared, step, where):
    forward = network.forward

    def poisoned(images, labels=None):
        result = forward(images, labels)
        if labels is not None and network.training and prepared.step == step:
            if where == "loss":
                return result[0] * math.nan, result[1]
            result[0].register_hook(lambda gradient: gradient * math.inf)
        return result

    network.forward = poisoned


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_fault_stops_the_run_at_the_next_fetch(tmp_path, where):
    """The message names step and images of the fault; the weights are those before it."""
    network = model()
    prepared = on_device(tmp_path, network, log_every=4, checkpoint_every=4, eval_every=12)
    poison(network, prepared, 5, where)
    with pytest.raises(TrainingError, match=rf"the {where} is not finite at step 5 .*learning rate 0.001.*\d+"):
        prepared.train(StopSignals())
    fault = rows(tmp_path)[-1]
    assert (fault["split"], fault["step"], len(fault["indices"])) == ("fault", 5, 16)
    checkpoint, _ = prepared.run_directory.checkpoints.newest()
    assert checkpoint.step == 4
    reference = model()
    plain = trainer(tmp_path / "plain", reference, log_every=4, checkpoint_every=4, eval_every=12)
    poison(reference, plain, 5, where)
    with pytest.raises(TrainingError):
        plain.train(StopSignals())
    assert rows(tmp_path / "plain")[-1]["indices"] == fault["indices"]
    assert_equal(dict(network.named_parameters()), dict(reference.named_parameters()))


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_skipped_faults_do_not_change_the_run(tmp_path, where):
    runs = []
    for prepare, name in ((trainer, "plain"), (on_device, "deferred")):
        network = model()
        prepared = prepare(tmp_path / name, network, on_nan="skip")
        poison(network, prepared, 5, where)
        prepared.train(StopSignals())
        assert prepared.progress.skipped == 1
        runs.append(weights(prepared))
    assert_equal(*runs)
    assert rows(tmp_path / "plain") == rows(tmp_path / "deferred")


def test_signal_stops_run_with_deferred_sums(tmp_path):
    stop = StopSignals()
    prepared = on_device(tmp_path, reporter=StopAt(5, stop), log_every=12)
    assert prepared.train(stop).step == 5
    assert prepared.run_directory.checkpoints.newest()[0].step == 5


def test_sums_are_float32_on_devices_without_float64():
    assert [sum_dtype(torch.device(name)) for name in ("cpu", "cuda", "mps")] == [
        torch.float64, torch.float64, torch.float32]  # fmt: skip
