"""Sharded heads and losses equal unsharded ones on the batches of all processes, in two and in four processes."""

import copy
from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import spherenet as sn
from loss_cases import COMMON, LOSSES
from process_group import run_checks
from spherenet.kernels.classes import blockwise
from spherenet.losses import GASoftmaxLoss, SoftmaxLoss, SphereFace2Loss, make_loss

FEATURES = 6


def loss_makers():
    cases = {case.name: case.make for case in COMMON}
    cases |= {case.name: case.make for case in LOSSES if case.name in ("w-parabola", "arcface-detached", "w-halved")}
    cases["sphereface2"] = SphereFace2Loss
    cases["sphereface2-full"] = partial(SphereFace2Loss, margin_gradient="full")
    penalty = partial(GASoftmaxLoss, scale="norm", feature_penalty=0.1)
    cases |= {"penalty": penalty, "penalty-absolute": partial(penalty, feature_norm=2.0, penalty_form="absolute")}
    # In evaluation mode: tests/losses/test_state.py tests the state.
    cases["curricularface"] = lambda **kw: sn.CurricularFaceLoss(**kw).eval()
    cases["magface-penalty"] = partial(sn.MagFaceLoss, smallest_norm=1.0, largest_norm=3.0, norm_weight=2.0)
    cases |= {"subcenter": sn.SubcenterArcFaceLoss, "uniface": partial(sn.UniFaceLoss, s=9.0)}
    cases["elasticface"] = lambda **kw: sn.ElasticFaceLoss(**kw).eval()
    return cases


def options(name, classes):
    """Combinations of the options of the cross entropy."""
    yield {}
    yield {"ignore_index": 2, "reduction": "sum"}
    yield {"reduction": "none"}
    if not name.startswith(("sphereface2", "uniface")):
        weight = torch.linspace(0.5, 2, classes, dtype=torch.float64)
        yield {"label_smoothing": 0.2, "class_weight": weight, "ignore_index": 1}


class Problem:
    """The same weights in all processes, and batches of different sizes."""

    def __init__(self, rank, world, classes, dtype, *, bias=True, even=False, scale=1.0, directions=1):
        generator = torch.Generator().manual_seed(classes)
        self.rank, self.world = rank, world
        self.head = sn.AngularHead(FEATURES, classes, bias=bias, directions=directions, dtype=dtype)
        with torch.no_grad():
            for parameter in self.head.parameters():
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        sizes = [4 if even else 3 + rank % 2 for rank in range(world)]
        self.rows = torch.randn(sum(sizes), FEATURES, generator=generator, dtype=torch.float64).to(dtype) * scale
        self.labels = torch.randint(classes, (sum(sizes),), generator=generator)
        self.own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))

    def unsharded(self, loss):
        """Return the value, the predictions and the gradients of the batches of all processes."""
        head, rows = copy.deepcopy(self.head), self.rows.clone().requires_grad_()
        value, scores = loss(head(rows), self.labels, return_scores=True)
        # If each process sums its own losses, the loss of the run is the mean of the sums.
        (value.sum() / self.world if loss.reduction == "none" else value).backward()
        value = value[self.own] if loss.reduction == "none" else value
        gradients = {name: parameter.grad for name, parameter in head.named_parameters()}
        gradients["features"] = rows.grad[self.own] * self.world
        gradients |= {f"loss.{name}": parameter.grad for name, parameter in loss.named_parameters()}
        return value.detach(), scores.argmax(1)[self.own], gradients

    def sharded(self, loss, mesh, sample_rate=1.0):
        head = sn.shard_head(copy.deepcopy(self.head), mesh, sample_rate=sample_rate)
        rows = self.rows[self.own].clone().requires_grad_()
        value, predictions = loss(head(rows), self.labels[self.own], return_scores=True)
        value.sum().backward()
        gradients = {name: parameter.grad.full_tensor() for name, parameter in head.named_parameters()}
        assert all(isinstance(parameter.grad, DTensor) for parameter in head.parameters())
        gradients["features"] = rows.grad
        gradients |= {f"loss.{name}": parameter.grad for name, parameter in loss.named_parameters()}
        return value.detach(), predictions, gradients


