"""Heads and losses under torch: second derivatives, compile, vmap, DDP, copying and saving, blocks of classes."""

import copy
import io

import pytest
import torch

from loss_cases import COMMON, LOSSES, problem
from spherenet.kernels.classes import blockwise as blocks
from spherenet.layers.head import AngularHead
from spherenet.losses import CosFaceLoss, GASoftmaxLoss, SoftmaxLoss, WSoftmaxLoss
from spherenet.ops.angular import angular_cosine

each_loss = pytest.mark.parametrize("case", COMMON, ids=str)


def function_of_tensors(loss, classes=4):
    """Return a loss as a function of features, weights, bias and labels."""
    head = AngularHead(3, classes, bias=True, dtype=torch.float64)

    def function(x, w, b, labels):
        return loss(torch.func.functional_call(head, {"weight": w, "bias": b}, x), labels)

    return function


# Numerical derivatives of a value with a detached margin are not its gradient; the oracle tests cover that one.
@pytest.mark.parametrize("case", [case for case in LOSSES if not case.detached], ids=str)
def test_gradcheck(case, path):
    x, w, b, labels = problem(samples=3, features=3, classes=4)
    assert torch.autograd.gradcheck(function_of_tensors(case.make()), (x, w, b, labels))


@pytest.mark.parametrize("case", [case for case in COMMON if not case.detached], ids=str)
def test_second_derivatives(case, path):
    x, w, b, labels = problem(samples=2, features=3, classes=3)
    function = function_of_tensors(case.make(label_smoothing=0.1), classes=3)
    assert torch.autograd.gradgradcheck(function, (x, w, b, labels))


@each_loss
def test_forward_mode_and_transforms(case, path):
    x, w, b, labels = problem(samples=3, features=3, classes=4)
    function = function_of_tensors(case.make())
    tangent = torch.randn_like(x)
    _, slope = torch.func.jvp(lambda x: function(x, w, b, labels), (x.detach(),), (tangent,))
    gradient = torch.func.grad(function)(x.detach(), w, b, labels)
    torch.testing.assert_close(slope, (gradient * tangent).sum())
    by_weight, by_bias = torch.func.grad(function, argnums=(1, 2))(x.detach(), w.detach(), b.detach(), labels)
    value = function(x, w, b, labels)
    for got, wanted in zip((by_weight, by_bias), torch.autograd.grad(value, (w, b)), strict=True):
        torch.testing.assert_close(got, wanted)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.detach(), tangent)
        value = function(dual, w.detach(), b.detach(), labels)
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(value).tangent, slope)


@each_loss
def test_vmap_of_gradients_per_sample(case, path):
    x, w, b, labels = problem(samples=3, features=3, classes=4)
    gradient = torch.func.grad(function_of_tensors(case.make()))
    together = torch.func.vmap(gradient, in_dims=(0, None, None, 0))(x.detach(), w, b, labels)
    for index in range(3):
        torch.testing.assert_close(together[index], gradient(x[index].detach(), w, b, labels[index]))


@each_loss
def test_compile_head_and_loss_as_one_graph(case, path):
    torch._dynamo.reset()
    head, loss = AngularHead(4, 6, bias=True), case.make()
    compiled_loss = copy.deepcopy(loss)
    labels = torch.randint(6, (5,))
    compiled = torch.compile(lambda x: compiled_loss(head(x), labels), backend="aot_eager", fullgraph=True)
    for _ in range(2):
        x = torch.randn(5, 4, requires_grad=True)
        expected, value = loss(head(x), labels), compiled(x)
        torch.testing.assert_close(value, expected)
        for got, wanted in zip(
            torch.autograd.grad(value, (x, head.weight)), torch.autograd.grad(expected, (x, head.weight)), strict=True
        ):
            torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("case", LOSSES, ids=str)
def test_large_heads_use_the_blockwise_kernels(case, blockwise, monkeypatch):
    calls = []
    for function in (blocks._BlockwiseCosine, blocks._AngularCrossEntropy):
        apply = function.apply
        monkeypatch.setattr(function, "apply", lambda *a, apply=apply, f=function: calls.append(f) or apply(*a))
    x, _, _, labels = problem()
    loss, head = case.make(), AngularHead(4, 6, dtype=torch.float64)
    loss(head(x), labels)
    kernel = not any(word in case.name for word in ("learnable", "parabola", "halved", "-r2-"))
    assert calls == [blocks._BlockwiseCosine] + [blocks._AngularCrossEntropy] * kernel
    assert loss.angle is None or loss.angle.is_same_for_all_filters or not kernel


