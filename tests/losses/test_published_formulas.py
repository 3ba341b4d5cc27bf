"""Agreement with pytorch-metric-learning, with the formulas of OpenSphere, and SphereFace2 with its formula."""

import math

import pytest
import torch
from pytorch_metric_learning import losses as metric_learning
from torch.nn import functional as F

from loss_cases import problem
from oracle import losses as reference_losses
from spherenet.layers.head import AngularHead
from spherenet.losses import (
    ArcFaceLoss,
    ASoftmaxLoss,
    CosFaceLoss,
    GASoftmaxLoss,
    SphereFace2Loss,
    SSoftmaxLoss,
    make_loss,
)

TINY_EPS = 1e-14  # the published formulas have none
EPS = 1e-4


def random_batch(samples=64, features=5, classes=7):
    x = torch.randn(samples, features, dtype=torch.float64, requires_grad=True)
    w = torch.randn(classes, features, dtype=torch.float64, requires_grad=True)
    return x, w, torch.randint(classes, (samples,))


def of_spherenet(loss, x, w, labels):
    head = AngularHead(x.shape[1], len(w), dtype=torch.float64, eps=TINY_EPS)
    return loss(torch.func.functional_call(head, {"weight": w}, x), labels)


def assert_same(value, expected, inputs, tolerance=1e-6):
    torch.testing.assert_close(value, expected, rtol=tolerance, atol=tolerance)
    gradients = torch.autograd.grad(value, inputs)
    for gradient, wanted in zip(gradients, torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=tolerance, atol=tolerance)


METRIC_LEARNING = {
    "arcface": (
        lambda c, d: metric_learning.ArcFaceLoss(c, d, margin=math.degrees(0.5), scale=20),
        ArcFaceLoss(0.5, 20),
    ),
    "cosface": (lambda c, d: metric_learning.CosFaceLoss(c, d, margin=0.35, scale=20), CosFaceLoss(0.35, 20)),
    "sphereface-2": (
        lambda c, d: metric_learning.SphereFaceLoss(c, d, margin=2, scale=1),
        ASoftmaxLoss.paper(m=2, annealing=None),
    ),
    "sphereface-4": (
        lambda c, d: metric_learning.SphereFaceLoss(c, d, margin=4, scale=1),
        ASoftmaxLoss.paper(m=4, annealing=None),
    ),
    "normalized softmax": (
        lambda c, d: metric_learning.NormalizedSoftmaxLoss(c, d, temperature=0.05),
        SSoftmaxLoss("cosine", 20),
    ),
}


@pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")  # of that library with NumPy 2
@pytest.mark.parametrize(("other", "ours"), METRIC_LEARNING.values(), ids=METRIC_LEARNING)
def test_pytorch_metric_learning(other, ours):
    x, w, labels = random_batch()
    # Beyond θ + m = π, ArcFace is another function there: discontinuous.
    inside = (F.cosine_similarity(x, w[labels]).detach().acos() + 0.5 < math.pi).nonzero().flatten()
    x, labels = x.detach()[inside].requires_grad_(), labels[inside]
    other = other(len(w), x.shape[1]).double()
    expected = torch.func.functional_call(other, {"W": w.T}, (x, labels))  # its weights are [features, classes]
    assert_same(of_spherenet(ours, x, w, labels), expected, (x, w), tolerance=1e-5)


def opensphere(x, w, labels, scale, similarity):
    """Cross entropy of scale·(cos θ + stopgrad(similarity(θ) − cos θ)) on normalized features and weights."""
    cosine = F.normalize(x) @ F.normalize(w).T
    theta, targets = cosine.detach().acos(), F.one_hot(labels, len(w)).bool()
    margin = similarity(theta, targets)
    scale = x.norm(dim=1, keepdim=True) if scale == "norm" else scale
    return F.cross_entropy(scale * (cosine + (margin - cosine.detach())), labels)


def multiplied(theta, targets, m):
    return torch.where(targets, m * theta, theta)


def sphereface(m):
    def similarity(theta, targets):
        phi = multiplied(theta, targets, m)
        j = (phi / math.pi).floor()
        return (-1) ** j * phi.cos() - 2 * j

    return similarity