def assert_same(actual, expected, tolerance, message):
    value, predictions, gradients = actual
    torch.testing.assert_close(value, expected[0], rtol=tolerance, atol=tolerance, msg=lambda text: f"{message} {text}")
    assert torch.equal(predictions, expected[1]), message
    assert gradients.keys() == expected[2].keys()
    for name, gradient in gradients.items():
        peak = expected[2][name].abs().max().item()
        torch.testing.assert_close(
            gradient, expected[2][name], rtol=0, atol=tolerance * max(1, peak), msg=lambda text: f"{message} {text}"
        )


def check_losses(rank, world, mesh):
    double = Problem(rank, world, 11, torch.float64)
    single = Problem(rank, world, world + 1, torch.float32, bias=False, even=True)  # the last of 4 shards is empty
    for name, make in loss_makers().items():
        for chosen in list(options(name, 11))[:: 1 if world == 2 else 3]:
            actual, expected = double.sharded(make(**chosen), mesh), double.unsharded(make(**chosen))
            assert_same(actual, expected, 1e-6, f"{name} {chosen}")
        assert_same(single.sharded(make(), mesh), single.unsharded(make()), 1e-5, f"{name} in float32")


def check_directions(rank, world, mesh):
    """Several directions per class, in one block and in several."""
    problem = Problem(rank, world, 11, torch.float64, directions=3)
    elements = blockwise.BLOCK_ELEMENTS["cpu"]
    for size in (elements, 90):
        blockwise.BLOCK_ELEMENTS["cpu"] = size
        for make in (sn.SubcenterArcFaceLoss, sn.UniFaceLoss, SoftmaxLoss, partial(make_loss, "sphereface-r2")):
            assert_same(problem.sharded(make(), mesh), problem.unsharded(make()), 1e-6, f"directions {make}")
    blockwise.BLOCK_ELEMENTS["cpu"] = elements
    curricular = sn.CurricularFaceLoss(momentum=1.0)
    problem.sharded(curricular, mesh)
    cosine = problem.head(problem.rows).cosine.gather(1, problem.labels[:, None])
    torch.testing.assert_close(curricular.progress.double(), cosine.mean(), rtol=1e-6, atol=1e-6)
    scores = SoftmaxLoss().logits(sn.shard_head(copy.deepcopy(problem.head), mesh)(problem.rows[problem.own]))
    torch.testing.assert_close(scores.full_tensor(), SoftmaxLoss().logits(problem.head(problem.rows)))


def check_blocks_and_extremes(rank, world, mesh):
    """Several blocks per process, large logits, and a learned parameter of the loss."""
    elements, blockwise.BLOCK_ELEMENTS["cpu"] = blockwise.BLOCK_ELEMENTS["cpu"], 30
    problem = Problem(rank, world, 11, torch.float64)
    for make in (partial(make_loss, "arcface"), partial(make_loss, "sphereface-r2"), SphereFace2Loss):
        assert_same(problem.sharded(make(), mesh), problem.unsharded(make()), 1e-6, "blocks")
    smooth = partial(SoftmaxLoss, label_smoothing=0.1)
    assert_same(problem.sharded(smooth(), mesh), problem.unsharded(smooth()), 1e-6, "smoothing in blocks")
    large = Problem(rank, world, 11, torch.float32, scale=1e2)
    assert_same(large.sharded(smooth(), mesh), large.unsharded(smooth()), 1e-5, "large logits")
    huge = Problem(rank, world, 11, torch.float32, scale=1e18)
    value, _, gradients = huge.sharded(SoftmaxLoss(), mesh)
    assert value.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    blockwise.BLOCK_ELEMENTS["cpu"] = elements
    learned = [sn.WSoftmaxLoss(sn.LearnableSigmoidAngle(dtype=torch.float64)) for _ in range(2)]
    assert_same(problem.sharded(learned[0], mesh), problem.unsharded(learned[1]), 1e-6, "learned k")
    per_class = sn.WSoftmaxLoss(sn.LearnableSigmoidAngle(11))
    with pytest.raises(ValueError, match="angle must have the same parameters for all classes if the head is sharded"):
        problem.sharded(per_class, mesh)


