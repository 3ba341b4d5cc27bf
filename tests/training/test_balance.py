"""Imbalanced data: class weights, balanced sampling, balanced accuracy, and the warning about a single class."""

from itertools import islice

import pytest
import torch

import spherenet as sn
from spherenet.data import Dataset
from spherenet.data.splits import TensorSplit
from spherenet.runs import RunDirectory
from spherenet.training import Processes, Reporter, StopSignals, TrainConfig, Trainer, evaluate
from spherenet.training.balance import balanced_permutation, class_weights, single_class_warning, total_weight
from spherenet.training.build import build_model
from spherenet.training.evaluation import Evaluation, training_order
from training_problem import CLASSES, PREPROCESSING, SINGLE, StopAt, assert_equal, config, model, rows, split, weights

LABELS = torch.tensor([0] * 60 + [1] * 8 + [2] * 2)
NAMES = ("0", "1", "2")


def imbalanced():
    """Return 60, 8 and 2 images of the three classes."""
    pool = split(180, 0)
    chosen = torch.cat([(pool.labels == label).nonzero().flatten()[:count] for label, count in enumerate((60, 8, 2))])
    return pool.subset(chosen)


def trainer(path, network=None, processes=SINGLE, reporter=None, **changes):
    path.mkdir(exist_ok=True, parents=True)
    dataset = Dataset("stripes", NAMES, PREPROCESSING, imbalanced(), split(40, 1))
    options = config(**changes)
    if network is None:
        names = options.class_weights
        network = model(
            loss_options={} if names is None else {"class_weight": class_weights(names, NAMES, dataset.train.labels)}
        )
    return Trainer(network, dataset, options, processes, RunDirectory(path), reporter=reporter)


def test_balanced_weights_are_those_of_scikit_learn():
    compute = pytest.importorskip("sklearn.utils.class_weight").compute_class_weight
    expected = compute("balanced", classes=torch.arange(3).numpy(), y=LABELS.numpy())
    assert torch.allclose(class_weights(["balanced"], NAMES, LABELS).double(), torch.from_numpy(expected), rtol=1e-6)


def test_given_weights_have_a_mean_of_one_over_the_images():
    weight = class_weights(["2=6", "0=3"], NAMES, LABELS)
    assert weight[LABELS].mean().item() == pytest.approx(1)
    assert (weight / weight[1]).tolist() == pytest.approx([3, 1, 6])
    assert class_weights(["a=b=2"], ("a=b", "c"), torch.tensor([0, 1])).tolist() == pytest.approx([4 / 3, 2 / 3])


@pytest.mark.parametrize("entry", ["2", "=2", "2=", "2=x", "2=0", "2=-1", "2=nan", "2=inf", "balanced"])
def test_wrong_weights(entry):
    with pytest.raises(ValueError, match=r"^class_weights must be balanced alone, or NAME=WEIGHT .*, got .*\.$"):
        class_weights([entry, "0=1"], NAMES, LABELS)


def test_weights_of_unknown_and_repeated_classes():
    with pytest.raises(ValueError, match=r"^class_weights must name classes \(0, 1, 2\), got 'cat'\.$"):
        class_weights(["cat=2"], NAMES, LABELS)
    with pytest.raises(ValueError, match=r"^class_weights must name each class once, got '1' twice\.$"):
        class_weights(["1=2", "1=3"], NAMES, LABELS)


def test_both_corrections_at_once_are_refused():
    with pytest.raises(ValueError, match=r"^class_weights must be left out with sampling balanced"):
        TrainConfig(class_weights=["balanced"], sampling="balanced")
    TrainConfig(class_weights=["cat=2"], sampling="balanced")
    with pytest.raises(ValueError, match=r"^class_weights must be left out with --shard-head"):
        TrainConfig(class_weights=["balanced"], shard_head=True)


@pytest.mark.parametrize("counts", [(60, 8, 2), (1, 1), (100, 1), (5, 7, 11, 13)])
def test_each_class_is_drawn_equally_often(counts):
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    order = balanced_permutation(labels, torch.Generator().manual_seed(0))
    assert len(order) == len(labels)
    drawn = labels[order].bincount(minlength=len(counts))
    assert drawn.max() - drawn.min() <= 1
    for label in range(len(counts)):
        times = order.bincount(minlength=len(labels))[labels == label]
        assert times.max() - times.min() <= 1
    assert torch.equal(order, balanced_permutation(labels, torch.Generator().manual_seed(0)))
    if len(labels) > 50:
        assert not torch.equal(order, balanced_permutation(labels, torch.Generator().manual_seed(1)))


def test_labels_may_leave_classes_out():
    labels = torch.tensor([7, 7, 7, 2])
    assert labels[balanced_permutation(labels, torch.Generator().manual_seed(0))].bincount().tolist()[2::5] == [2, 2]


def test_a_repeated_image_is_augmented_differently():
    chosen = TrainConfig(batch_size=10, seed=1, sampling="balanced")
    order = list(islice(training_order(LABELS, chosen, SINGLE), 14))
    assert [number for number, _ in order] == list(range(14))
    later = list(islice(training_order(LABELS, chosen, SINGLE, first_step=9), 5))
    for (number, indices), (other, other_indices) in zip(order[9:], later, strict=True):
        assert number == other
        assert torch.equal(indices, other_indices)


