import copy
import math

import pytest
import torch
from torch import nn

from spherenet.layers import SphereConv1d, SphereConv2d, SphereConv3d, SphereLinear
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


def steady_walk(layer, optimizer, steps):
    """Push a layer's outputs in random directions; return the mean angle by which its kernels turn in each step.

    Nothing is learned, so gradients differ from step to step by the norm of the kernels only.
    """
    generator = torch.Generator().manual_seed(0)
    turned = []
    for _ in range(steps):
        before = layer.weight.detach().clone()
        push = torch.randn(32, layer.out_features, generator=generator, dtype=before.dtype)
        optimizer.zero_grad()
        (layer(torch.randn(32, layer.in_features, generator=generator, dtype=before.dtype)) * push).mean().backward()
        optimizer.step()
        cosine = torch.cosine_similarity(before, layer.weight.detach(), dim=1)
        turned.append(cosine.clamp(-1, 1).acos().mean().item())
    return torch.tensor(turned)


def test_without_the_hook_norms_grow_and_the_step_shrinks_with_it_neither():
    free = SphereLinear(16, 8, dtype=torch.float64)
    kept = copy.deepcopy(free)
    start = norms(free.weight)

    free_turned = steady_walk(free, torch.optim.SGD(free.parameters(), lr=5.0), 400)
    growth = (norms(free.weight) / start).mean().item()
    assert growth > 2
    # A longer kernel turns by less and has a smaller gradient besides: the angle of a step falls as 1/growth².
    assert free_turned[-20:].mean() / free_turned[:3].mean() == pytest.approx(1 / growth**2, rel=0.3)

    optimizer = torch.optim.SGD(kept.parameters(), lr=5.0)
    keep_norms(optimizer, kept)
    kept_turned = steady_walk(kept, optimizer, 400)
    torch.testing.assert_close(norms(kept.weight), start, rtol=1e-12, atol=0)
    assert kept_turned[-20:].mean() / kept_turned[:20].mean() == pytest.approx(1, abs=0.15)


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
def test_the_function_is_unchanged_up_to_eps(layer, shape, eps):
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
    twin = copy.deepcopy(model)
    start = [norms(model[i].weight) for i in (0, 2)]
    optims = [optimizer(param_groups(net, 0.01), lr=0.01) for net in (model, twin)]
    keep_norms(optims[0], model)
    for net, optim in zip((model, twin), optims, strict=True):
        train(net, optim, 1)
    for index, at in enumerate((0, 2)):
        torch.testing.assert_close(norms(model[at].weight), start[index], rtol=1e-6, atol=0)
        # the direction is the one that the optimiser chose
        units = [
            net[at].weight.flatten(1) / net[at].weight.flatten(1).norm(dim=1, keepdim=True) for net in (model, twin)
        ]
        torch.testing.assert_close(*units)
    assert torch.equal(model[4].weight, twin[4].weight)
    assert torch.equal(model[4].bias, twin[4].bias)


def test_off_by_default_removable_and_a_context():
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def growth():
        before = norms(model[0].weight)
        train(model, optimizer, 3)
        return (norms(model[0].weight) / before).mean().item()

    assert growth() > 1.001
    with keep_norms(optimizer, model) as kept:
        assert "14 kernels of 2 weights" in repr(kept)
        assert growth() == pytest.approx(1, abs=1e-6)
    assert growth() > 1.001
    kept = keep_norms(optimizer, model)
    kept.remove()
    kept.remove()
    assert growth() > 1.001


def test_resuming_is_exact_with_the_saved_norms(tmp_path):
    def start(model):
        optimizer = torch.optim.Adam(param_groups(model, 0.01), lr=0.01)
        return optimizer, keep_norms(optimizer, model)

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


def test_a_scale_invariant_module_of_ones_own_is_kept_too():
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


def test_shared_and_frozen_weights():
    shared, frozen = SphereLinear(4, 4), SphereLinear(4, 4).requires_grad_(False)
    model = nn.Sequential(shared, frozen, shared)
    kept = keep_norms(torch.optim.SGD(param_groups(model, 0.0), lr=0.1), model)
    assert list(kept.state_dict()) == ["0.weight"]


def test_a_plain_model_trains_in_the_same_loop():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(36, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert keep_norms(optimizer, model).state_dict() == {}
    train(model, optimizer, 1)


def test_bad_input():
    model, other = small_net(), small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="optimizer must be a torch optimiser, got Sequential"):
        keep_norms(model, optimizer)
    with pytest.raises(TypeError, match="model must be a module"):
        keep_norms(optimizer, [model])
    with pytest.raises(ValueError, match=r"it has none of the 2, '0\.weight' the first: was it made"):
        keep_norms(optimizer, other)
    layer = nn.utils.parametrizations.weight_norm(SphereLinear(3, 3))
    with pytest.raises(ValueError, match="a parametrisation computes weight"):
        keep_norms(torch.optim.SGD(layer.parameters(), lr=0.1), layer)
    kept = keep_norms(optimizer, model)
    with pytest.raises(ValueError, match=r"'0.weight' has shape none there and \[8\] here"):
        kept.load_state_dict({})
    with pytest.raises(ValueError, match=r"'0.weight' has shape \[3\] there and \[8\] here"):
        kept.load_state_dict({"0.weight": torch.ones(3), "2.weight": torch.ones(6)})