@pytest.mark.parametrize("case", COMMON, ids=str)
def test_large_heads_equal_small_ones(case, monkeypatch):
    """Compare the kernels with tensor operations in float32, at a size at which the kernels are chosen by default."""
    x, labels = torch.randn(70, 16), torch.randint(9_000, (70,))
    head, results = AngularHead(16, 9_000, bias=True), []
    for threshold in (None, 1 << 40):
        if threshold is not None:
            monkeypatch.setattr("spherenet.kernels.dispatch.LARGE_MAP", threshold)
        features = x.clone().requires_grad_()
        value = case.make()(head(features), labels)
        results.append((value, *torch.autograd.grad(value, (features, head.weight, head.bias))))
    for fast, plain in zip(*results, strict=True):
        assert (fast - plain).abs().max() <= 1e-5 * plain.abs().max()


def test_gradient_has_no_subnormal_probabilities(blockwise):
    features = torch.tensor([[90.0, 0.0]], requires_grad=True)
    head = AngularHead(2, 3)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]]))
    output = head(features)
    (gradient,) = torch.autograd.grad(SoftmaxLoss()(output, torch.tensor([0])), output.cosine)
    assert ((gradient == 0) | (gradient.abs() > 1e-30)).all()


def test_gradient_of_weight_norms_only(path):
    x, w, _, _ = problem()

    def by_head(w):
        return torch.func.functional_call(AngularHead(4, 6, dtype=torch.float64), {"weight": w}, x).weight_norm.sum()

    (gradient,) = torch.autograd.grad(by_head(w), w)
    expected = torch.autograd.grad(angular_cosine(x, w, 1e-4)[1].sum(), w)[0]
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("frozen", ["features", "weights"])
def test_features_or_weights_can_be_frozen(frozen, path):
    x, _, _, labels = problem()
    head = AngularHead(4, 6, dtype=torch.float64).requires_grad_(frozen == "features")
    value = CosFaceLoss()(head(x.detach() if frozen == "features" else x), labels)
    value.backward()
    assert (head.weight.grad is None) == (frozen == "weights")
    assert (x.grad is None) == (frozen == "features")


def test_loss_can_be_pickled():
    loss = GASoftmaxLoss("sigmoid", 3, 0.2, class_weight=torch.rand(3))
    file = io.BytesIO()
    torch.save(loss, file)
    file.seek(0)
    output, labels = AngularHead(4, 3)(torch.randn(5, 4)), torch.tensor([0, 1, 2, 0, 1])
    value = loss(output, labels)
    assert torch.equal(torch.load(file, weights_only=False)(output, labels), value)
    assert "m=3" in repr(loss)
    assert "class_weight=[3]" in repr(loss)


class Trained(torch.nn.Module):
    """Head and loss in one forward pass, as in `Classifier`."""

    def __init__(self):
        super().__init__()
        self.head, self.criterion = AngularHead(4, 3), GASoftmaxLoss()

    def forward(self, features, labels):
        return self.criterion(self.head(features), labels, return_scores=True)


def test_model_saves_and_trains_weights_only():
    model = Trained()
    assert set(model.state_dict()) == {"head.weight"}
    assert dict(model.named_parameters()).keys() == {"head.weight"}


def test_distributed_data_parallel(process_group):
    model = Trained()
    alone, wrapped = copy.deepcopy(model), torch.nn.parallel.DistributedDataParallel(model)
    features, labels = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    for _ in range(2):
        for network in (alone, wrapped):
            loss, scores = network(features, labels)
            loss.backward()
            assert scores.shape == (5, 3)
    torch.testing.assert_close(model.head.weight.grad, alone.head.weight.grad)


def test_repr_shows_options():
    assert repr(WSoftmaxLoss("sigmoid", 0.2, reduction="sum")).count("k=0.2") == 1
    assert "reduction='sum'" in repr(WSoftmaxLoss(reduction="sum"))
    assert repr(CosFaceLoss(0.2, 30)).startswith("CosFaceLoss(\n  m=0.2, s=30.0")


@pytest.mark.parametrize("soft", [False, True], ids=["hard", "soft"])
@each_loss
def test_loss_with_scores_equals_loss_and_logits(case, soft, path):
    x, w, b, labels = problem()
    labels = torch.rand(5, 6, dtype=torch.float64).softmax(1) if soft else labels
    head, loss = AngularHead(4, 6, bias=True, dtype=torch.float64), case.make()
    output = torch.func.functional_call(head, {"weight": w, "bias": b}, x)
    value, scores = loss(output, labels, return_scores=True)
    assert torch.equal(value, loss(output, labels))
    assert torch.equal(scores, loss.logits(output))
    gradients = torch.autograd.grad(value, (x, w, b), retain_graph=True)
    for gradient, expected in zip(gradients, torch.autograd.grad(loss(output, labels), (x, w, b)), strict=True):
        assert torch.equal(gradient, expected)


def test_scores_have_the_leading_dimensions_of_the_features(path):
    loss = CosFaceLoss(reduction="none")
    value, scores = loss(AngularHead(4, 5)(torch.randn(2, 3, 4)), torch.zeros(2, 3).long(), return_scores=True)
    assert value.shape == (2, 3)
    assert scores.shape == (2, 3, 5)
