"""Magnitude-preserving layers keep E[x²] = 1, and forced normalization keeps their kernels at √n."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import spherenet as sn
from spherenet.layers.magnitude_preserving import MPConv2d, MPLinear, mp_cat, mp_silu, mp_sum

LAYERS = {
    "conv": (lambda **o: MPConv2d(6, 5, 3, padding=0, **o), (2, 6, 5, 4)),
    "1×1": (lambda **o: MPConv2d(6, 5, 1, **o), (2, 6, 5, 4)),
    "groups": (lambda **o: MPConv2d(6, 4, (1, 3), stride=2, groups=2, **o), (2, 6, 5, 4)),
    "linear": (lambda **o: MPLinear(6, 5, **o), (3, 6)),
}
every_layer = pytest.mark.parametrize(("make", "shape"), LAYERS.values(), ids=LAYERS)


def magnitude(x):
    return x.square().mean().sqrt().item()


def kernel_norms(weight):
    return weight.detach().flatten(1).norm(dim=1)


@every_layer
def test_kernels_start_with_norm_of_the_paper(make, shape):
    weight = make().weight
    torch.testing.assert_close(kernel_norms(weight), torch.full((len(weight),), math.sqrt(weight[0].numel())))


@every_layer
def test_equals_definition(make, shape):
    layer, x = make(dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    nn.init.normal_(layer.weight, std=30)  # far above eps
    norms = layer.weight.square().flatten(1).sum(1).sqrt()
    unit = layer.weight / norms.reshape(-1, *[1] * (layer.weight.dim() - 1))
    expected = (
        F.linear(x, unit) if x.dim() == 2 else F.conv2d(x, unit, None, layer.stride, layer.padding, 1, layer.groups)
    )
    torch.testing.assert_close(layer(x), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(layer(x, gain=3.0), 3 * expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(MPLinear(64, 32), (4096, 64)), (MPConv2d(16, 32, 3, padding=0), (64, 16, 10, 10))],
    ids=["linear", "conv"],
)
@pytest.mark.parametrize("scale", [1, 100], ids=["as created", "longer kernels"])
def test_layers_preserve_magnitude_of_gaussian_input(layer, shape, scale):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        layer.weight *= scale
        # Kernels are random, but have norm 1: the variance over outputs is 1 for each kernel.
        assert magnitude(layer(torch.randn(shape, generator=generator))) == pytest.approx(1, abs=0.02)


def test_functions_preserve_magnitude_of_gaussian_input():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 1000, 200, generator=generator)
    assert magnitude(mp_silu(a)) == pytest.approx(1, abs=0.01)
    for t in (0, 0.3, 0.5, 1):
        assert magnitude(mp_sum(a, b, t)) == pytest.approx(1, abs=0.01)
        assert magnitude(mp_cat(a, b[:, :40], t=t)) == pytest.approx(1, abs=0.01)


def test_cat_weights_contributions_by_t():
    a, b = torch.ones(1, 8), torch.ones(1, 2)
    joined = mp_cat(a, b, t=0.3)
    parts = joined[:, :8].square().sum().sqrt(), joined[:, 8:].square().sum().sqrt()
    assert (parts[1] / parts[0]).item() == pytest.approx(0.3 / 0.7)
    assert magnitude(joined) == pytest.approx(1)


def test_sum_and_cat_equal_their_limits():
    a, b = torch.randn(2, 3, 4, 5)
    assert torch.equal(mp_sum(a, b, 0), a)
    assert torch.equal(mp_sum(a, b, 1), b)
    torch.testing.assert_close(mp_sum(a, b), (a + b) / math.sqrt(2))
    torch.testing.assert_close(mp_cat(a, b, dim=-1), torch.cat([a, b], -1))


@every_layer
def test_gradients(make, shape):
    layer, x = make(dtype=torch.float64), torch.randn(shape, dtype=torch.float64, requires_grad=True)
    gain = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    weight = layer.weight.detach().clone().requires_grad_()

    def function(x, weight, gain):
        return torch.func.functional_call(layer, {"weight": weight}, (x, gain))

    assert torch.autograd.gradcheck(function, (x, weight, gain))


def test_gradients_of_functions():
    a, b = (torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda a, b: mp_cat(mp_silu(a), mp_sum(a, b, 0.3), t=0.7), (a, b))


@every_layer
def test_gradient_is_orthogonal_to_kernels(make, shape):
    layer = make(dtype=torch.float64)
    layer(torch.randn(shape, dtype=torch.float64)).square().sum().backward()
    products = (layer.weight * layer.weight.grad).flatten(1).sum(1)
    # eps = 1e-4 below the root leaves a component of 1e-4/n.
    assert products.abs().max() < 1e-3 * layer.weight.grad.norm()


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
def test_keep_norms_forces_the_norm_after_each_step(optimizer_class):
    model = nn.Sequential(MPConv2d(3, 8, 3), nn.SiLU(), nn.Flatten(), MPLinear(8 * 16, 4))
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    sn.keep_norms(optimizer, model)
    before = model[0].weight.detach().clone()
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(2, 3, 4, 4)).square().sum().backward()
        optimizer.step()
        for layer in (model[0], model[3]):
            expected = torch.full((len(layer.weight),), math.sqrt(layer.weight[0].numel()))
            torch.testing.assert_close(kernel_norms(layer.weight), expected)
    assert not torch.allclose(before, model[0].weight)


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adam])
def test_training_equals_the_algorithm_of_the_paper(optimizer_class):
    """There each training step scales the stored kernel to √n, then uses w/‖w‖ in the graph; here after each step."""
    layer = MPLinear(6, 4, dtype=torch.float64)
    weight = layer.weight.detach().clone().requires_grad_()
    ours, theirs = optimizer_class(layer.parameters(), lr=0.1), optimizer_class([weight], lr=0.1)
    sn.keep_norms(ours, layer)
    for _ in range(5):
        x = torch.randn(8, 6, dtype=torch.float64)
        with torch.no_grad():
            weight *= math.sqrt(6) / weight.norm(dim=1, keepdim=True)
        expected = x @ (weight / weight.norm(dim=1, keepdim=True)).T
        output = layer(x)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)  # eps = 1e-4 changes norms of √6 by 1e-5
        for out, optimizer in ((output, ours), (expected, theirs)):
            optimizer.zero_grad()
            (out - x[:, :4]).square().sum().backward()
            optimizer.step()
    is_scaled = [
        torch.allclose(w.detach().norm(dim=1), torch.tensor(6.0).sqrt().double()) for w in (layer.weight, weight)
    ]
    assert is_scaled == [True, False]  # theirs is scaled in the next forward pass only


def test_normalize_resets_norms_and_leaves_zero_kernels():
    layer = MPLinear(6, 3)
    with torch.no_grad():
        layer.weight *= 7
        layer.weight[1] = 0
    layer.normalize_()
    torch.testing.assert_close(kernel_norms(layer.weight), torch.tensor([6, 0, 6]).sqrt())


def test_zero_kernel_and_zero_input_have_finite_gradients():
    layer, x = MPLinear(4, 3), torch.zeros(2, 4, requires_grad=True)
    nn.init.zeros_(layer.weight)
    layer(x).sum().backward()
    assert x.grad.isfinite().all()
    assert layer.weight.grad.isfinite().all()


def test_layer_used_twice_trains():
    layer, x = MPLinear(4, 4), torch.randn(2, 4)
    mp_silu(layer(mp_silu(layer(x)))).sum().backward()
    assert layer.weight.grad.any()


@every_layer
def test_bfloat16_and_empty_batch(make, shape):
    layer = make()
    assert layer(torch.randn(shape).bfloat16()).dtype is torch.bfloat16
    assert layer(torch.randn(shape)[:0]).shape[0] == 0


@every_layer
def test_compiles(make, shape):
    layer, x = make(), torch.randn(shape)
    torch.testing.assert_close(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), layer(x))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: MPLinear(0, 3), ValueError, "in_features must be at least 1, got 0"),
        (lambda: MPConv2d(3, 4, 3, groups=2), ValueError, "groups must be a divisor of in_channels=3"),
        (lambda: MPConv2d(3, 4, 0), ValueError, "kernel_size must be at least 1, got 0"),
        (lambda: MPLinear(3, 4, bias=True), TypeError, "MPLinear has no option 'bias'"),
        (lambda: MPLinear(3, 4)(torch.ones(2, 3).long()), TypeError, "input must be a floating point tensor"),
        (lambda: mp_sum(torch.ones(2), torch.ones(2), 1.5), ValueError, r"t must be from 0 to 1, got 1\.5"),
        (lambda: mp_cat(torch.ones(2, 0), torch.ones(2, 1)), ValueError, "must have at least 1 entry along dim=1"),
    ],
    ids=range(7),
)
def test_wrong_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_are_public_names():
    assert sn.MPConv2d is MPConv2d
    assert sn.layers.mp_silu is mp_silu
