"""λ: its schedule, its counter in the saved state, and what it does to a loss."""

import copy

import pytest
import torch

from spherenet.layers.head import AngularHead
from spherenet.losses import Annealing, ASoftmaxLoss, GASoftmaxLoss, WSoftmaxLoss
from spherenet.ops import reference_losses

LABELS = torch.tensor([0, 1, 2])


@pytest.fixture
def output():
    return AngularHead(4, 3, dtype=torch.float64)(torch.randn(3, 4, dtype=torch.float64))


def test_the_schedule_is_the_printed_formula():
    schedule = Annealing(100, 0.2, 5)
    for t in (0, 1, 10, 94, 95, 96, 10_000):
        assert schedule.at(t) == reference_losses.annealed(t, 100, 0.2, 5)
        assert schedule.at(torch.tensor(t, dtype=torch.float64)).item() == pytest.approx(schedule.at(t))


def test_runs_of_any_length_pass_through_the_same_lambda():
    short, long = Annealing.for_run(600), Annealing.for_run(64_000)
    for fraction in (0, 0.01, 0.05, 0.1, 1 / 6, 0.5, 1):
        assert short.at(fraction * 600) == pytest.approx(long.at(fraction * 64_000))
    assert long.at(64_000 / 6 - 10) > 5
    assert long.at(64_000 / 6) == pytest.approx(5)
    assert short.decay == pytest.approx(0.2, rel=0.06)


def test_for_run_takes_its_own_start_floor_and_fraction():
    schedule = Annealing.for_run(1000, start=50, floor=1, floor_at=0.5)
    assert schedule.at(0) == 50
    assert schedule.at(499) > 1
    assert schedule.at(500) == pytest.approx(1)


def test_the_counter_goes_up_once_a_training_loss(output):
    loss = GASoftmaxLoss()
    for step in range(3):
        assert loss.iteration.item() == step
        assert loss.current_lambda == pytest.approx(100 / (1 + 0.2 * step))
        loss(output, LABELS)
    loss.logits(output)
    loss.eval()(output, LABELS)
    assert loss.iteration.item() == 3
    with pytest.raises(ValueError, match="labels"):
        loss.train()(output, LABELS + 1)
    assert loss.iteration.item() == 3


def test_the_counter_is_part_of_the_saved_state(output):
    loss = ASoftmaxLoss()
    for _ in range(7):
        loss(output, LABELS)
    other = ASoftmaxLoss()
    other.load_state_dict(copy.deepcopy(loss.state_dict()))
    assert other.iteration.item() == 7
    assert other.iteration.dtype == torch.int64
    assert other.current_lambda == loss.current_lambda
    assert torch.equal(other(output, LABELS), loss(output, LABELS))
    assert other.half().iteration.dtype == torch.int64


def test_lambda_leads_from_w_softmax_to_the_margin(output):
    plain = WSoftmaxLoss("linear")(output, LABELS)
    margin = GASoftmaxLoss(annealing=None)(output, LABELS)
    annealed = [GASoftmaxLoss(annealing=Annealing(value, 0, 0))(output, LABELS) for value in (1e9, 10, 1, 0)]
    torch.testing.assert_close(annealed[0], plain)
    torch.testing.assert_close(annealed[-1], margin)
    assert plain < annealed[1] < annealed[2] < margin


def test_without_annealing_lambda_is_zero_and_nothing_is_counted(output):
    loss = GASoftmaxLoss(annealing=None)
    loss(output, LABELS)
    assert loss.current_lambda == 0
    assert loss.iteration.item() == 0


def test_the_schedule_may_be_replaced_during_a_run(output):
    loss = GASoftmaxLoss()
    loss(output, LABELS)
    loss.annealing = Annealing.for_run(50)
    assert loss.current_lambda == pytest.approx(Annealing.for_run(50).at(1))
    with pytest.raises(TypeError, match="annealing must be an Annealing or None, got 'off'"):
        loss.annealing = "off"
