"""Each loss equals a slow loop over its formula in float64, value and gradient, in both implementations."""

from functools import partial

import pytest
import torch

from loss_cases import COMMON, LOSSES, problem
from oracle import losses as reference_losses
from spherenet.angles import LearnableSigmoidAngle, SigmoidAngle
from spherenet.layers.head import AngularHead
from spherenet.losses import ASoftmaxLoss, GASoftmaxLoss, WSoftmaxLoss

EPS = 1e-4


def run(loss, x, w, b, labels):
    """Return the loss of a head whose parameters are the given tensors."""
    head = AngularHead(x.shape[-1], len(w), bias=b is not None, dtype=x.dtype, eps=EPS)
    parameters = {"weight": w} if b is None else {"weight": w, "bias": b}
    return loss(torch.func.functional_call(head, parameters, x), labels)


def assert_same(value, expected, inputs):
    """Assert equal values, and equal gradients for random output gradients."""
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)
    inputs = [tensor for tensor in inputs if tensor is not None]
    weights = torch.randn_like(value)
    gradients = torch.autograd.grad(value, inputs, weights)
    for gradient, wanted in zip(gradients, torch.autograd.grad(expected, inputs, weights), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("case", LOSSES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_hard_labels(case, bias, path):
    x, w, b, labels = problem(bias=bias)
    expected = reference_losses.sample_losses(x, w, b, labels, case.formula, EPS)
    assert_same(run(case.make(reduction="none"), x, w, b, labels), expected, (x, w, b))


@pytest.mark.parametrize("case", LOSSES, ids=str)
def test_soft_labels(case, path):
    x, w, b, _ = problem()
    q = torch.rand(5, 6, dtype=torch.float64).softmax(1)
    expected = reference_losses.sample_losses(x, w, b, q, case.formula, EPS)
    assert_same(run(case.make(reduction="none"), x, w, b, q), expected, (x, w, b))


@pytest.mark.parametrize("case", COMMON, ids=str)
@pytest.mark.parametrize("soft", [False, True], ids=["hard", "soft"])
def test_label_smoothing_and_class_weights(case, soft, path):
    x, w, b, labels = problem()
    labels = torch.rand(5, 6, dtype=torch.float64).softmax(1) if soft else labels
    class_weight = torch.rand(6, dtype=torch.float64)
    expected = reference_losses.sample_losses(x, w, b, labels, case.formula, EPS, class_weight.tolist(), 0.1)
    loss = case.make(reduction="none", label_smoothing=0.1, class_weight=class_weight)
    assert_same(run(loss, x, w, b, labels), expected, (x, w, b))


@pytest.mark.parametrize("case", COMMON, ids=str)
def test_one_hot_probabilities_are_hard_labels(case):
    x, w, b, labels = problem()
    hard = run(case.make(), x, w, b, labels)
    torch.testing.assert_close(run(case.make(), x, w, b, torch.eye(6, dtype=x.dtype)[labels]), hard)


@pytest.mark.parametrize("angle", ["linear", "cosine", "sigmoid"])
def test_ga_softmax_with_margin_one_is_w_softmax(angle, path):
    x, w, b, labels = problem()
    ga, plain = GASoftmaxLoss(angle, 1, scale="norm", reduction="none"), WSoftmaxLoss(angle, reduction="none")
    assert_same(run(ga, x, w, b, labels), run(plain, x, w, b, labels), (x, w, b))


def test_a_softmax_is_cosine_ga_softmax():
    x, w, b, labels = problem()
    assert torch.equal(run(ASoftmaxLoss(3), x, w, b, labels), run(GASoftmaxLoss("cosine", 3), x, w, b, labels))


def test_learned_k_per_class_applies_to_its_own_target():
    x, w, _, labels = problem(bias=False)
    angle = LearnableSigmoidAngle(6, dtype=torch.float64)
    with torch.no_grad():
        angle.raw_k.copy_(torch.linspace(-1, 1, 6))
    head = AngularHead(4, 6, dtype=torch.float64)
    output = torch.func.functional_call(head, {"weight": w}, x)
    paper = partial(GASoftmaxLoss.paper, m=3, annealing=None)
    loss = paper(angle=angle, reduction="none")(output, labels)
    for row, label in enumerate(labels):
        logits = torch.stack([
            paper(angle=SigmoidAngle(k)).target_similarity(output.cosine[row, j])
            if j == label
            else SigmoidAngle(k)(output.cosine[row, j])
            for j, k in enumerate(angle.k.tolist())
        ])  # fmt: skip
        expected = torch.nn.functional.cross_entropy(logits * output.feature_norm[row], label)
        torch.testing.assert_close(loss[row], expected)
    loss.sum().backward()
    assert (angle.raw_k.grad != 0).all()


@pytest.mark.parametrize("case", LOSSES, ids=str)
def test_scores_are_the_logits_without_margin(case):
    x, w, b, _ = problem()
    head = AngularHead(4, 6, bias=True, dtype=torch.float64, eps=EPS)
    output = torch.func.functional_call(head, {"weight": w, "bias": b}, x)
    score = case.score or case.formula[0]
    expected = [
        [score(output.cosine[i, j].acos(), output.feature_norm[i], output.weight_norm[j]) + b[j] for j in range(6)]
        for i in range(5)
    ]
    torch.testing.assert_close(case.make().logits(output), torch.stack([torch.stack(row) for row in expected]))
