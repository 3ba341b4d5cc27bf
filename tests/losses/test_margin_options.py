"""Options of margins: defaults, scale, detached gradient, margin forms and feature penalty."""

import itertools
import math
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from loss_cases import problem
from oracle import losses as reference_losses
from spherenet.angles import CustomAngle
from spherenet.layers.head import AngularHead
from spherenet.losses import (
    Annealing,
    ArcFaceLoss,
    ASoftmaxLoss,
    CosFaceLoss,
    GASoftmaxLoss,
    SphereFace2Loss,
    SSoftmaxLoss,
    default_scale,
    list_losses,
    make_loss,
)
from spherenet.ops.angular import AngularOutput

EPS = 1e-4
LABELS = torch.tensor([0, 1, 2, 3, 5])


@pytest.fixture
def output():
    """Return cosines at all angles, which require gradients, and norms."""
    cosine = torch.linspace(-0.99, 0.99, 30, dtype=torch.float64)[torch.randperm(30)].reshape(5, 6).requires_grad_()
    return AngularOutput(cosine, torch.rand(5, dtype=torch.float64) + 1, torch.ones(6, dtype=torch.float64))


def test_defaults_are_a_fixed_scale_and_a_detached_margin():
    for loss in (GASoftmaxLoss(), ASoftmaxLoss(), make_loss("ga-linear"), make_loss("a"), make_loss("sphereface-r2")):
        assert (loss.m, loss.scale, loss.margin_gradient, loss.annealing) == (1.5, "auto", "detached", None)
    assert SSoftmaxLoss().m == 1


def test_paper_is_the_printed_form():
    loss = GASoftmaxLoss.paper(angle="sigmoid", k=0.2)
    assert (loss.m, loss.scale, loss.margin_gradient, loss.form) == (4, "norm", "full", "psi")
    assert loss.annealing == Annealing.sphereface()
    assert loss.angle.k == 0.2
    assert type(ASoftmaxLoss.paper(m=3)) is ASoftmaxLoss
    assert ASoftmaxLoss.paper(m=3, annealing=None).m == 3


@pytest.mark.parametrize(
    ("angle", "similarity"),
    [("linear", 0.5), ("cosine", math.sqrt(0.5)), ("sigmoid", math.tanh(math.pi / 2.4) / math.tanh(math.pi / 1.2))],
)
@pytest.mark.parametrize("classes", [2, 10, 5000])
def test_default_scale_depends_on_classes_and_angle(angle, similarity, classes):
    expected = default_scale(classes, similarity)
    assert GASoftmaxLoss(angle).scale_for(classes) == pytest.approx(expected)
    assert SSoftmaxLoss(angle).scale_for(classes) == pytest.approx(expected)
    assert GASoftmaxLoss(angle, scale=12).scale_for(classes) == 12
    assert GASoftmaxLoss(angle, scale="norm").scale_for(classes) is None


@pytest.mark.parametrize("loss", [ArcFaceLoss, CosFaceLoss])
def test_face_losses_use_the_published_scale_from_1000_classes_on(loss):
    assert loss().scale_for(999) == default_scale(999)
    assert loss().scale_for(1000) == loss().scale_for(100_000) == 64
    assert loss(s=30).scale_for(1000) == 30
    cosine = torch.rand(2, 1000) * 2 - 1
    logits = loss().logits(AngularOutput(cosine, torch.ones(2), torch.ones(1000)))
    torch.testing.assert_close(logits, 64 * cosine)


@pytest.mark.parametrize("form", ["psi", "r1", "r2"])
@pytest.mark.parametrize("angle", ["linear", "cosine", "sigmoid"])
@pytest.mark.parametrize("soft", [False, True], ids=["hard", "soft"])
def test_detached_margin_has_the_value_of_the_full_one(output, angle, form, soft, path):
    labels = torch.rand(5, 6, dtype=torch.float64).softmax(1) if soft else LABELS
    full, detached = (
        GASoftmaxLoss(angle, 1.5, scale=9, margin_gradient=gradient, form=form)(output, labels)
        for gradient in ("full", "detached")
    )
    torch.testing.assert_close(full, detached)