def check_scores(rank, world, mesh):
    for classes in (11, world + 1):  # the last of 4 shards is empty
        problem = Problem(rank, world, classes, torch.float64, even=True)
        head = sn.shard_head(copy.deepcopy(problem.head), mesh)
        for loss in (make_loss("arcface"), SphereFace2Loss(), SoftmaxLoss()):
            scores = loss.logits(head(problem.rows[problem.own]))
            assert isinstance(scores, DTensor)
            assert scores.shape == (len(problem.rows), classes)
            torch.testing.assert_close(scores.full_tensor(), loss.logits(problem.head(problem.rows)))


def check_rows_of_nan(rank, world, mesh):
    """A row whose scores are NaN gets the class that argmax gives it, and others are as before."""
    problem = Problem(rank, world, 11, torch.float64)
    problem.rows[:, 0][problem.own.start] = torch.nan
    for loss in (make_loss("arcface"), SphereFace2Loss(), SoftmaxLoss()):
        _, predictions, _ = problem.sharded(loss, mesh)
        expected = loss.logits(problem.head(problem.rows)).argmax(1)[problem.own]
        assert torch.equal(predictions, expected)


def check_sampling(rank, world, mesh):
    problem, count = Problem(rank, world, 40, torch.float64, scale=0.5), 120 // world
    for loss in (make_loss("cosface", s=2.0), SphereFace2Loss(s=2.0), SoftmaxLoss(label_smoothing=0.3)):
        exact = problem.unsharded(loss)
        torch.manual_seed(rank)
        draws = [problem.sharded(loss, mesh, sample_rate=0.5) for _ in range(count)]
        # Only some rows of the weights have a gradient, those of all labels among them.
        used = draws[0][2]["weight"].abs().sum(1) > 0
        assert used.sum() < 36
        assert used[problem.labels].all()
        mean = torch.stack([value for value, _, _ in draws]).mean()
        spread = torch.stack([value for value, _, _ in draws]).std()
        assert spread > 0
        # The denominator is unbiased; its logarithm is smaller by half the relative variance, here less than 5e-3.
        assert abs(mean - exact[0]) < 5 * spread / count**0.5 + 5e-3 * abs(exact[0]), (loss, mean, exact[0], spread)
    head = sn.shard_head(copy.deepcopy(problem.head), mesh, sample_rate=0.5).eval()
    value = SoftmaxLoss()(head(problem.rows[problem.own]), problem.labels[problem.own])
    torch.testing.assert_close(value, SoftmaxLoss()(problem.head(problem.rows), problem.labels))


def check_communication(rank, world, mesh):
    """The number and the sizes of exchanged tensors do not depend on the number of classes."""
    exchanged = {}
    for classes in (world, 500):
        problem = Problem(rank, world, classes, torch.float32, even=True)
        for rate in (1.0, 0.3):
            head = sn.shard_head(copy.deepcopy(problem.head), mesh, sample_rate=rate)
            rows, labels = problem.rows[problem.own].clone().requires_grad_(), problem.labels[problem.own]
            counting = Counting()
            with counting:
                make_loss("arcface")(head(rows), labels).backward()
            assert counting.elements
            exchanged[classes, rate] = counting.elements
    assert len({repr(value) for value in exchanged.values()}) == 1, exchanged


class Counting(torch.utils._python_dispatch.TorchDispatchMode):
    """Record the collectives that are called and their numbers of elements."""

    def __init__(self):
        super().__init__()
        self.elements = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "c10d" in str(function) and "wait" not in str(function):
            flat, _ = torch.utils._pytree.tree_flatten(args)
            self.elements.append((str(function), [value.numel() for value in flat if isinstance(value, torch.Tensor)]))
        return function(*args, **(kwargs or {}))


