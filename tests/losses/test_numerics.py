"""Finite losses and gradients for extreme angles, norms, scales and number formats."""

import math

import pytest
import torch

from loss_cases import COMMON, LOSSES
from spherenet.layers.head import AngularHead
from spherenet.losses import ArcFaceLoss, ASoftmaxLoss, GASoftmaxLoss, SoftmaxLoss, SSoftmaxLoss, WSoftmaxLoss

each_loss = pytest.mark.parametrize("case", COMMON, ids=str)


def head_of(weight, bias=False):
    head = AngularHead(weight.shape[1], len(weight), bias=bias, dtype=weight.dtype)
    with torch.no_grad():
        head.weight.copy_(weight)
    return head


def assert_finite(loss, head, features, labels):
    features = features.detach().requires_grad_()
    value = loss(head(features), labels)
    value.backward()
    assert value.isfinite(), value
    assert features.grad.isfinite().all()
    for parameter in head.parameters():
        assert parameter.grad.isfinite().all()
    return features.grad


@each_loss
@pytest.mark.parametrize("m", [None, 0], ids=["at-boundaries", "near-boundaries"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_angles_at_boundaries_of_psi(case, m, dtype, path):
    theta = torch.arange(5, dtype=torch.float64) * math.pi / 4
    theta = theta if m is None else (theta + 1e-4).clamp(0, math.pi)
    features = 3 * torch.stack([theta.cos(), theta.sin()], 1)
    head = head_of(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]]).to(dtype))
    gradient = assert_finite(case.make(), head, features.to(dtype), torch.zeros(5, dtype=torch.int64))
    # Bounded by |dψ/dθ| ≤ m·max|g'| and |ψ|.
    assert gradient.norm(dim=1).max() < 100


@each_loss
@pytest.mark.parametrize("norm", [1e-30, 1e-18, 1e-4, 1.0, 1e4, 1e10, 1e18, 1e21, 1e30, 3e38])
@pytest.mark.parametrize("weight_norm", [1e-30, 1.0, 1e18, 1e30])
def test_norms_from_tiny_to_huge(case, norm, weight_norm, path):
    weight = torch.nn.functional.normalize(torch.randn(4, 3)) * weight_norm
    features = torch.nn.functional.normalize(torch.randn(6, 3)) * norm
    assert_finite(case.make(label_smoothing=0.1), head_of(weight), features, torch.tensor([0, 1, 2, 3, 0, 1]))


@each_loss
def test_mixed_norms_in_one_batch(case, path):
    features = torch.nn.functional.normalize(torch.randn(6, 3)) * torch.tensor([0, 1e-30, 1, 1e4, 1e18, 1e30])[:, None]
    weight = torch.randn(4, 3) * torch.tensor([0, 1, 1e18, 1e30])[:, None]
    assert_finite(case.make(), head_of(weight, bias=True), features, torch.tensor([0, 1, 2, 3, 0, 1]))


@each_loss
def test_zero_features_have_a_finite_loss(case, path):
    features = torch.zeros(2, 3)
    loss = case.make()
    assert_finite(loss, head_of(torch.randn(4, 3)), features, torch.tensor([0, 3]))
    torch.testing.assert_close(loss.logits(AngularHead(3, 4)(features)), torch.zeros(2, 4))


@each_loss
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_with_large_norms(case, dtype, path):
    weight = torch.randn(5, 8)
    features = (torch.randn(6, 8) * 1e4 / 8**0.5).to(dtype)
    labels = torch.tensor([0, 1, 2, 3, 4, 0])
    features[0] = (weight[0] * 3e3).to(dtype)  # θ = 0 up to rounding
    features[1] = (-weight[1] * 3e3).to(dtype)  # θ = π
    head = head_of(weight.to(dtype), bias=True)
    gradient = assert_finite(case.make(), head, features, labels)
    assert gradient.dtype == dtype
    loss = case.make(reduction="none")
    value = loss(head(features), labels)
    assert value.dtype == torch.float32
    exact = loss(head_of(head.weight.double(), bias=True)(features.double()), labels)
    torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=0.05)


@each_loss
def test_half_precision_cosines_are_computed_in_float32(case):
    output = AngularHead(4, 3)(torch.randn(5, 4))
    rounded = type(output)(*(None if tensor is None else tensor.bfloat16() for tensor in output))
    value = case.make()(rounded, torch.tensor([0, 1, 2, 0, 1]))
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, case.make()(output, torch.tensor([0, 1, 2, 0, 1])), rtol=0.1, atol=0.1)


