"""`keep_norms`: kernels keep their norms in both modes, which changes how far a step rotates them."""

import copy
import math

import pytest
import torch
from torch import nn

from spherenet.layers import AngularHead, SphereConv1d, SphereConv2d, SphereConv3d, SphereConvTranspose2d, SphereLinear
from spherenet.losses import SoftmaxLoss, WSoftmaxLoss
from spherenet.optim import keep_norms, param_groups


def norms(weight):
    return weight.detach().double().flatten(1).norm(dim=1)


def small_net(**kw):
    return nn.Sequential(
        SphereConv2d(3, 8, 3, **kw), nn.ReLU(), SphereConv2d(8, 6, 3, groups=2, **kw), nn.Flatten(), nn.Linear(6, 4)
    )


def train(model, optimizer, steps, seed=0):
    """Fit random labels."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        images = torch.randn(16, 3, 5, 5, generator=generator).to(next(model.parameters()).dtype)
        labels = torch.randint(4, (16,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()


def random_walk(layer, optimizer, steps):
    """Train a layer on random gradients; return the mean angle by which its kernels rotate in each step.

    Nothing is learned, so gradients differ from step to step by the norm of the kernels only.
    """
    generator = torch.Generator().manual_seed(0)
    rotations = []
    for _ in range(steps):
        before = layer.weight.detach().clone()
        gradient = torch.randn(32, layer.out_features, generator=generator, dtype=before.dtype)
        optimizer.zero_grad()
        (
            layer(torch.randn(32, layer.in_features, generator=generator, dtype=before.dtype)) * gradient
        ).mean().backward()
        optimizer.step()
        cosine = torch.cosine_similarity(before, layer.weight.detach(), dim=1)
        rotations.append(cosine.clamp(-1, 1).acos().mean().item())
    return torch.tensor(rotations)


def test_norms_and_rotations_stay_constant_only_with_keep_norms():
    free = SphereLinear(16, 8, dtype=torch.float64)
    kept = copy.deepcopy(free)
    start = norms(free.weight)

    free_rotations = random_walk(free, torch.optim.SGD(free.parameters(), lr=5.0), 400)
    growth = (norms(free.weight) / start).mean().item()
    assert growth > 2
    # A longer kernel rotates less and has a smaller gradient: the angle of a step decreases as 1/growth².
    assert free_rotations[-20:].mean() / free_rotations[:3].mean() == pytest.approx(1 / growth**2, rel=0.3)

    optimizer = torch.optim.SGD(kept.parameters(), lr=5.0)
    keep_norms(optimizer, kept)
    kept_rotations = random_walk(kept, optimizer, 400)
    torch.testing.assert_close(norms(kept.weight), start, rtol=1e-12, atol=0)
    assert kept_rotations[-20:].mean() / kept_rotations[:20].mean() == pytest.approx(1, abs=0.15)


def test_one_step_lengthens_a_kernel_by_pythagoras():
    layer = SphereLinear(6, 4, dtype=torch.float64, eps=1e-12)
    before = norms(layer.weight)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.3)
    layer(torch.randn(5, 6, dtype=torch.float64)).square().sum().backward()
    step = 0.3 * norms(layer.weight.grad)
    optimizer.step()
    torch.testing.assert_close(norms(layer.weight), (before**2 + step**2).sqrt(), rtol=1e-9, atol=0)


LAYERS = [
    (SphereLinear(5, 3), (2, 5)),
    (SphereConv1d(2, 4, 3), (1, 2, 7)),
    (SphereConv2d(4, 6, 3, groups=2, operator="sigmoid"), (1, 4, 5, 5)),
    (SphereConv3d(2, 3, 2, operator="learnable", rescale="learned"), (1, 2, 4, 4, 4)),
]


@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("eps", [1e-4, 1e-12])
def test_rescaling_does_not_change_the_function_up_to_eps(layer, shape, eps):
    layer = copy.deepcopy(layer).double()
    layer.eps = eps
    kept = keep_norms(torch.optim.SGD(layer.parameters(), lr=0.1), layer)
    start = norms(layer.weight)
    with torch.no_grad():
        layer.weight.add_(0.5 * torch.randn_like(layer.weight))  # a large step, other parameters untouched
    x = torch.randn(shape, dtype=torch.float64)
    before = layer(x)
    kept.rescale()
    torch.testing.assert_close(norms(layer.weight), start, rtol=1e-12, atol=0)
    tolerance = 5 * eps / start.min().item() ** 2 + 1e-10
    torch.testing.assert_close(layer(x), before, rtol=0, atol=tolerance)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_rescales_sphere_weights_only_after_each_step(optimizer):
    model = small_net()
    free = copy.deepcopy(model)
    start = [norms(model[i].weight) for i in (0, 2)]
    optims = [optimizer(param_groups(net, 0.01), lr=0.01) for net in (model, free)]
    keep_norms(optims[0], model)
    for net, optim in zip((model, free), optims, strict=True):
        train(net, optim, 1)
    for index, at in enumerate((0, 2)):
        torch.testing.assert_close(norms(model[at].weight), start[index], rtol=1e-6, atol=0)
        # The direction is that of the optimizer.
        units = [
            net[at].weight.flatten(1) / net[at].weight.flatten(1).norm(dim=1, keepdim=True) for net in (model, free)
        ]
        torch.testing.assert_close(*units)
    assert torch.equal(model[4].weight, free[4].weight)
    assert torch.equal(model[4].bias, free[4].bias)


def test_handle_ends_by_remove_or_as_a_context():
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def growth():
        before = norms(model[0].weight)
        train(model, optimizer, 3)
        return (norms(model[0].weight) / before).mean().item()

    assert growth() > 1.001
    with keep_norms(optimizer, model) as kept:
        assert "14 kernels of 2 weights, mode='renormalize'" in repr(kept)
        assert growth() == pytest.approx(1, abs=1e-6)
    assert growth() > 1.001
    kept = keep_norms(optimizer, model)
    kept.remove()
    kept.remove()
    assert growth() > 1.001


@pytest.mark.parametrize("mode", ["renormalize", "project"])
def test_resumed_run_with_saved_norms_is_bit_identical(tmp_path, mode):
    def start(model):
        optimizer = torch.optim.Adam(param_groups(model, 0.01), lr=0.01)
        return optimizer, keep_norms(optimizer, model, mode)

    model = small_net()
    optimizer, kept = start(model)
    train(model, optimizer, 5)
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "norms": kept.state_dict()}
    torch.save(checkpoint, tmp_path / "checkpoint.pt")
    train(model, optimizer, 5, seed=1)

    loaded = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    resumed = small_net()
    resumed.load_state_dict(loaded["model"])
    optimizer, kept = start(resumed)
    optimizer.load_state_dict(loaded["optimizer"])
    kept.load_state_dict(loaded["norms"])
    train(resumed, optimizer, 5, seed=1)
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def projected(before, after, norm):
    """Return the projected update of one kernel by the formula (Eq. 20)."""
    unit = before / before.norm()
    update = after - before
    direction = unit + update - unit * (unit @ update)
    return norm * direction / direction.norm()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_projected_update_equals_the_formula(optimizer, dtype):
    model = small_net().to(dtype).to(memory_format=torch.channels_last)
    free = copy.deepcopy(model)
    start = [norms(model[at].weight) for at in (0, 2)]
    optimizers = [optimizer(net.parameters(), lr=0.05, weight_decay=0.1) for net in (model, free)]
    keep_norms(optimizers[0], model, mode="project")
    for _ in range(3):
        free.load_state_dict(model.state_dict())
        optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        before = [model[at].weight.detach().clone() for at in (0, 2)]
        for net, optim in zip((model, free), optimizers, strict=True):
            train(net, optim, 1)
        for index, at in enumerate((0, 2)):
            for row, kernel in enumerate(model[at].weight.detach().double()):
                expected = projected(
                    before[index][row].double().flatten(),
                    free[at].weight[row].detach().double().flatten(),
                    start[index][row],
                )
                tolerance = 1e-12 if dtype == torch.float64 else 1e-2
                torch.testing.assert_close(kernel.flatten(), expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(model[4].weight, free[4].weight)
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_projected_update_rotates_kernels_of_any_norm_alike():
    short = SphereLinear(16, 8, dtype=torch.float64, eps=1e-12)
    long = copy.deepcopy(short)
    with torch.no_grad():
        long.weight.mul_(7)
    rotations = []
    for layer in (short, long):
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.01, eps=1e-30)
        keep_norms(optimizer, layer, mode="project")
        rotations.append(random_walk(layer, optimizer, 20))
    torch.testing.assert_close(*rotations, rtol=1e-6, atol=0)
    torch.testing.assert_close(norms(long.weight), 7 * norms(short.weight))
    # The first update of Adam is ±lr in each entry; almost all of it is tangential.
    assert rotations[0][0] == pytest.approx(math.atan(0.01 * 16**0.5), rel=0.1)


def test_projected_update_ignores_the_radial_component():
    layer = SphereLinear(6, 4, dtype=torch.float64)
    start = layer.weight.detach().clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, weight_decay=0.5)
    keep_norms(optimizer, layer, mode="project")
    layer.weight.grad = 3 * start
    optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), start, rtol=1e-12, atol=1e-14)


def test_projected_update_leaves_kernels_without_direction():
    layer = SphereLinear(2, 3)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[0.0, 0.0], [3.0, 4.0], [1.0, 0.0]]))
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    keep_norms(optimizer, layer, mode="project")
    layer.weight.grad = torch.tensor([[-1.0, -1.0], [math.nan, 0.0], [0.0, -1.0]])
    optimizer.step()
    expected = torch.tensor([[1.0, 1.0], [math.nan, 4.0], [0.5**0.5, 0.5**0.5]])
    torch.testing.assert_close(layer.weight.detach(), expected, equal_nan=True)


@pytest.mark.parametrize("mode", ["renormalize", "project"])
def test_class_weights_are_kept_if_the_loss_normalizes_them(mode):
    for criterion, kept_names in ((WSoftmaxLoss(), ["head.weight"]), (SoftmaxLoss(), [])):
        model = nn.ModuleDict({"head": AngularHead(4, 3), "criterion": criterion})
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        kept = keep_norms(optimizer, model, mode)
        assert list(kept.state_dict()) == kept_names
        start = norms(model["head"].weight)
        model["criterion"](model["head"](torch.randn(5, 4)), torch.tensor([0, 1, 2, 0, 1])).backward()
        optimizer.step()
        assert torch.allclose(norms(model["head"].weight), start) == bool(kept_names)


class Transposed(nn.ConvTranspose2d):
    scale_invariant = True


@pytest.mark.parametrize("mode", ["renormalize", "project"])
@pytest.mark.parametrize("groups", [1, 2])
def test_kernels_of_transposed_convolutions_lie_along_the_output_channels(mode, groups):
    layer = Transposed(4, 6, 3, groups=groups)

    def kernel_norms():
        by_group = layer.weight.detach().unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
        return norms(by_group)

    start = kernel_norms()
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
    kept = keep_norms(optimizer, layer, mode)
    assert kept.state_dict()["weight"].shape == (6,)
    kept.load_state_dict(kept.state_dict())
    for _ in range(3):
        layer(torch.randn(2, 4, 5, 5)).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(kernel_norms(), start, rtol=1e-6, atol=0)


def test_kernels_without_direction_are_left_as_they_are():
    layer = SphereLinear(2, 4)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[0.0, 0.0], [3.0, 4.0], [1.0, 0.0], [1.0, 0.0]]))
    kept = keep_norms(torch.optim.SGD(layer.parameters(), lr=0.1), layer)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 1.0], [0.0, 0.0], [math.nan, 1.0], [0.0, 7.0]]))
    kept.rescale()
    expected = torch.tensor([[1.0, 1.0], [0.0, 0.0], [math.nan, 1.0], [0.0, 1.0]])
    torch.testing.assert_close(layer.weight.detach(), expected, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_and_channels_last(dtype):
    model = small_net().to(dtype).to(memory_format=torch.channels_last)
    start = norms(model[0].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    kept = keep_norms(optimizer, model)
    train(model, optimizer, 10)
    assert model[0].weight.dtype == dtype
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    rtol = 4e-3 if dtype == torch.bfloat16 else 1e-12
    torch.testing.assert_close(norms(model[0].weight), start, rtol=rtol, atol=0)
    assert kept.state_dict()["0.weight"].dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)


def test_mixed_dtypes_in_one_model():
    model = nn.ModuleList([SphereLinear(4, 3), SphereLinear(4, 3).double(), SphereLinear(4, 3).bfloat16()])
    start = [norms(layer.weight) for layer in model]
    kept = keep_norms(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with torch.no_grad():
        for layer in model:
            layer.weight.mul_(3)
    kept.rescale()
    for layer, before in zip(model, start, strict=True):
        torch.testing.assert_close(norms(layer.weight), before, rtol=1e-2, atol=0)


def test_module_that_declares_itself_scale_invariant_is_kept():
    class Head(nn.Module):
        scale_invariant = True

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4))

    head = Head()
    start = norms(head.weight)
    kept = keep_norms(torch.optim.SGD(head.parameters(), lr=0.1), head)
    with torch.no_grad():
        head.weight.mul_(2)
    kept.rescale()
    torch.testing.assert_close(norms(head.weight), start)


def test_shared_weights_are_kept_once_and_frozen_weights_not():
    shared, frozen = SphereLinear(4, 4), SphereLinear(4, 4).requires_grad_(False)
    model = nn.Sequential(shared, frozen, shared)
    kept = keep_norms(torch.optim.SGD(param_groups(model, 0.0), lr=0.1), model)
    assert list(kept.state_dict()) == ["0.weight"]


def test_plain_model_has_nothing_to_keep():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(36, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert keep_norms(optimizer, model).state_dict() == {}
    train(model, optimizer, 1)


def test_invalid_arguments():
    model, other = small_net(), small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="optimizer must be a torch optimizer, got Sequential"):
        keep_norms(model, optimizer)
    with pytest.raises(TypeError, match="model must be a module"):
        keep_norms(optimizer, [model])
    with pytest.raises(ValueError, match=r"has none of the 2, of which the first is '0\.weight'; was it created"):
        keep_norms(optimizer, other)
    layer = nn.utils.parametrizations.weight_norm(SphereLinear(3, 3))
    with pytest.raises(ValueError, match="a parametrization computes weight"):
        keep_norms(torch.optim.SGD(layer.parameters(), lr=0.1), layer)
    with pytest.raises(ValueError, match="mode must be one of 'renormalize', 'project', got 'sphere'"):
        keep_norms(optimizer, model, "sphere")
    kept = keep_norms(optimizer, model)
    with pytest.raises(ValueError, match=r"'0.weight' has shape none there and \[8\] here"):
        kept.load_state_dict({})
    with pytest.raises(ValueError, match=r"'0.weight' has shape \[3\] there and \[8\] here"):
        kept.load_state_dict({"0.weight": torch.ones(3), "2.weight": torch.ones(6)})


def test_weight_tied_to_an_embedding_is_left_alone():
    torch.manual_seed(0)
    embedding, head = nn.Embedding(10, 8), AngularHead(8, 10)
    head.weight = embedding.weight
    model = nn.ModuleDict({"embedding": embedding, "head": head, "loss": WSoftmaxLoss(), "layer": SphereLinear(8, 4)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    kept = keep_norms(optimizer, model)
    assert "4 kernels of 1 weights" in repr(kept)
    (0.1 * embedding.weight.square().sum()).backward()
    before = embedding.weight.detach().clone()
    optimizer.step()
    torch.testing.assert_close(embedding.weight.detach(), 0.8 * before)


def test_weight_of_a_layer_and_a_transposed_layer_is_left_alone():
    encoder, decoder = SphereConv2d(3, 8, 3), SphereConvTranspose2d(8, 3, 3)
    decoder.weight = encoder.weight  # the kernels of the one lie across those of the other
    model = nn.Sequential(encoder, nn.ReLU(), decoder)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    keep_norms(optimizer, model)
    before, x = encoder.weight.detach().clone(), torch.randn(2, 3, 8, 8)
    (model(x) - x).square().mean().backward()
    gradient = encoder.weight.grad.clone()
    optimizer.step()
    torch.testing.assert_close(encoder.weight.detach(), before - gradient)