@pytest.mark.parametrize("changes", [{"sampling": "balanced"}, {"class_weights": ["balanced"]}], ids=str)
def test_resumed_runs_are_bit_identical(tmp_path, changes):
    complete = trainer(tmp_path / "complete", **changes)
    complete.train(StopSignals())
    stop = StopSignals()
    interrupted = trainer(tmp_path / "run", reporter=StopAt(7, stop), **changes)
    assert interrupted.train(stop).signal == 15
    resumed = trainer(tmp_path / "run", **changes)
    resumed.resume()
    resumed.run_directory.cut_back(resumed.step)
    outcome = resumed.train(StopSignals())
    assert_equal(weights(complete), weights(resumed))
    assert rows(tmp_path / "complete") == rows(tmp_path / "run")
    last = [row for row in rows(tmp_path / "run") if row["split"] == "test"][-1]
    assert outcome.balanced_accuracy == last["balanced_accuracy"]
    plain = trainer(tmp_path / "plain")
    plain.train(StopSignals())
    assert any(not torch.equal(tensor, weights(plain)[name]) for name, tensor in weights(complete).items())


def gradient(trainer_of_step):
    prepared = trainer_of_step
    source = prepared.dataset.train.batches(
        training_order(prepared.dataset.train.labels, prepared.config, prepared.processes),
        device=torch.device("cpu"),
        augmentation=None,
    )
    prepared.model.train()
    for _ in range(prepared.config.accumulate):
        batch = next(source)
        images = total_weight(prepared.model, batch.labels)
        prepared._forward_backward(batch, images, add_penalty=False)
    return torch.cat([p.grad.flatten().double() for p in prepared.model.parameters() if p.grad is not None])


def test_micro_batches_of_other_classes_give_the_gradient_of_the_whole_batch(tmp_path):
    gradients = []
    for accumulate in (1, 3):
        weight = class_weights(["balanced"], NAMES, LABELS)
        network = model(loss_options={"class_weight": weight}, batch_norm=False)
        prepared = trainer(tmp_path / str(accumulate), network, accumulate=accumulate, batch_size=63)
        gradients.append(gradient(prepared))
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-7)


def test_weighted_loss_of_an_evaluation_does_not_depend_on_batches():
    network = model(loss_options={"class_weight": torch.tensor([0.2, 1.0, 5.0])}).eval()
    test = split(40, 1)
    batch = next(test.batches([(0, torch.arange(40))], device=torch.device("cpu"), augmentation=None))
    with torch.no_grad():
        expected = network(batch.images, batch.labels)[0].item()
    for batch_size in (7, 40):
        assert evaluate(network, test, CLASSES, SINGLE, batch_size=batch_size).loss == pytest.approx(expected, rel=1e-5)


def test_balanced_accuracy_is_the_mean_recall():
    result = Evaluation(1.0, 0.9, 100, torch.tensor([[90, 10, 0], [90, 0, 0], [100, 0, 0]]), None)
    assert result.balanced_accuracy == 0.5
    assert result.as_row() == {"loss": 1.0, "accuracy": 0.9, "balanced_accuracy": 0.5, "count": 100}


def test_warning_about_predictions_of_one_class():
    result = Evaluation(1.0, 0.9, 100, torch.tensor([[90, 10], [90, 0], [100, 0]]), None)
    assert single_class_warning(result, ("cat", "dog"), "test") == (
        "all 100 test predictions are the class 'cat', which has 90.0% of these images (balanced accuracy 50.00%); "
        "try --class-weights balanced, --sampling balanced or more iterations."
    )
    two = Evaluation(1.0, 0.9, 100, torch.tensor([[90, 10], [89, 0], [99, 1]]), None)
    assert single_class_warning(two, ("cat", "dog"), "test") is None
    only = Evaluation(1.0, 1.0, 100, torch.tensor([[100, 0], [100, 0], [100, 0]]), None)
    assert single_class_warning(only, ("cat", "dog"), "test") is None


def test_training_warns_about_predictions_of_one_class(tmp_path):
    class Recorder(Reporter):
        def __init__(self):
            self.messages = []

        def warned(self, message):
            self.messages.append(message)

    network = model(head_bias=True)
    with torch.no_grad():
        network.head.bias.copy_(torch.tensor([0.0, 1e4, 0.0]))
    reporter = Recorder()
    trainer(tmp_path / "run", network, reporter=reporter, iterations=1).train(StopSignals())
    assert len([message for message in reporter.messages if message.startswith("all 40 test predictions are")]) == 1


def test_built_network_and_its_record_have_the_weights(tmp_path):
    images = torch.zeros(70, 8, 8, 1, dtype=torch.uint8)
    train = TensorSplit(images, LABELS, PREPROCESSING)
    dataset = Dataset("stripes", NAMES, PREPROCESSING, train, train)
    options = TrainConfig(class_weights=["balanced"], widths=[4, 4, 4], loss="w-cosine")
    network = build_model(options, dataset)
    assert torch.equal(network.criterion.class_weight, class_weights(["balanced"], NAMES, LABELS))
    sn.save_model(network, tmp_path / "model")
    loaded = sn.load_model(tmp_path / "model")
    assert torch.equal(loaded.criterion.class_weight, network.criterion.class_weight)


def test_each_process_has_its_share_of_a_balanced_batch():
    chosen = TrainConfig(batch_size=10, seed=1, sampling="balanced")
    whole = next(training_order(LABELS, chosen, SINGLE))[1]
    parts = [next(training_order(LABELS, chosen, Processes(rank, 2, torch.device("cpu"))))[1] for rank in range(2)]
    assert torch.equal(torch.cat(parts), whole)