def check_bad_input(rank, world, mesh):
    """The same error in all processes."""
    problem = Problem(rank, world, 11, torch.float64)
    head, loss = sn.shard_head(copy.deepcopy(problem.head), mesh), SoftmaxLoss()
    rows, labels = problem.rows[problem.own], problem.labels[problem.own].clone()
    wrong = labels.clone()
    wrong[1] = 11
    last = rank == world - 1
    for bad, message in (
        (wrong, r"labels must be from 0 to 10 or ignore_index \(-100\), got 11\."),
        (labels[:-1], r"labels must have shape \["),
        (torch.full((len(labels), 11), 1 / 11), r"labels must be class indices \(int64\) if the head is sharded, got"),
        (None, r"labels must be a tensor, got NoneType\."),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            loss(head(rows), bad if last else labels)
    with pytest.raises(ValueError, match=r"features must have 6 features in their last dimension, got shape \[3, 5\]"):
        head(torch.zeros(3, 5, dtype=torch.float64) if last else rows)
    with pytest.raises(TypeError, match=r"features must have the dtype of the weights, torch\.float64, got"):
        head(rows.float() if last else rows)
    with pytest.raises(ValueError, match=r"same head in all processes, got .*\(11, 6\).* and .*\(12, 6\)"):
        sn.shard_head(sn.AngularHead(6, 12 if last else 11), mesh)
    if world > 2:
        with pytest.raises(ValueError, match=rf"at least the number of processes, {world}, got 2\."):
            sn.shard_head(sn.AngularHead(6, 2), mesh)
    with pytest.raises(ValueError, match=r"model must have one AngularHead, got 0\."):
        sn.shard_head(torch.nn.Linear(2, 3), mesh)
    with pytest.raises(ValueError, match=r"sample_rate must be greater than 0 and at most 1, got 0\."):
        sn.shard_head(sn.AngularHead(6, 11), mesh, sample_rate=0)
    with pytest.raises(ValueError, match="not sharded yet"):
        sn.shard_head(head, mesh)
    with pytest.raises(ValueError, match=r"class_weight must have 11 entries, got 12\."):
        SoftmaxLoss(class_weight=torch.ones(12, dtype=torch.float64))(head(rows), labels)
    loss(head(rows), labels).backward()  # works after all of these errors


def check_meta(rank, world, mesh):
    """A head that no process could hold is initialized in parts, which differ."""
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Identity(), sn.AngularHead(64, 4 * world))
    sn.shard_head(model, mesh)
    weight = model[1].weight.full_tensor()
    assert len(weight.unique()) == weight.numel()
    torch.testing.assert_close(weight.std(), torch.tensor((2 / 64) ** 0.5), rtol=0.2, atol=0)
    assert "processes=" in repr(model)


def check_hooks(rank, world, mesh):
    """Hooks of the head are called after it is sharded; a parametrization, which would be lost, is refused."""
    model, calls = torch.nn.Sequential(torch.nn.Identity(), sn.AngularHead(FEATURES, 4 * world)), []
    model[1].register_forward_hook(lambda *_: calls.append(rank))
    sn.shard_head(model, mesh)(torch.randn(2, FEATURES))
    assert calls == [rank]
    head = torch.nn.utils.parametrizations.weight_norm(sn.AngularHead(FEATURES, 4 * world))
    with pytest.raises(ValueError, match="a head without parametrizations"):
        sn.shard_head(torch.nn.Sequential(head), mesh)


def checks(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    functions = [check_losses, check_scores, check_rows_of_nan, check_communication, check_bad_input]
    if world == 2:
        functions += [check_directions, check_blocks_and_extremes, check_sampling, check_meta, check_hooks]
    for check in functions:
        check(rank, world, mesh)


@pytest.mark.parametrize("world", [2, 4])
def test_sharded_heads_equal_unsharded_ones(world, tmp_path):
    run_checks(__file__, world, tmp_path)
