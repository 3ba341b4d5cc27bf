"""AdaFace, MagFace, CurricularFace, ElasticFace, sub-center ArcFace and UniFace: formulas, state, edges."""

import copy
import math
from functools import partial

import pytest
import torch
from pytorch_metric_learning import losses as metric_learning

import spherenet as sn
from loss_cases import problem
from oracle import losses as reference_losses
from spherenet.layers.head import AngularHead
from spherenet.losses import (
    AdaFaceLoss,
    ArcFaceLoss,
    CosFaceLoss,
    CurricularFaceLoss,
    ElasticFaceLoss,
    MagFaceLoss,
    SubcenterArcFaceLoss,
    UniFaceLoss,
)

EPS = 1e-4
FACE_LOSSES = ["adaface", "magface", "curricularface", "elasticface", "subcenter-arcface", "uniface"]
each_face_loss = pytest.mark.parametrize("name", FACE_LOSSES)


def run(loss, x, w, b, labels, **options):
    """Return the loss of a head whose parameters are the given tensors."""
    head = AngularHead(
        x.shape[-1], len(w), b is not None, directions=w.shape[1] if w.dim() == 3 else 1, dtype=x.dtype, eps=EPS
    )
    parameters = {"weight": w} if b is None else {"weight": w, "bias": b}
    return loss(torch.func.functional_call(head, parameters, x), labels, **options)


def assert_same(value, expected, inputs):
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)
    inputs = [tensor for tensor in inputs if tensor is not None]
    weights = torch.randn_like(value)
    gradients = torch.autograd.grad(value, inputs, weights)
    for gradient, wanted in zip(gradients, torch.autograd.grad(expected, inputs, weights), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-8, atol=1e-9)


# --- formulas ---


