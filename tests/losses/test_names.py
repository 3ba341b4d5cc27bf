"""Losses by name: what each name makes, which options it takes, what it refuses."""

import pytest

from spherenet.losses import (
    ASoftmaxLoss,
    CosFaceLoss,
    GASoftmaxLoss,
    SSoftmaxLoss,
    WSoftmaxLoss,
    list_losses,
    make_loss,
)


@pytest.mark.parametrize("name", list_losses())
def test_every_name_makes_its_loss(name):
    loss = make_loss(name, reduction="sum")
    assert loss.reduction == "sum"
    family, _, angle = name.partition("-")
    if angle:
        assert type(loss) is {"w": WSoftmaxLoss, "ga": GASoftmaxLoss, "s": SSoftmaxLoss}[family]
        assert loss.angle.name == angle


def test_the_names_of_the_papers_tables():
    assert set(list_losses()) >= {"softmax", "w-sigmoid", "w-linear", "w-cosine", "a", "ga-linear", "s-cosine"}


def test_options_reach_the_constructor():
    assert make_loss("w-sigmoid", k=0.7).angle.k == 0.7
    assert make_loss("a", m=3, annealing=None).m == 3
    assert make_loss("cosface", m=0.2, s=30).s == 30
    assert isinstance(make_loss("a"), ASoftmaxLoss)


def test_an_object_is_returned_as_it_is():
    loss = CosFaceLoss()
    assert make_loss(loss) is loss
    with pytest.raises(ValueError, match="options must be left out where loss is an object, got m"):
        make_loss(loss, m=0.2)


WRONG = {
    "unknown name": (lambda: make_loss("w-cosin"), ValueError, "loss must be one of.*got 'w-cosin'.*mean 'w-cosine'"),
    "another type": (lambda: make_loss(3), TypeError, "loss must be a name or an AngularLoss object, got 3"),
    "option of another loss": (lambda: make_loss("softmax", m=4), TypeError, "'m' is no option of the loss 'softmax'"),
    "option of no loss": (lambda: make_loss("a", margin=4), TypeError, "'margin'.*allowed: m, annealing, class_weight"),
    "angle beside its name": (lambda: make_loss("w-linear", angle="cosine"), TypeError, "'angle' is no option"),
    "k of a loss without": (lambda: make_loss("w-cosine", k=0.5), ValueError, "k must be left out"),
}


@pytest.mark.parametrize(("call", "error", "message"), WRONG.values(), ids=WRONG)
def test_wrong_names_and_options(call, error, message):
    with pytest.raises(error, match=message):
        call()
