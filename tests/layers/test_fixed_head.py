"""Heads with fixed directions: the simplex, training of features only, saving, invalid arguments."""

import copy

import pytest
import torch

import spherenet as sn


@pytest.mark.parametrize(("classes", "dim"), [(2, 1), (3, 2), (5, 4), (5, 9), (40, 39)])
def test_directions_are_a_simplex(classes, dim):
    directions = sn.etf_directions(classes, dim, dtype=torch.float64)
    expected = torch.full((classes, classes), -1 / (classes - 1), dtype=torch.float64).fill_diagonal_(1)
    torch.testing.assert_close(directions @ directions.T, expected, rtol=0, atol=1e-12)


def test_rotation_is_that_of_the_generator():
    first, second, other = (sn.etf_directions(4, 6, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.allclose(first, other)


@pytest.mark.parametrize("loss", sn.list_losses())
def test_every_loss_trains_features_and_not_the_directions(loss):
    head = sn.FixedHead.etf(6, 4, bias=loss == "softmax")
    before = head.weight.clone()
    features = torch.randn(8, 6, requires_grad=True)
    sn.make_loss(loss)(head(features), torch.randint(4, (8,))).backward()
    assert features.grad.any()
    assert head.weight.grad is None
    head.reset_parameters()
    assert torch.equal(head.weight, before)


def test_output_equals_that_of_an_angular_head():
    prototypes, features = torch.randn(3, 5), torch.randn(7, 5)
    head = sn.AngularHead(5, 3)
    head.load_state_dict({"weight": prototypes})
    fixed = sn.FixedHead(prototypes)
    torch.testing.assert_close(fixed(features).cosine, head(features).cosine)
    assert torch.equal(copy.deepcopy(fixed).weight, prototypes)
    prototypes.zero_()
    assert fixed.weight.any()


def test_directions_are_saved():
    first, second = sn.FixedHead.etf(5, 4), sn.FixedHead.etf(5, 4)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.weight, second.weight)
    assert sn.FixedHead.etf(5, 4, dtype=torch.float64).weight.dtype == torch.float64


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sn.etf_directions(5, 3), "dim must be at least num_classes - 1 = 4, got 3."),
        (lambda: sn.etf_directions(1, 3), "num_classes must be at least 2, got 1."),
        (lambda: sn.FixedHead(torch.ones(3)), r"prototypes must have the shape \[classes, features\], got \[3\]."),
        (lambda: sn.FixedHead(torch.eye(3)[[0, 1, 2]] * torch.tensor([[1.0], [0], [1]])), "got .* in row 1."),
        (lambda: sn.FixedHead(torch.ones(3, 2, dtype=torch.int64)), "prototypes must be a floating point tensor"),
    ],
)
def test_invalid_arguments(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
