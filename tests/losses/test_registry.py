"""Losses by name: their classes, options and errors."""

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
def test_name_creates_its_loss(name):
    loss = make_loss(name, reduction="sum")
    assert loss.reduction == "sum"
    family, _, angle = name.partition("-")
    if angle in ("linear", "cosine", "sigmoid"):
        assert type(loss) is {"w": WSoftmaxLoss, "ga": GASoftmaxLoss, "s": SSoftmaxLoss}[family]
        assert loss.angle.name == angle


def test_names_of_the_tables_of_the_paper():
    assert set(list_losses()) >= {"softmax", "w-sigmoid", "w-linear", "w-cosine", "a", "ga-linear", "s-cosine"}


def test_options_are_passed_to_the_constructor():
    assert make_loss("w-sigmoid", k=0.7).angle.k == 0.7
    assert make_loss("a", m=3, annealing=None).m == 3
    assert make_loss("cosface", m=0.2, s=30).s == 30
    assert isinstance(make_loss("a"), ASoftmaxLoss)


def test_loss_object_is_returned_as_it_is():
    loss = CosFaceLoss()
    assert make_loss(loss) is loss
    with pytest.raises(ValueError, match="options must be left out if loss is an object, got m"):
        make_loss(loss, m=0.2)


INVALID = {
    "unknown name": (lambda: make_loss("w-cosin"), ValueError, "loss must be one of.*got 'w-cosin'.*mean 'w-cosine'"),
    "another type": (lambda: make_loss(3), TypeError, "loss must be a name or an AngularLoss object, got 3"),
    "option of another loss": (lambda: make_loss("softmax", m=4), TypeError, "Loss 'softmax' has no option 'm'"),
    "option of no loss": (
        lambda: make_loss("a", margin=4),
        TypeError,
        r"Loss 'a' has no option 'margin'; did you mean 'm'\? Allowed: m, class_weight.*, margin_gradient.*, scale",
    ),
    "angle in addition to the name": (
        lambda: make_loss("w-linear", angle="cosine"), TypeError, "'w-linear' has no option 'angle'",
    ),
    "k of a loss without k": (lambda: make_loss("w-cosine", k=0.5), ValueError, "k must be None for the cosine"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), INVALID.values(), ids=INVALID)
def test_invalid_names_and_options(call, error, message):
    with pytest.raises(error, match=message):
        call()