OPENSPHERE = {
    "sphereface": (sphereface(1.7), 30, ASoftmaxLoss(1.7, scale=30)),
    "sphereface-norm": (sphereface(1.3), "norm", ASoftmaxLoss(1.3, scale="norm")),
    "sphereface-r1": (
        lambda theta, targets: multiplied(theta, targets, 1.5).clamp_max(math.pi).cos(),
        30,
        make_loss("sphereface-r1", m=1.5, scale=30),
    ),
    "sphereface-r2": (
        lambda theta, targets: torch.where(targets, theta, theta / 1.4).cos(),
        60,
        make_loss("sphereface-r2", m=1.4, scale=60),
    ),
    "sphereface-r2-norm": (
        lambda theta, targets: torch.where(targets, theta, theta / 1.4).cos(),
        "norm",
        make_loss("sphereface-r2", m=1.4, scale="norm"),
    ),
    "arcface": (
        lambda theta, targets: torch.where(targets, theta + 0.5, theta).cos(),
        30,
        ArcFaceLoss(0.5, 30, margin_gradient="detached"),
    ),
    "cosface": (lambda theta, targets: theta.cos() - 0.4 * targets, 30, CosFaceLoss(0.4, 30)),
}


@pytest.mark.parametrize(("similarity", "scale", "ours"), OPENSPHERE.values(), ids=OPENSPHERE)
def test_opensphere(similarity, scale, ours):
    x, w, labels = random_batch()
    inside = (F.cosine_similarity(x, w[labels]).detach().acos() + 0.5 < math.pi).nonzero().flatten()
    x, labels = x.detach()[inside].requires_grad_(), labels[inside]
    assert_same(of_spherenet(ours, x, w, labels), opensphere(x, w, labels, scale, similarity), (x, w))


def test_opensphere_ga_softmax():
    """s·(1 − 2φ/π) with φ = mθ for the target, and the gradient of φ = θ."""
    x, w, labels = random_batch()
    theta = (F.normalize(x) @ F.normalize(w).T).acos()
    phi = theta + (multiplied(theta, F.one_hot(labels, len(w)).bool(), 1.5) - theta).detach()
    expected = F.cross_entropy(30 * (1 - 2 * phi / math.pi), labels)
    assert_same(of_spherenet(GASoftmaxLoss("linear", 1.5, scale=30), x, w, labels), expected, (x, w))


def test_opensphere_soft_feature_normalization():
    x, w, labels = random_batch()
    loss = ASoftmaxLoss(1.3, form="r1", scale="norm", feature_penalty=0.01, feature_norm=30, penalty_form="absolute")
    expected = opensphere(
        x, w, labels, "norm", lambda theta, targets: multiplied(theta, targets, 1.3).clamp_max(math.pi).cos()
    )
    expected = expected + 0.01 * (x.norm(dim=1) - 30).abs().mean()
    assert_same(of_spherenet(loss, x, w, labels), expected, (x, w))


def test_opensphere_sphereface2():
    """Binary cross entropy over all classes, averaged over samples and classes and multiplied by C/s."""
    x, w, labels = random_batch()
    m, s, t, positive_weight = 0.3, 20.0, 3.0, 0.7
    cosine, targets = F.normalize(x) @ F.normalize(w).T, F.one_hot(labels, len(w)).double()
    with torch.no_grad():
        similarity = 2 * ((cosine + 1) / 2) ** t - 1 - m * (2 * targets - 1)
    loss = SphereFace2Loss(m, s, t, positive_weight)
    logits = s * (cosine + (similarity - cosine.detach())) + loss.initial_bias(len(w))
    weight = torch.where(targets == 1, positive_weight, 1 - positive_weight) * len(w) / s
    expected = F.binary_cross_entropy_with_logits(logits, targets, weight)
    assert_same(of_spherenet(loss, x, w, labels), expected, (x, w))


SPHEREFACE2 = [
    {"m": 0.4, "s": 30.0, "t": 3.0, "positive_weight": 0.7},
    {"m": 0.0, "s": 1.0, "t": 1.0, "positive_weight": 0.5},
    {"m": 0.2, "s": 8.0, "t": 2.5, "positive_weight": 0.9},
]