@pytest.mark.parametrize("form", ["psi", "r1", "r2"])
@pytest.mark.parametrize("angle", ["linear", "cosine", "sigmoid"])
def test_detached_gradient_is_that_of_the_logits_without_a_margin(output, angle, form, path):
    """The gradient is Σ_j (p_j − [j = y])·s·g'(c_j), with the probabilities p of the logits with the margin."""
    s, loss = 9.0, GASoftmaxLoss(angle, 1.5, scale=9, form=form, reduction="sum")
    (gradient,) = torch.autograd.grad(loss(output, LABELS), output.cosine)
    targets = F.one_hot(LABELS, 6).bool()
    other, target = loss.other_similarity(output.cosine), loss.target_similarity(output.cosine)
    probabilities = (s * torch.where(targets, target, other)).softmax(1)
    expected = (probabilities - targets.double()) * s * loss.angle.derivative(output.cosine)
    torch.testing.assert_close(gradient, expected.detach())


@pytest.mark.parametrize("angle", ["linear", "cosine", "sigmoid"])
def test_r1_is_constant_beyond_pi_over_m(angle):
    loss = GASoftmaxLoss(angle, 2, form="r1")
    theta = torch.tensor([0.0, 0.3, math.pi / 2 - 1e-6, math.pi / 2 + 1e-6, 2.5, math.pi], dtype=torch.float64)
    value = loss.target_similarity(theta.cos())
    expected = loss.angle((2 * theta).clamp_max(math.pi).cos())
    torch.testing.assert_close(value, expected, atol=1e-5, rtol=0)
    assert value[3:].tolist() == pytest.approx([-1, -1, -1])


@pytest.mark.parametrize("angle", ["linear", "cosine", "sigmoid"])
def test_r2_has_its_margin_on_the_other_classes(angle):
    loss = GASoftmaxLoss(angle, 1.4, form="r2")
    assert loss.margin_on == "others"
    theta = torch.linspace(0, math.pi, 9, dtype=torch.float64)
    torch.testing.assert_close(loss.target_similarity(theta.cos()), loss.angle(theta.cos()))
    torch.testing.assert_close(loss.other_similarity(theta.cos()), loss.angle((theta / 1.4).cos()), atol=1e-7, rtol=0)
    assert (loss.other_similarity(theta.cos())[1:] > loss.angle(theta.cos())[1:]).all()


@pytest.mark.parametrize(
    ("form", "scale", "gradient"), list(itertools.product(("psi", "r1", "r2"), ("norm", 9), ("full", "detached")))
)
def test_margin_of_one_is_no_margin(output, form, scale, gradient, path):
    loss = GASoftmaxLoss("sigmoid", 1, scale=scale, form=form, margin_gradient=gradient)
    assert loss.margin_on == "none"
    expected = F.cross_entropy(loss.logits(output), LABELS)
    torch.testing.assert_close(loss(output, LABELS), expected)


def test_margin_raises_the_loss(output):
    plain = SSoftmaxLoss("linear", 9)(output, LABELS)
    for form, m in itertools.product(("psi", "r1", "r2"), (1.2, 2)):
        assert SSoftmaxLoss("linear", 9, m=m, form=form)(output, LABELS) > plain


def test_s_softmax_with_a_margin_is_ga_softmax_with_a_fixed_scale(output):
    for form in ("psi", "r1", "r2"):
        s_softmax = SSoftmaxLoss("sigmoid", 9, 0.2, m=2, form=form)
        ga_softmax = GASoftmaxLoss("sigmoid", 2, 0.2, scale=9, form=form)
        assert torch.equal(s_softmax(output, LABELS), ga_softmax(output, LABELS))
    assert "s=9.0" in repr(SSoftmaxLoss(s=9, m=2))


