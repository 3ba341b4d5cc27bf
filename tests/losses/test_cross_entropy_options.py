"""Class weights, ignored labels, smoothing and reductions have the meaning of torch's cross entropy."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from loss_cases import COMMON, problem
from spherenet.layers.head import AngularHead
from spherenet.losses import CosFaceLoss, SoftmaxLoss, WSoftmaxLoss
from spherenet.ops.angular import AngularOutput

OPTIONS = [
    {"class_weight": weighted, "ignore_index": ignore, "label_smoothing": smoothing, "reduction": reduction}
    for weighted, ignore, smoothing, reduction in itertools.product(
        (False, True), (-100, 2), (0.0, 0.2, 1.0), ("mean", "sum", "none")
    )
]


def name(options):
    return "-".join(map(str, options.values()))


@pytest.mark.parametrize("options", OPTIONS, ids=name)
def test_softmax_loss_is_cross_entropy_of_the_inner_products(options, path):
    labels = torch.tensor([0, 1, 2, 2, 3, 4, 5])
    labels[1] = options["ignore_index"]
    assert_cross_entropy(options, labels)


@pytest.mark.parametrize("options", [options for options in OPTIONS if options["ignore_index"] < 0], ids=name)
def test_softmax_loss_is_cross_entropy_against_probabilities(options, path):
    assert_cross_entropy(options, torch.rand(7, 6, dtype=torch.float64).softmax(1))


def assert_cross_entropy(options, labels):
    """Assert equal values and gradients of softmax on an `AngularHead` and on a linear layer of torch."""
    x, w, b, _ = problem(samples=7)
    weight = torch.rand(6, dtype=torch.float64) if options["class_weight"] else None
    options = {**options, "class_weight": weight}
    head = AngularHead(4, 6, bias=True, dtype=torch.float64)
    output = torch.func.functional_call(head, {"weight": w, "bias": b}, x)
    value = SoftmaxLoss(**options)(output, labels)
    options.pop("class_weight")
    expected = F.cross_entropy(F.linear(x, w, b), labels, weight, **options)
    torch.testing.assert_close(value, expected)
    gradients = torch.autograd.grad(value.sum(), (x, w, b), retain_graph=True)
    for gradient, wanted in zip(gradients, torch.autograd.grad(expected.sum(), (x, w, b)), strict=True):
        torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("case", COMMON, ids=str)
def test_ignored_rows_have_no_gradient(case, path):
    x, w, b, labels = problem()
    labels[2] = -100
    head = AngularHead(4, 6, bias=True, dtype=torch.float64)
    output = torch.func.functional_call(head, {"weight": w, "bias": b}, x)
    (gradient,) = torch.autograd.grad(case.make()(output, labels), x)
    assert (gradient[2] == 0).all()
    assert (gradient[[0, 1, 3, 4]] != 0).any(1).all()


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 1, 4)], ids=str)
@pytest.mark.parametrize("soft", [False, True], ids=["hard", "soft"])
def test_leading_dimensions_are_kept(shape, soft, path):
    features = torch.randn(*shape, 4)
    head = AngularHead(4, 5)
    labels = torch.rand(*shape, 5).softmax(-1) if soft else torch.randint(5, shape)
    loss = CosFaceLoss(reduction="none")
    output = head(features)
    assert loss.logits(output).shape == (*shape, 5)
    value = loss(output, labels)
    assert value.shape == shape
    flat = loss(head(features.reshape(-1, 4)), labels.reshape(-1, 5) if soft else labels.reshape(-1))
    torch.testing.assert_close(value.flatten(), flat)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_class_indices_of_any_integer_type(dtype):
    output, labels = AngularHead(4, 5)(torch.randn(3, 4)), torch.randint(5, (3,))
    assert torch.equal(WSoftmaxLoss()(output, labels.to(dtype)), WSoftmaxLoss()(output, labels))


def test_mean_over_ignored_rows_only_is_nan_as_in_torch(path):
    output, labels = AngularHead(4, 5)(torch.randn(3, 4)), torch.full((3,), -100)
    assert WSoftmaxLoss()(output, labels).isnan()
    assert F.cross_entropy(output.cosine, labels).isnan()
    assert WSoftmaxLoss(reduction="sum")(output, labels) == 0


def test_empty_batch(path):
    output = AngularHead(4, 5)(torch.randn(0, 4))
    assert WSoftmaxLoss(reduction="sum")(output, torch.zeros(0, dtype=torch.int64)) == 0


def test_output_without_head_or_bias():
    cosine = torch.rand(3, 5)
    output = AngularOutput(cosine, torch.ones(3), torch.ones(5))
    torch.testing.assert_close(WSoftmaxLoss().logits(output), cosine)


def test_class_weights_are_not_saved_and_move_with_the_module():
    loss = WSoftmaxLoss(class_weight=torch.ones(5))
    assert loss.state_dict() == {}
    assert list(loss.parameters()) == []
    assert loss.double().class_weight.dtype == torch.float64