@each_loss
def test_autocast_changes_nothing(case, path):
    features, labels = torch.randn(5, 4, requires_grad=True), torch.tensor([0, 1, 2, 0, 1])
    head = AngularHead(4, 3, bias=True)
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            value = case.make(label_smoothing=0.1)(head(features), labels)
        results.append((value, *torch.autograd.grad(value, (features, *head.parameters()))))
    for plain, cast in zip(*results, strict=True):
        assert torch.equal(plain, cast)


@pytest.mark.parametrize("case", LOSSES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 100.0, 1e4])
def test_float32_agrees_with_float64(case, scale, path):
    features, weight, labels = torch.randn(8, 5) * scale, torch.randn(7, 5), torch.randint(7, (8,))
    results = []
    for dtype in (torch.float64, torch.float32):
        x = features.to(dtype).requires_grad_()
        head = head_of(weight.to(dtype))
        value = case.make()(head(x), labels)
        results.append((value, *torch.autograd.grad(value, (x, head.weight))))
    # A user-defined g as a function of cos φ loses half of its digits near φ = 0 and φ = π.
    tolerance = 1e-3 if "halved" in case.name else 3e-5
    for exact, single in zip(*results, strict=True):
        assert (single.double() - exact).abs().max() <= tolerance * exact.abs().max() + 1e-12


def test_feature_whose_squares_overflow_counts_as_zero():
    head = head_of(torch.eye(3))
    output = head(torch.tensor([[1e30, 0, 0], [0, 1e20, 0]]))
    assert output.cosine[0].tolist() == [0, 0, 0]
    assert output.feature_norm[0].item() == pytest.approx(0.01)
    assert output.cosine[1].tolist() == pytest.approx([0, 1, 0], rel=1e-4)
    assert output.feature_norm[1].item() == pytest.approx(1e20)


def test_product_of_two_huge_norms_is_limited():
    loss = SoftmaxLoss()
    logits = loss.logits(head_of(torch.eye(3) * 1e18)(torch.eye(3) * 1e18))
    assert logits.diagonal().tolist() == pytest.approx([torch.finfo(torch.float32).max ** 0.8] * 3)
    exact = loss.logits(head_of(torch.eye(3) * 1e12)(torch.eye(3) * 1e18))
    assert exact.diagonal().tolist() == pytest.approx([1e30] * 3)


@pytest.mark.parametrize(
    "loss",
    [
        GASoftmaxLoss.paper(annealing=None),
        ASoftmaxLoss.paper(annealing=None),
        ArcFaceLoss(),
        GASoftmaxLoss(),
        ASoftmaxLoss(),
    ],
)
def test_loss_increases_with_the_target_angle(loss):
    theta = torch.linspace(0, math.pi, 2001, dtype=torch.float64)
    features = torch.stack([theta.cos(), theta.sin() * 0.6, theta.sin() * 0.8], 1)
    # The other class is orthogonal to all features.
    head = head_of(torch.tensor([[1, 0, 0], [0, 0.8, -0.6]], dtype=torch.float64))
    loss.reduction = "none"
    value = loss(head(features), torch.zeros(2001, dtype=torch.int64))
    assert (value.diff() > 0).all()


@pytest.mark.parametrize(("classes", "expected"), [(2, 10.0), (10, 12.9), (1000, 19.5), (100_000, 26.0)])
def test_default_scale_grows_with_the_number_of_classes(classes, expected):
    assert SSoftmaxLoss().scale_for(classes) == pytest.approx(expected, abs=0.05)
    assert SSoftmaxLoss(s=30).scale_for(classes) == 30


@pytest.mark.parametrize("angle", ["linear", "cosine", "sigmoid"])
def test_default_scale_allows_high_confidence_at_45_degrees(angle):
    loss = SSoftmaxLoss(angle)
    output = AngularHead(101, 100)(torch.randn(1, 101))
    cosine = torch.zeros(1, 100)
    cosine[0, 0] = math.sqrt(0.5)
    probability = loss.logits(output._replace(cosine=cosine)).softmax(1)[0, 0].item()
    assert probability == pytest.approx(0.999, abs=1e-4)


def test_plain_softmax_keeps_cosines_beyond_one():
    output = AngularHead(3, 2)(torch.randn(1, 3))._replace(cosine=torch.tensor([[1.5, -1.5]]))
    assert SoftmaxLoss().logits(output)[0, 0] > WSoftmaxLoss().logits(output)[0, 0] * output.weight_norm[0]