@pytest.mark.parametrize("penalty_form", ["squared", "absolute"])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("soft", [False, True], ids=["hard", "soft"])
def test_feature_penalty_is_added_to_the_loss(penalty_form, reduction, soft, path):
    x, w, b, labels = problem()
    labels = torch.rand(5, 6, dtype=torch.float64).softmax(1) if soft else labels
    head = AngularHead(4, 6, bias=True, dtype=torch.float64)
    output = torch.func.functional_call(head, {"weight": w, "bias": b}, x)
    options = {"scale": "norm", "reduction": reduction}
    loss = GASoftmaxLoss(**options, feature_penalty=0.05, feature_norm=3, penalty_form=penalty_form)
    penalties = 0.05 * reference_losses.feature_penalties(x, 3, penalty_form, EPS)
    penalty = {"none": penalties, "sum": penalties.sum(), "mean": penalties.mean()}[reduction]
    value, expected = loss(output, labels), GASoftmaxLoss(**options)(output, labels) + penalty
    torch.testing.assert_close(value, expected)
    for gradient, wanted in zip(
        torch.autograd.grad(value.sum(), (x, w), retain_graph=True),
        torch.autograd.grad(expected.sum(), (x, w)),
        strict=True,
    ):
        torch.testing.assert_close(gradient, wanted)
    assert torch.autograd.gradcheck(
        lambda x: GASoftmaxLoss("linear", 1, feature_penalty=0.05, penalty_form=penalty_form, scale="norm")(
            head(x), labels
        ),
        x,
    )


def test_feature_penalty_ignores_ignored_rows():
    x = torch.randn(4, 3)
    labels = torch.tensor([0, -100, 2, -100])
    head = AngularHead(3, 4)
    for reduction in ("mean", "sum"):
        loss = ASoftmaxLoss(scale="norm", feature_penalty=0.1, feature_norm=2, reduction=reduction)
        torch.testing.assert_close(loss(head(x), labels), loss(head(x[[0, 2]]), labels[[0, 2]]))
    each = ASoftmaxLoss(scale="norm", feature_penalty=0.1, feature_norm=2, reduction="none")(head(x), labels)
    assert each[[1, 3]].tolist() == [0, 0]


def test_feature_penalty_pulls_to_the_default_scale():
    loss = GASoftmaxLoss("linear", scale="norm", feature_penalty=0.01)
    target = default_scale(10, 0.5)
    norms = torch.tensor([target - 1, target, target + 1]).requires_grad_()
    output = AngularOutput(torch.zeros(3, 10), norms, torch.ones(10))
    labels = torch.zeros(3, dtype=torch.int64)
    plain = GASoftmaxLoss("linear", scale="norm")(output, labels)
    (gradient,) = torch.autograd.grad(loss(output, labels) - plain, norms)
    assert gradient.tolist() == pytest.approx([-0.02 / 3, 0, 0.02 / 3], abs=1e-7)


@pytest.mark.parametrize("norm", [0.0, 1e-30, 1.0, 1e15, 1e18, 1e20, 3e38])
@pytest.mark.parametrize("penalty_form", ["squared", "absolute"])
def test_feature_penalty_is_finite_for_any_norm(norm, penalty_form):
    x = (F.normalize(torch.ones(2, 3)) * norm).requires_grad_()
    loss = GASoftmaxLoss(scale="norm", feature_penalty=0.01, penalty_form=penalty_form)
    value = loss(AngularHead(3, 4)(x), torch.tensor([0, 1]))
    value.backward()
    assert value.isfinite()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("name", list_losses())
def test_loss_does_not_depend_on_the_number_of_calls(name):
    """Losses with running averages or random margins do in training mode (test_face_losses.py)."""
    loss, head = make_loss(name), AngularHead(4, 6)
    loss.train(name not in ("adaface", "curricularface", "elasticface"))
    x, labels = torch.randn(5, 4), torch.randint(6, (5,))
    first = loss(head(x), labels)
    for _ in range(3):
        loss(head(torch.randn(7, 4)), torch.randint(6, (7,))).backward()
    assert torch.equal(loss(head(x), labels), first)
    state = {"adaface": {"norm_mean", "norm_std"}, "curricularface": {"progress"}, "uniface": {"shift"}}
    assert set(loss.state_dict()) == state.get(name, set())


