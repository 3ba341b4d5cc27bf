"""The order of images in training and evaluation, and exact counts of an evaluation."""

from itertools import islice

import pytest
import torch

from spherenet.training import Processes, TrainConfig, evaluate, evaluation
from spherenet.training.evaluation import evaluation_order, training_order
from spherenet.training.sharding import joint_micro_batches
from training_problem import CLASSES, SINGLE, model, split

CPU = torch.device("cpu")


def batches(count, *, first_step=0, processes=SINGLE, **changes):
    config = TrainConfig(**{"batch_size": 5, "seed": 1, **changes})
    return list(islice(training_order(torch.zeros(23, dtype=torch.int64), config, processes, first_step), count))


def test_epoch_is_a_permutation_without_remainder():
    epochs = batches(8)
    assert [epoch for epoch, _ in epochs] == [0] * 4 + [1] * 4
    for first in (0, 4):
        images = torch.cat([indices for _, indices in epochs[first : first + 4]])
        assert len(set(images.tolist())) == 20
    assert not torch.equal(epochs[0][1], epochs[4][1])


def test_order_can_start_at_any_step():
    expected = batches(12)
    for step in (0, 3, 4, 7):
        for (epoch, indices), (expected_epoch, expected_indices) in zip(
            batches(4, first_step=step), expected[step:], strict=False
        ):
            assert epoch == expected_epoch
            assert torch.equal(indices, expected_indices)


@pytest.mark.parametrize(("world", "accumulate"), [(2, 2), (3, 1)])
def test_processes_and_micro_batches_divide_a_batch(world, accumulate):
    expected = batches(3)
    ranks = [
        batches(3 * accumulate, processes=Processes(rank, world, CPU), accumulate=accumulate) for rank in range(world)
    ]
    for step in range(3):
        own = [order[step * accumulate + number][1] for order in ranks for number in range(accumulate)]
        assert torch.equal(torch.cat(own), expected[step][1])


@pytest.mark.parametrize(("world", "accumulate"), [(1, 6), (6, 1), (2, 3)])
def test_batch_smaller_than_its_micro_batches_is_rejected(world, accumulate):
    for rank in range(world):
        with pytest.raises(ValueError, match=rf"batch_size must be at least 6 .*{accumulate} micro-batches.*got 5"):
            batches(1, processes=Processes(rank, world, CPU), accumulate=accumulate)


def test_order_depends_on_the_seed():
    assert not torch.equal(batches(1)[0][1], batches(1, seed=2)[0][1])


@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_test_image_is_evaluated_once(world):
    images = [
        index
        for rank in range(world)
        for _, indices in evaluation_order(7, 2, Processes(rank, world, CPU))
        for index in indices
    ]
    assert sorted(map(int, images)) == list(range(7))


def test_evaluation_counts_every_image_in_eval_mode():
    network, test = model(), split(40, 1)
    network.train()
    result = evaluate(network, test, CLASSES, SINGLE, batch_size=17)
    assert network.training
    network.eval()
    batch = next(test.batches([(0, torch.arange(40))], device=CPU, augmentation=None))
    with torch.no_grad():
        loss, scores = network(batch.images, batch.labels)
    predictions = scores.argmax(1)
    assert result.count == 40
    assert result.accuracy == (predictions == batch.labels).double().mean().item()
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    for truth in range(CLASSES):
        for prediction in range(CLASSES):
            expected = ((batch.labels == truth) & (predictions == prediction)).sum()
            assert result.confusion[truth, prediction] == expected


def test_processes_that_evaluate_together_have_the_same_number_of_batches():
    orders = [list(evaluation_order(7, 2, Processes(rank, 3, CPU), together=True)) for rank in range(3)]
    assert [[len(indices) for _, indices in order] for order in orders] == [[2, 1], [2, 0], [2, 0]]
    assert sorted(int(index) for order in orders for _, indices in order for index in indices) == list(range(7))


def test_empty_batch_that_keeps_processes_together_does_not_count(monkeypatch):
    network, test = model(), split(40, 1)
    expected = evaluate(network, test, CLASSES, SINGLE, batch_size=20)
    order = [(0, torch.arange(20)), (0, torch.arange(20, 40)), (0, torch.arange(0))]
    monkeypatch.setattr(evaluation, "evaluation_order", lambda *arguments, together: iter(order))
    result = evaluate(network, test, CLASSES, SINGLE, batch_size=20, together=True)
    assert (result.loss, result.accuracy, result.count) == (expected.loss, expected.accuracy, 40)
    assert torch.equal(result.per_class, expected.per_class)
    assert result.balanced_accuracy == expected.balanced_accuracy


def test_very_many_classes_have_no_confusion_matrix(monkeypatch):
    network, test = model(), split(40, 1)
    expected = evaluate(network, test, CLASSES, SINGLE)
    monkeypatch.setattr(evaluation, "LARGEST_CONFUSION", CLASSES - 1)
    result = evaluate(network, test, CLASSES, SINGLE)
    assert result.confusion is None
    assert (result.loss, result.accuracy, result.count) == (expected.loss, expected.accuracy, 40)
    assert torch.equal(result.per_class, expected.per_class)
    assert result.balanced_accuracy == expected.balanced_accuracy


@pytest.mark.parametrize(("batch_size", "world", "accumulate"), [(33, 2, 1), (33, 4, 3), (8, 2, 2)])
def test_joint_micro_batches_are_those_of_all_processes(batch_size, world, accumulate):
    config = TrainConfig(batch_size=batch_size, accumulate=accumulate)
    ranks = [
        islice(training_order(torch.zeros(batch_size), config, Processes(rank, world, CPU)), accumulate)
        for rank in range(world)
    ]
    sizes = [sum(len(indices) for _, indices in micro_batches) for micro_batches in zip(*ranks, strict=True)]
    assert joint_micro_batches(config, world) == sizes
