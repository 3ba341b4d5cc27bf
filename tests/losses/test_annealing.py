"""λ of a margin loss: its schedule, who sets it, and its effect on the loss."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from oracle import losses as reference_losses
from spherenet.layers.head import AngularHead
from spherenet.losses import Annealing, ASoftmaxLoss, GASoftmaxLoss, WSoftmaxLoss

LABELS = torch.tensor([0, 1, 2])


@pytest.fixture
def output():
    return AngularHead(4, 3, dtype=torch.float64)(torch.randn(3, 4, dtype=torch.float64))


def test_schedule_equals_the_formula():
    schedule = Annealing(100, 0.2, 5)
    for t in (0, 1, 10, 94, 95, 96, 10_000):
        assert schedule.at(t) == reference_losses.annealed(t, 100, 0.2, 5)


def test_runs_of_any_length_have_the_same_lambda_at_the_same_fraction():
    short, long = Annealing.for_run(600), Annealing.for_run(64_000)
    for fraction in (0, 0.01, 0.05, 0.1, 1 / 6, 0.5, 1):
        assert short.at(fraction * 600) == pytest.approx(long.at(fraction * 64_000))
    assert long.at(64_000 / 6 - 10) > 5
    assert long.at(64_000 / 6) == pytest.approx(5)
    assert short.decay == pytest.approx(0.2, rel=0.06)


def test_for_run_with_other_start_floor_and_fraction():
    schedule = Annealing.for_run(1000, start=50, floor=1, floor_at=0.5)
    assert schedule.at(0) == 50
    assert schedule.at(499) > 1
    assert schedule.at(500) == pytest.approx(1)


def test_set_step_sets_lambda():
    loss = GASoftmaxLoss.paper()
    for step in (0, 1, 7, 10_000, 3):
        loss.set_step(step)
        assert loss.lambda_ == Annealing.sphereface().at(step)
        assert type(loss.lambda_) is float


def test_lambda_is_the_floor_until_set_step_is_called():
    assert GASoftmaxLoss.paper().lambda_ == 5
    assert ASoftmaxLoss.paper(annealing=Annealing(50, 0.1, 1)).lambda_ == 1
    assert GASoftmaxLoss.paper(annealing=None).lambda_ == 0


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_loss_does_not_depend_on_the_number_of_calls(output, train):
    loss = GASoftmaxLoss.paper().train(train)
    loss.set_step(2)
    first = loss(output, LABELS)
    for _ in range(5):
        assert torch.equal(loss(output, LABELS), first)
    assert loss.lambda_ == Annealing.sphereface().at(2)


def test_lambda_can_be_assigned(output):
    loss, scheduled = GASoftmaxLoss.paper(annealing=None), GASoftmaxLoss.paper(annealing=Annealing(8, 0, 8))
    loss.lambda_ = 8.0
    assert torch.equal(loss(output, LABELS), scheduled(output, LABELS))
    loss.set_step(3)  # no schedule: λ stays as it is
    assert loss.lambda_ == 8


def test_the_step_can_change_between_forward_and_backward():
    loss, head = GASoftmaxLoss.paper(), AngularHead(4, 3)
    loss.set_step(0)
    value = loss(head(torch.randn(3, 4)), LABELS)
    loss.set_step(1)
    value.backward()
    assert head.weight.grad.isfinite().all()


def test_loss_has_no_state():
    assert GASoftmaxLoss.paper().state_dict() == {}


def test_lambda_leads_from_w_softmax_to_the_margin(output):
    plain = WSoftmaxLoss("linear")(output, LABELS)
    margin = GASoftmaxLoss.paper(annealing=None)(output, LABELS)
    annealed = [GASoftmaxLoss.paper(annealing=Annealing(value, 0, value))(output, LABELS) for value in (1e9, 10, 1, 0)]
    torch.testing.assert_close(annealed[0], plain)
    torch.testing.assert_close(annealed[-1], margin)
    assert plain < annealed[1] < annealed[2] < margin


def test_schedule_can_be_replaced():
    loss = GASoftmaxLoss.paper()
    loss.set_step(1)
    loss.annealing = Annealing.for_run(50, floor=2)
    assert loss.lambda_ == 2
    loss.set_step(1)
    assert loss.lambda_ == pytest.approx(Annealing.for_run(50, floor=2).at(1))
    with pytest.raises(TypeError, match="annealing must be an Annealing or None, got 'off'"):
        loss.annealing = "off"
    loss.annealing = None
    assert loss.lambda_ == 0


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_changing_lambda_compiles_at_most_twice(backend):
    torch._dynamo.reset()
    head, loss, x = AngularHead(4, 3), GASoftmaxLoss.paper(), torch.randn(3, 4)
    compilations = CompileCounterWithBackend(backend)
    compiled = torch.compile(lambda x: loss(head(x), LABELS), backend=compilations, fullgraph=True)
    for step in range(12):
        loss.set_step(step)
        torch.testing.assert_close(compiled(x), loss(head(x), LABELS))
    assert compilations.frame_count <= 2