@pytest.mark.parametrize("name", list_losses())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_zero_features_extreme_angles_and_empty_batches(name, dtype, path):
    loss, head = make_loss(name, reduction="sum"), AngularHead(2, 3, dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]]))
    x = torch.tensor([[0.0, 0.0], [5.0, 0.0], [-5.0, 0.0], [0.0, 1e-20], [3.0, 1e-3]], dtype=dtype, requires_grad=True)
    value = loss(head(x), torch.zeros(5, dtype=torch.int64))
    value.backward()
    assert value.isfinite()
    assert x.grad.isfinite().all()
    assert head.weight.grad.isfinite().all()
    assert loss(head(x[:0]), torch.zeros(0, dtype=torch.int64)) == 0


PUBLISHED = {
    "sphereface": (Annealing.sphereface(), lambda t: max(5, 1000 / (1 + 0.12 * t))),
    "clcarwin": (Annealing.clcarwin(), lambda t: max(5, 1500 / (1 + 0.1 * t))),
    "l-softmax": (Annealing.l_softmax(), lambda t: 1000 * (1 + 2e-5 * t) ** -45),
}


@pytest.mark.parametrize(("schedule", "formula"), PUBLISHED.values(), ids=PUBLISHED)
def test_published_schedules(schedule, formula):
    for t in (0, 1, 10, 1_000, 1_658, 1_659, 20_000, 100_000):
        assert schedule.at(t) == pytest.approx(formula(t))


def test_lambda_5_with_m_4_equals_m_1_5_for_the_linear_angle(output):
    annealed = GASoftmaxLoss.paper(m=4)(output, LABELS)
    smaller = GASoftmaxLoss.paper(m=1.5, annealing=None)(output, LABELS)
    torch.testing.assert_close(annealed, smaller)