@pytest.mark.parametrize("options", SPHEREFACE2, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("soft", [False, True], ids=["hard", "soft"])
@pytest.mark.parametrize("gradient", ["full", "detached"])
def test_sphereface2_equals_its_formula(options, bias, soft, gradient, path):
    x, w, b, labels = problem(bias=bias)
    labels = torch.rand(5, 6, dtype=torch.float64).softmax(1) if soft else labels
    loss = SphereFace2Loss(**options, margin_gradient=gradient, reduction="none")
    head = AngularHead(4, 6, bias=bias, dtype=torch.float64, eps=EPS)
    parameters = {"weight": w} if b is None else {"weight": w, "bias": b}
    value, scores = loss(torch.func.functional_call(head, parameters, x), labels, return_scores=True)
    expected = reference_losses.sphereface2_losses(
        x, w, b, labels, **options, initial_bias=loss.initial_bias(6), eps=EPS, detached=gradient == "detached"
    )
    torch.testing.assert_close(value, expected)
    inputs = [tensor for tensor in (x, w, b) if tensor is not None]
    for got, wanted in zip(
        torch.autograd.grad(value.sum(), inputs, retain_graph=True),
        torch.autograd.grad(expected.sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted)
    assert torch.equal(scores, loss.logits(torch.func.functional_call(head, parameters, x)))
    if gradient == "full":
        assert torch.autograd.gradcheck(lambda x: loss(head(x), labels), x)
        assert torch.autograd.gradgradcheck(lambda x: loss(head(x), labels), x)


@pytest.mark.parametrize("options", [*SPHEREFACE2, {"m": 1.9, "s": 1000.0}], ids=str)
@pytest.mark.parametrize("classes", [2, 3, 10, 1_000_000])
def test_initial_bias_balances_positive_and_negative_gradients(options, classes):
    loss = SphereFace2Loss(**options)
    b, middle = loss.initial_bias(classes), 2 * 0.5**loss.t - 1
    positive = loss.s * (middle - loss.m) + b
    negative = loss.s * (middle + loss.m) + b
    log_sigmoid = lambda z: F.logsigmoid(torch.tensor(z, dtype=torch.float64)).item()  # noqa: E731
    left = math.log(loss.positive_weight) + log_sigmoid(-positive)
    right = math.log((1 - loss.positive_weight) * (classes - 1)) + log_sigmoid(negative)
    assert left == pytest.approx(right, rel=1e-9, abs=1e-9)


def test_sphereface2_reductions_ignored_rows_and_leading_dimensions():
    head, x, labels = AngularHead(4, 5), torch.randn(2, 3, 4), torch.randint(5, (2, 3))
    labels[0, 1] = -100
    each = SphereFace2Loss(reduction="none")(head(x), labels)
    assert each.shape == (2, 3)
    assert each[0, 1] == 0
    torch.testing.assert_close(SphereFace2Loss(reduction="sum")(head(x), labels), each.sum())
    torch.testing.assert_close(SphereFace2Loss()(head(x), labels), each.sum() / 5)
    one_hot = F.one_hot(labels.clamp_min(0), 5).float()
    torch.testing.assert_close(SphereFace2Loss(reduction="none")(head(x), one_hot)[1], each[1])
    assert SphereFace2Loss()(head(x), torch.full((2, 3), -100)).isnan()


def test_sphereface2_trains_the_bias_of_the_head():
    head = AngularHead(4, 5, bias=True)
    SphereFace2Loss()(head(torch.randn(6, 4)), torch.randint(5, (6,))).backward()
    assert (head.bias.grad != 0).all()


INVALID = {
    "m": (lambda: SphereFace2Loss(m=-0.1), "m must be at least 0 and less than 2, got -0.1"),
    "s": (lambda: SphereFace2Loss(s=0), "s must be greater than 0, got 0"),
    "t": (lambda: SphereFace2Loss(t=0.5), "t must be at least 1, got 0.5"),
    "weight": (lambda: SphereFace2Loss(positive_weight=1), "greater than 0 and less than 1, got 1"),
    "gradient": (lambda: SphereFace2Loss(margin_gradient="half"), "margin_gradient must be one of"),
}


@pytest.mark.parametrize(("make", "message"), INVALID.values(), ids=INVALID)
def test_invalid_options_of_sphereface2(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_sphereface2_separates_classes():
    torch.manual_seed(0)
    centers = F.normalize(torch.randn(5, 8))
    network, head, loss = torch.nn.Linear(8, 8), AngularHead(8, 5), SphereFace2Loss()
    optimizer = torch.optim.Adam([*network.parameters(), *head.parameters()], lr=0.02)
    for _ in range(150):
        labels = torch.randint(5, (32,))
        optimizer.zero_grad()
        loss(head(network(centers[labels] + 0.2 * torch.randn(32, 8))), labels).backward()
        optimizer.step()
    probabilities = loss.logits(head(network(centers))).sigmoid()
    assert (probabilities.argmax(1) == torch.arange(5)).all()
    assert (probabilities.diagonal() > 0.5).all()