@pytest.mark.parametrize("t", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_curricularface_equals_its_formula(t, bias, path):
    x, w, b, labels = problem(samples=12, bias=bias)
    loss = CurricularFaceLoss(0.5, 9, reduction="none").eval()
    loss.progress.fill_(t)
    expected = reference_losses.curricularface_losses(x, w, b, labels, 0.5, 9, loss.progress.item(), EPS)
    assert_same(run(loss, x, w, b, labels), expected, (x, w, b))
    hard = reference_losses.sample_losses(x, w, b, labels, reference_losses.arcface(0.5, 9), EPS)
    assert (expected - hard).abs().max() > 1e-3  # some classes were hard


def test_curricularface_takes_class_indices_only():
    x, w, b, _ = problem()
    with pytest.raises(TypeError, match=r"^labels must be class indices \(int64\) for CurricularFaceLoss, got"):
        run(CurricularFaceLoss(), x, w, b, torch.full((5, 6), 1 / 6, dtype=torch.float64))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_magface_adds_its_term_of_the_norms(reduction, path):
    x, w, b, labels = problem(samples=8)
    loss = MagFaceLoss(0.45, 9, 0.8, 1.0, 3.0, norm_weight=2.5, reduction=reduction)
    expected = reference_losses.sample_losses(x, w, b, labels, reference_losses.magface(0.45, 0.8, 9, 1.0, 3.0), EPS)
    expected = expected + reference_losses.magface_penalties(x, 2.5, 1.0, 3.0, EPS)
    assert_same(
        run(loss, x, w, b, labels), expected if reduction == "none" else getattr(expected, reduction)(), (x, w, b)
    )


@pytest.mark.parametrize("sort", [False, True], ids=["random", "sorted"])
@pytest.mark.parametrize("form", ["arc", "cos"])
def test_elasticface_draws_a_margin_per_row(form, sort, path):
    x, w, _, labels = problem(samples=9, bias=False)
    loss = ElasticFaceLoss(0.4, 9, 0.2, form=form, sort=sort, reduction="none")
    value = run(lambda *arguments: torch.manual_seed(5) and loss(*arguments), x, w, None, labels)
    torch.manual_seed(5)
    margins = 0.4 + 0.2 * torch.randn(9, dtype=torch.float64)
    if sort:  # the row with the largest cosine gets the smallest margin
        cosine = torch.cosine_similarity(x, w[labels])
        sorted_margins = sorted(margins.tolist())
        order = sorted(range(9), key=lambda row: -cosine[row].item())
        margins = torch.tensor([sorted_margins[order.index(row)] for row in range(9)], dtype=torch.float64)
    expected = reference_losses.elasticface_losses(x, w, labels, margins.tolist(), 9, form, EPS)
    assert_same(value, expected, (x, w))


def test_elasticface_without_spread_is_arcface_or_cosface(path):
    x, w, b, labels = problem()
    for form, plain in (("arc", ArcFaceLoss(0.5, 9)), ("cos", CosFaceLoss(0.35, 9))):
        assert_same(run(ElasticFaceLoss(None, 9, 0, form=form), x, w, b, labels), run(plain, x, w, b, labels), (x, w))


@pytest.mark.parametrize("directions", [2, 3])
def test_subcenter_arcface_equals_its_formula(directions, path):
    x, _, _, labels = problem()
    w = torch.randn(6, directions, 4, dtype=torch.float64, requires_grad=True)
    expected = reference_losses.subcenter_arcface_losses(x, w, labels, 0.5, 9, EPS)
    loss = SubcenterArcFaceLoss(0.5, 9, directions, reduction="none")
    assert_same(run(loss, x, w, None, labels), expected, (x, w))
    assert torch.autograd.gradcheck(lambda x, w: run(loss, x, w, None, labels), (x, w))


@pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")  # of that library with NumPy 2
def test_subcenter_arcface_equals_pytorch_metric_learning():
    x, w = torch.randn(64, 5, dtype=torch.float64), torch.randn(7, 3, 5, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(7, (64,))
    nearest = torch.cosine_similarity(x[:, None], w[labels], dim=2).amax(1).detach()
    inside = nearest.acos() + 0.5 < math.pi  # beyond, ArcFace is another function there
    x, labels = x[inside].requires_grad_(), labels[inside]
    other = metric_learning.SubCenterArcFaceLoss(
        num_classes=7, embedding_size=5, margin=math.degrees(0.5), scale=20, sub_centers=3
    ).double()
    expected = torch.func.functional_call(other, {"W": w.flatten(0, 1).T}, (x, labels))
    head = AngularHead(5, 7, directions=3, dtype=torch.float64, eps=1e-14)
    value = SubcenterArcFaceLoss(0.5, 20)(torch.func.functional_call(head, {"weight": w}, x), labels)
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
    for got, wanted in zip(torch.autograd.grad(value, (x, w)), torch.autograd.grad(expected, (x, w)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("soft", [False, True], ids=["hard", "soft"])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_uniface_equals_its_formula(soft, bias, path):
    x, w, b, labels = problem(bias=bias)
    labels = torch.rand(5, 6, dtype=torch.float64).softmax(1) if soft else labels
    loss = UniFaceLoss(0.3, 9, 0.7, reduction="none").double()
    with torch.no_grad():
        loss.shift.fill_(-1.5)
    value, scores = run(loss, x, w, b, labels, return_scores=True)
    threshold = math.log(60) + loss.shift
    expected = reference_losses.uniface_losses(x, w, b, labels, 0.3, 9, 0.7, threshold, EPS)
    assert_same(value, expected, (x, w, b, loss.shift))
    cosine = torch.cosine_similarity(x[:, None], w[None], dim=2)
    torch.testing.assert_close(scores, 9 * cosine - threshold + (0 if b is None else b), rtol=1e-3, atol=1e-3)


def test_thresholds_and_directions_belong_to_the_model():
    model = sn.create_model("cnn-3", widths=(2, 2, 2), loss="uniface")
    assert "criterion.shift" in dict(model.named_parameters())
    assert not [group for group in sn.param_groups(model, 0.1) if group["weight_decay"] and group["params"]
                and any(p is model.criterion.shift for p in group["params"])]  # fmt: skip
    model = sn.create_model("cnn-3", widths=(2, 2, 2), loss="subcenter-arcface", loss_options={"subcenters": 4})
    assert model.head.weight.shape == (10, 4, 256)
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(sn.freeze(model.eval())(images), model(images))


# --- state ---


def direct_statistics(batches, momentum):
    mean, std = 20.0, 100.0
    for norms in batches:
        mean += momentum * (norms.mean().item() - mean)
        std += momentum * (norms.std().item() - std)
    return mean, std


def test_adaface_keeps_running_statistics_of_the_norms():
    loss, head = AdaFaceLoss(momentum=0.3, ignore_index=9), AngularHead(4, 6)
    batches = [torch.randn(8, 4) * scale for scale in (1, 5, 3)]
    for x in batches:
        labels = torch.randint(6, (8,))
        labels[2] = 9
        loss(head(x), labels)
    counted = [head(x).feature_norm[torch.arange(8) != 2] for x in batches]
    expected = direct_statistics(counted, 0.3)
    assert (loss.norm_mean.item(), loss.norm_std.item()) == pytest.approx(expected, rel=1e-5)


def test_curricularface_keeps_the_average_cosine_of_the_labels():
    loss, head, t = CurricularFaceLoss(momentum=0.3), AngularHead(4, 6), 0.0
    for _ in range(3):
        x, labels = torch.randn(8, 4), torch.randint(6, (8,))
        loss(head(x), labels)
        t += 0.3 * (head(x).cosine.gather(1, labels[:, None]).mean().item() - t)
    assert loss.progress.item() == pytest.approx(t, rel=1e-5)


@pytest.mark.parametrize("make", [partial(AdaFaceLoss, momentum=0.5), partial(CurricularFaceLoss, momentum=0.5)])
def test_state_is_saved_resumed_and_kept_in_evaluation_mode(make):
    loss, head = make(), AngularHead(4, 6)
    x, labels = torch.randn(8, 4), torch.randint(6, (8,))
    loss(head(x), labels)
    resumed = make()
    resumed.load_state_dict(copy.deepcopy(loss.state_dict()))
    assert torch.equal(resumed(head(x), labels), loss(head(x), labels))
    loss.eval()
    before = copy.deepcopy(loss.state_dict())
    assert torch.equal(loss(head(x), labels), loss(head(x), labels))
    assert all(torch.equal(before[name], value) for name, value in loss.state_dict().items())
    loss.train()(head(x[:0]), labels[:0])  # no rows: the state stays
    loss(head(x), torch.full_like(labels, -100))  # no row counts
    assert all(torch.equal(before[name], value) for name, value in loss.state_dict().items())
    assert all(buffer.dtype == torch.float32 for buffer in loss.bfloat16().buffers())
    assert all(torch.equal(before[name], value) for name, value in loss.state_dict().items())


@pytest.mark.parametrize("make", [AdaFaceLoss, CurricularFaceLoss])
def test_a_batch_that_is_not_finite_does_not_change_the_state(make):
    loss, head = make(momentum=0.5), AngularHead(4, 6)
    x, labels = torch.randn(8, 4), torch.randint(6, (8,))
    loss(head(x), labels)
    before = copy.deepcopy(loss.state_dict())
    loss(head(x * math.nan), labels)
    assert all(torch.equal(before[name], state) for name, state in loss.state_dict().items())
    assert loss(head(x), labels).isfinite()


# --- edges ---


def loss_and_head(name, classes=4, dtype=torch.float32):
    loss = sn.make_loss(name)
    return loss, AngularHead(3, classes, directions=loss.directions, dtype=dtype)


@each_face_loss
def test_a_single_class_is_refused_and_one_sample_works(name):
    loss, head = loss_and_head(name)
    output = head(torch.randn(1, 3))
    assert loss(output, torch.tensor([2])).isfinite()
    with pytest.raises(ValueError, match=r"output.cosine must have at least 2 classes"):
        loss(output._replace(cosine=output.cosine[:, :1]), torch.tensor([0]))


@each_face_loss
@pytest.mark.parametrize("sign", [1, -1], ids=["0", "pi"])
@pytest.mark.parametrize("norm", [0.0, 1e-12, 1.0, 1e3, 1e18])
def test_finite_at_angles_of_zero_and_pi(name, sign, norm):
    loss, head = loss_and_head(name)
    with torch.no_grad():
        head.weight.copy_(torch.eye(4, 3).reshape(4, *(1,) * (head.weight.dim() - 2), 3).expand_as(head.weight))
    x = (sign * norm * torch.eye(3)).requires_grad_()
    value = loss(head(x), torch.tensor([0, 1, 2]))
    value.backward()
    assert value.isfinite()
    assert x.grad.isfinite().all()
    assert head.weight.grad.isfinite().all()


@each_face_loss
def test_half_precision_features_give_the_loss_of_their_values(name):
    loss, head = loss_and_head(name)
    loss.eval()
    x, labels = torch.randn(6, 3).bfloat16(), torch.randint(4, (6,))
    value = loss(head(x), labels)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, loss(head(x.float()), labels))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(loss(head(x), labels), value)


@each_face_loss
def test_gradcheck_in_evaluation_mode(name):
    loss, _ = loss_and_head(name)
    loss = loss.eval().double()
    x = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, *((3,) if loss.directions > 1 else ()), 3, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 3, 1])
    inputs = (x.detach() if name == "adaface" else x, w)  # its quality has no gradient; the oracle covers that
    assert torch.autograd.gradcheck(lambda x, w: run(loss, x, w, None, labels), inputs)


@each_face_loss
def test_compiled_loss_equals_the_loss_and_updates_its_state(name):
    torch._dynamo.reset()
    loss, head = loss_and_head(name)
    loss.train(name != "elasticface")
    other, labels = copy.deepcopy(loss), torch.randint(4, (5,))
    compiled = torch.compile(lambda x: other(head(x), labels), backend="aot_eager", fullgraph=True)
    for _ in range(2):
        x = torch.randn(5, 3, requires_grad=True)
        expected, value = loss(head(x), labels), compiled(x)
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(*torch.autograd.grad(value, x), *torch.autograd.grad(expected, x))
    for mine, others in zip(loss.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(mine, others)


INVALID = {
    "m of AdaFace": (lambda: AdaFaceLoss(1), "m must be at least 0 and less than 1, got 1"),
    "h": (lambda: AdaFaceLoss(h=0), "h must be greater than 0, got 0"),
    "momentum": (lambda: AdaFaceLoss(momentum=0), "momentum must be greater than 0 and at most 1, got 0"),
    "momentum of CurricularFace": (lambda: CurricularFaceLoss(momentum=2), "momentum must be.*at most 1, got 2"),
    "m of CurricularFace": (lambda: CurricularFaceLoss(4), "m must be at least 0 and less than π, got 4"),
    "m of MagFace": (lambda: MagFaceLoss(-0.1), "m must be at least 0, got -0.1"),
    "largest m": (lambda: MagFaceLoss(largest_m=0.1), r"largest_m must be at least m \(0.45\).*got 0.1"),
    "norms": (lambda: MagFaceLoss(largest_norm=5), r"largest_norm must be greater than smallest_norm \(10\), got 5"),
    "norm weight": (lambda: MagFaceLoss(norm_weight=-1), "norm_weight must be at least 0, got -1"),
    "std": (lambda: ElasticFaceLoss(std=-1), "std must be at least 0, got -1"),
    "form": (lambda: ElasticFaceLoss(form="sphere"), "form must be one of 'arc', 'cos', got 'sphere'"),
    "m of ElasticFace": (lambda: ElasticFaceLoss(2, form="cos"), "m must be at least 0 and less than 2, got 2"),
    "subcenters": (lambda: SubcenterArcFaceLoss(subcenters=0), "subcenters must be at least 1, got 0"),
    "m of UniFace": (lambda: UniFaceLoss(2), "m must be at least 0 and less than 2, got 2"),
    "negative weight": (lambda: UniFaceLoss(negative_weight=0), "negative_weight must be greater than 0, got 0"),
    "directions": (lambda: AngularHead(3, 4, directions=0), "directions must be at least 1, got 0"),
}


@pytest.mark.parametrize(("make", "message"), INVALID.values(), ids=INVALID)
def test_invalid_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()