CONTRADICTIONS = {
    "penalty with a fixed scale": (
        lambda: GASoftmaxLoss(scale=30, feature_penalty=0.01),
        r'feature_penalty must be 0 unless scale is "norm", got 0.01 with scale=30',
    ),
    "penalty with the default scale": (lambda: ASoftmaxLoss(feature_penalty=0.01), "got 0.01 with scale='auto'"),
    "norm without penalty": (
        lambda: GASoftmaxLoss(scale="norm", feature_norm=30),
        "feature_norm must be left out unless feature_penalty is set, got 30",
    ),
    "negative penalty": (lambda: GASoftmaxLoss(scale="norm", feature_penalty=-1), "feature_penalty must be at least 0"),
    "norm of 0": (
        lambda: GASoftmaxLoss(scale="norm", feature_penalty=1, feature_norm=0), "feature_norm must be greater than 0",
    ),
    "penalty form": (lambda: GASoftmaxLoss(penalty_form="square"), "penalty_form must be one of.*mean 'squared'"),
    "form": (lambda: GASoftmaxLoss(form="r3"), "form must be one of 'psi', 'r1', 'r2', got 'r3'"),
    "gradient": (lambda: ASoftmaxLoss(margin_gradient="detach"), "margin_gradient must be.*Did you mean 'detached'"),
    "gradient of ArcFace": (lambda: ArcFaceLoss(margin_gradient="none"), "margin_gradient must be one of"),
    "scale of zero": (lambda: GASoftmaxLoss(scale=0), "scale must be greater than 0, got 0"),
    "scale by another name": (
        lambda: GASoftmaxLoss(scale="Norm"), 'scale must be "norm", "auto" or a number greater than 0, got \'Norm\'',
    ),
    "no default scale": (lambda: GASoftmaxLoss(CustomAngle(lambda theta: -theta)), "scale must be given.*got -0.785"),
    "m of S-Softmax": (lambda: SSoftmaxLoss(m=0.5), "m must be at least 1, got 0.5"),
    "power": (lambda: Annealing(power=-1), "power must be at least 0, got -1"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "message"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_contradictory_and_invalid_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()


UNKNOWN = {
    "s of GA": (lambda: GASoftmaxLoss(s=30), r"GASoftmaxLoss has no option 's'; did you mean 'scale'\?"),
    "scale of S": (lambda: SSoftmaxLoss(scale=30), r"SSoftmaxLoss has no option 'scale'; did you mean 's'\?"),
    "penalty of S": (lambda: SSoftmaxLoss(feature_penalty=0.1), "SSoftmaxLoss has no option 'feature_penalty'"),
    "form of the name": (lambda: make_loss("sphereface-r1", form="psi"), "'sphereface-r1' has no option 'form'"),
    "gradient of CosFace": (lambda: CosFaceLoss(margin_gradient="full"), "has no option 'margin_gradient'"),
    "scale of SphereFace2": (lambda: make_loss("sphereface2", r=30), r"no option 'r'; did you mean 's'\?"),
    "smoothing of SphereFace2": (lambda: make_loss("sphereface2", label_smoothing=0.1), "no option 'label_smoothing'"),
}


@pytest.mark.parametrize(("make", "message"), UNKNOWN.values(), ids=UNKNOWN)
def test_unknown_margin_options(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def train_accuracy(make, scale, steps=150):
    """Return the accuracy of a small network on noisy clusters of test points after training with a loss."""
    torch.manual_seed(0)
    centers = torch.randn(8, 16)

    def sample(count):
        labels = torch.randint(8, (count,))
        return centers[labels] + 1.3 * torch.randn(count, 16), labels

    network = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    head, loss = AngularHead(8, 8), make(scale=scale)
    optimizer = torch.optim.Adam([*network.parameters(), *head.parameters()], lr=5e-3)
    for _ in range(steps):
        points, labels = sample(64)
        optimizer.zero_grad()
        loss(head(network(points)), labels).backward()
        optimizer.step()
    points, labels = sample(4000)
    with torch.no_grad():
        return (head(network(points)).cosine.argmax(1) == labels).float().mean().item()


@pytest.mark.parametrize("scale", [10, 30])
def test_default_margin_costs_no_accuracy(scale):
    margin, plain = (train_accuracy(partial(GASoftmaxLoss, "linear", m), scale) for m in (1.5, 1))
    assert margin > plain - 0.02


@pytest.mark.parametrize("loss", [SSoftmaxLoss, CosFaceLoss, ArcFaceLoss, SphereFace2Loss])
def test_assigned_scale_is_that_of_the_constructor(output, loss):
    labels = torch.arange(len(output.cosine)) % output.cosine.shape[1]
    assigned, constructed = loss(s=10.0), loss(s=64.0)
    assigned.s = 64.0
    results = [case(output, labels, return_scores=True) for case in (assigned, constructed)]
    assert all(torch.equal(actual, expected) for actual, expected in zip(*results, strict=True))
    assert repr(assigned) == repr(constructed)
    with pytest.raises(ValueError, match=r"s must be greater than 0, got -1"):
        assigned.s = -1
    if loss is not SphereFace2Loss:
        assigned.s = None
        assert torch.equal(assigned(output, labels), loss()(output, labels))


def test_unsigned_labels_are_not_taken_for_ignored_ones():
    torch.manual_seed(0)
    head, features, labels = AngularHead(8, 200), torch.randn(4, 8), torch.tensor([156, 1, 2, 3])  # 156 = 256 - 100
    loss = GASoftmaxLoss(scale="norm", feature_penalty=1.0, reduction="none")
    assert torch.equal(loss(head(features), labels.to(torch.uint8)), loss(head(features), labels))
    with pytest.raises(ValueError, match=r"labels must be from 0 to 9 or ignore_index \(-100\), got 156"):
        loss(AngularHead(8, 10)(features), labels.to(torch.uint8))
