"""Which pictures come when, and exact counts."""

from itertools import islice

import pytest
import torch

from spherenet.training import Processes, evaluate
from spherenet.training.evaluation import evaluation_order, training_order
from training_problem import ALONE, CLASSES, model, split

CPU = torch.device("cpu")


def batches(count, **changes):
    arguments = {"num_examples": 23, "batch_size": 5, "seed": 1, "first_step": 0, "share": lambda i: i, "accumulate": 1}
    return list(islice(training_order(**{**arguments, **changes}), count))


def test_an_epoch_is_a_permutation_without_its_remainder():
    epochs = batches(8)
    assert [epoch for epoch, _ in epochs] == [0] * 4 + [1] * 4
    for first in (0, 4):
        seen = torch.cat([indices for _, indices in epochs[first : first + 4]])
        assert len(set(seen.tolist())) == 20
    assert not torch.equal(epochs[0][1], epochs[4][1])


def test_any_step_can_be_the_first():
    whole = batches(12)
    for step in (0, 3, 4, 7):
        for (epoch, indices), (expected_epoch, expected) in zip(
            batches(4, first_step=step), whole[step:], strict=False
        ):
            assert epoch == expected_epoch
            assert torch.equal(indices, expected)


def test_processes_and_pieces_share_a_batch():
    whole = batches(3)
    for world in (2, 3):
        parts = [
            batches(6, share=Processes(rank, world, CPU).share, accumulate=2 if world == 2 else 1)
            for rank in range(world)
        ]
        pieces = 2 if world == 2 else 1
        for step in range(3):
            found = torch.cat([part[step * pieces + piece][1] for part in parts for piece in range(pieces)])
            assert torch.equal(found, whole[step][1])


def test_too_many_pieces_for_a_batch():
    with pytest.raises(ValueError, match="batch_size 5 is too small for 6 pieces"):
        batches(1, accumulate=6)


def test_seeds_differ():
    assert not torch.equal(batches(1)[0][1], batches(1, seed=2)[0][1])


@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_test_picture_is_seen_once(world):
    seen = [
        i
        for rank in range(world)
        for _, part in evaluation_order(7, 2, Processes(rank, world, CPU).share)
        for i in part
    ]
    assert sorted(map(int, seen)) == list(range(7))


def test_evaluation_counts_every_picture_in_eval_mode():
    made, test = model(), split(40, 1)
    made.train()
    result = evaluate(made, test, CLASSES, ALONE, batch_size=17)
    assert made.training
    made.eval()
    batch = next(test.batches([(0, torch.arange(40))], device=CPU, augmentation=None))
    with torch.no_grad():
        loss, scores = made(batch.images, batch.labels)
    answers = scores.argmax(1)
    assert result.count == 40
    assert result.accuracy == (answers == batch.labels).double().mean().item()
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    for truth in range(CLASSES):
        for answer in range(CLASSES):
            expected = ((batch.labels == truth) & (answers == answer)).sum()
            assert result.confusion[truth, answer] == expected
