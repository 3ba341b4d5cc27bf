"""Orthogonality penalty: value, gradient, minimum, numerics, invalid arguments."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

from spherenet.layers import LazySphereLinear, SphereConv1d, SphereConv2d, SphereConv3d, SphereLinear
from spherenet.regularizers import kernels, orthogonality, orthogonality_minimum
from spherenet.regularizers.kernels import gram

FORMS = ["raw", "normalized"]

LAYERS = {
    "linear": lambda **kw: SphereLinear(5, 3, **kw),
    "more kernels than fan-in": lambda **kw: SphereLinear(3, 7, **kw),
    "one kernel": lambda **kw: SphereLinear(4, 1, **kw),
    "conv1d": lambda **kw: SphereConv1d(2, 4, 3, **kw),
    "conv2d": lambda **kw: SphereConv2d(3, 4, 2, **kw),
    "conv3d": lambda **kw: SphereConv3d(2, 3, 2, **kw),
    "groups": lambda **kw: SphereConv2d(4, 6, 3, groups=2, **kw),
    "groups, more kernels than fan-in": lambda **kw: SphereConv2d(2, 10, 1, groups=2, **kw),
    "depthwise": lambda **kw: SphereConv2d(4, 4, 3, groups=4, **kw),
    "large eps": lambda **kw: SphereLinear(5, 3, eps=0.5, **kw),
}


def slow_orthogonality(layer, form):
    """Return ‖WᵀW − I‖², computed entry by entry."""
    groups = getattr(layer, "groups", 1)
    total = torch.zeros((), dtype=torch.float64)
    for group in layer.weight.chunk(groups):
        kernels = [kernel.flatten().double() for kernel in group]
        if form == "normalized":
            kernels = [kernel / kernel.square().sum().clamp_min(layer.eps).sqrt() for kernel in kernels]
        for i, a in enumerate(kernels):
            for j, b in enumerate(kernels):
                total = total + ((a * b).sum() - float(i == j)) ** 2
    return total


def many_layers(**kw):
    """Return layers of which most, but not all, share a stack: three widths, groups, another eps."""
    widths = [4, 4, 4, 6, 6, 6, 3, 3, 3]
    layers = [SphereConv2d(i, o, 3, **kw) for i, o in zip([2, *widths], widths, strict=False)]
    return nn.Sequential(
        *layers, SphereConv2d(6, 6, 3, groups=2, **kw), SphereConv2d(4, 4, 3, eps=0.1, **kw), nn.ReLU()
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", LAYERS)
def test_equals_the_formula(name, form):
    layer = LAYERS[name](dtype=torch.float64)
    torch.testing.assert_close(orthogonality(layer, form), slow_orthogonality(layer, form), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_penalty_of_a_model_is_the_sum_over_its_layers(form):
    model = many_layers(dtype=torch.float64)
    reference = copy.deepcopy(model)
    value = orthogonality(model, form)
    expected = sum(slow_orthogonality(layer, form) for layer in reference if not isinstance(layer, nn.ReLU))
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    value.backward()
    expected.backward()
    for parameter, oracle in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, oracle.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("small", [0, 10**9], ids=["one by one", "in a batch"])
def test_batched_and_separate_products_agree(small, monkeypatch):
    monkeypatch.setattr(kernels, "SMALL_MATRIX", small)
    matrices = [torch.randn(g, 3, 5, dtype=torch.float64, requires_grad=True) for g in (1, 2, 1)]
    result = gram(matrices)
    torch.testing.assert_close(result, torch.cat([m @ m.mT for m in matrices]))
    assert torch.autograd.gradcheck(lambda *m: gram(m), matrices, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda *m: gram(m), matrices)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["conv2d", "groups", "more kernels than fan-in"])
def test_gradcheck_to_second_order(name, form):
    model = nn.Sequential(LAYERS[name](dtype=torch.float64))

    class Penalty(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self):
            return orthogonality(self.model, form)

    penalty = Penalty()
    weight = model[0].weight.detach().clone().requires_grad_()

    def of_weight(w):
        return functional_call(penalty, {"model.0.weight": w}, ())

    assert torch.autograd.gradcheck(of_weight, weight)
    assert torch.autograd.gradgradcheck(of_weight, weight)
    hessian = torch.func.hessian(of_weight)(weight.detach())
    assert hessian.shape == (*weight.shape, *weight.shape)


def test_values_computed_by_hand():
    layer = SphereLinear(2, 2, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[3.0, 0.0], [1.0, 1.0]]))
    # WᵀW = [[9, 3], [3, 2]]; unit kernels have the cosine 1/√2.
    assert orthogonality(layer).item() == pytest.approx(8**2 + 3**2 + 3**2 + 1**2)
    assert orthogonality(layer, "normalized").item() == pytest.approx(2 * 0.5)


@pytest.mark.parametrize("form", FORMS)
def test_orthonormal_kernels_have_no_penalty(form):
    layer = SphereConv2d(2, 8, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.linalg.qr(torch.randn(8, 8)).Q.view_as(layer.weight))
    assert orthogonality(layer, form).item() < 1e-10


def test_minimum_of_an_overcomplete_layer_is_attained():
    # Three kernels in the plane, 120° apart, form a tight frame.
    turn = torch.arange(3, dtype=torch.float64) * 2 * torch.pi / 3
    frame = torch.stack([turn.cos(), turn.sin()], 1)
    layer = SphereLinear(2, 3, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(frame)
    assert orthogonality_minimum(layer, "normalized") == 1.5
    assert orthogonality(layer, "normalized").item() == pytest.approx(1.5)
    with torch.no_grad():
        layer.weight.mul_((2 / 3) ** 0.5)
    assert orthogonality_minimum(layer) == 1
    assert orthogonality(layer).item() == pytest.approx(1)
    torch.testing.assert_close(torch.autograd.grad(orthogonality(layer), layer.weight)[0], torch.zeros(3, 2).double())


@pytest.mark.parametrize("form", FORMS)
def test_wide_layer_needs_no_matrix_of_all_pairs_of_kernels(form):
    layer = SphereLinear(2, 200_000, dtype=torch.float64)  # all pairs would take 320 GB
    with torch.no_grad():
        layer.weight.normal_()
    kernels = layer.weight.detach()
    kernels = kernels if form == "raw" else kernels / kernels.norm(dim=1, keepdim=True).clamp_min(0.01)
    squares = (kernels.T @ kernels).square().sum() - 2 * kernels.square().sum() + len(kernels)
    torch.testing.assert_close(orthogonality(layer, form).detach(), squares, rtol=1e-9, atol=0)


def test_layers_of_the_same_shape_have_their_own_eps():
    layers = [SphereLinear(4, 3, dtype=torch.float64, eps=eps) for eps in (1e-4, 0.5)]
    expected = sum(slow_orthogonality(layer, "normalized") for layer in layers)
    torch.testing.assert_close(orthogonality(layers, "normalized"), expected)


@pytest.mark.parametrize("form", FORMS)
def test_gradient_descent_reaches_the_minimum(form):
    model = nn.Sequential(SphereLinear(3, 5), SphereConv2d(2, 4, 1), SphereLinear(6, 4))
    minimum = orthogonality_minimum(model, form)
    assert minimum > 0
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for _ in range(400):
        optimizer.zero_grad()
        value = orthogonality(model, form)
        value.backward()
        optimizer.step()
        assert value.item() > minimum - 1e-3
    assert value.item() == pytest.approx(minimum, abs=0.01)


def test_minimum_counts_groups_and_weights_once():
    layer = SphereConv2d(2, 10, 1, groups=2)  # two groups of five kernels with fan-in 1
    assert orthogonality_minimum(layer) == 2 * (5 - 1)
    assert orthogonality_minimum(layer, "normalized") == 2 * 5 * (5 - 1) / 1
    assert orthogonality_minimum([layer, layer]) == 8
    assert orthogonality_minimum(nn.Conv2d(3, 4, 3)) == 0


def test_shared_layers_and_tied_weights_count_once():
    layer, tied = SphereLinear(4, 4), SphereLinear(4, 4)
    tied.weight = layer.weight
    alone = orthogonality(layer)
    assert orthogonality(nn.Sequential(layer, nn.ReLU(), layer)) == alone
    assert orthogonality(nn.Sequential(layer, tied)) == alone
    assert orthogonality([layer, tied, nn.Sequential(tied)]) == alone


def test_model_can_be_a_list_a_generator_or_a_mapping():
    model = many_layers()
    value = orthogonality(model)
    for several in (list(model), (layer for layer in model), {str(i): m for i, m in enumerate(model)}):
        torch.testing.assert_close(orthogonality(several), value)


def test_normalized_form_ignores_scale():
    model = many_layers(dtype=torch.float64)
    before = orthogonality(model, "normalized")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(7)
    torch.testing.assert_close(orthogonality(model, "normalized"), before, rtol=1e-12, atol=0)
    gradients = torch.autograd.grad(orthogonality(model, "normalized"), list(model.parameters()))
    for gradient, weight in zip(gradients, model.parameters(), strict=True):
        along = (gradient * weight).flatten(1).sum(1)
        torch.testing.assert_close(along, torch.zeros_like(along), rtol=0, atol=1e-12)


def test_penalty_of_plain_layers_is_a_constant_zero():
    cnn = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2)).double()
    with pytest.warns(UserWarning, match=r"^the penalty is 0, because model has no layer to include \(sphere\)\.$"):
        value = orthogonality(cnn)
    assert value.shape == ()
    assert value.item() == 0
    assert value.dtype == torch.float64
    assert not value.requires_grad
    loss = cnn(torch.randn(1, 3, 3, 3, dtype=torch.float64)).square().sum() + 1e-4 * value
    loss.backward()
    for plain in (cnn.bfloat16(), nn.ReLU(), [], nn.Linear(2, 2, device="meta")):
        with pytest.warns(UserWarning, match=r"the penalty is 0, .* \(sphere\)"):
            value = orthogonality(plain, include="sphere")
        assert value.device.type == "meta" or value.item() == 0
        assert value.dtype == torch.float32
    assert orthogonality(cnn, include=()) == 0  # without a warning


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype, form):
    model = many_layers().to(dtype)
    value = orthogonality(model, form)
    assert value.dtype == torch.float32
    expected = sum(slow_orthogonality(layer, form) for layer in model if not isinstance(layer, nn.ReLU))
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=0)
    value.backward()
    assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("form", FORMS)
def test_autocast_changes_nothing(form):
    model = many_layers()
    value = orthogonality(model, form)
    gradients = torch.autograd.grad(value, list(model.parameters()))
    with torch.autocast("cpu", torch.bfloat16):
        inside = orthogonality(model, form)
        inside_gradients = torch.autograd.grad(inside, list(model.parameters()))
    assert torch.equal(inside, value)
    for a, b in zip(gradients, inside_gradients, strict=True):
        assert torch.equal(a, b)


def test_mixed_dtypes_and_memory_formats():
    single, double = SphereConv2d(3, 4, 3), SphereConv2d(3, 4, 3).double()
    value = orthogonality([single, double])
    assert value.dtype == torch.float64
    torch.testing.assert_close(
        value, slow_orthogonality(single, "raw") + slow_orthogonality(double, "raw"), rtol=1e-6, atol=0
    )
    before = orthogonality(single, "normalized")
    single.to(memory_format=torch.channels_last)
    after = orthogonality(single, "normalized")
    torch.testing.assert_close(after, before)
    after.backward()
    assert single.weight.grad.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fill", [0.0, 1e-30, 1e20])
@pytest.mark.parametrize("fan_in", [2, 3])
def test_extreme_kernels_have_finite_gradients(fan_in, fill, form):
    layer = SphereLinear(fan_in, 3)
    with torch.no_grad():
        layer.weight[0] = fill
    value = orthogonality(layer, form)
    value.backward()
    if form == "raw" and fill == 1e20:
        assert value.isinf()  # ‖w‖⁴ overflows float32, as documented
    else:
        assert value.isfinite()
        assert layer.weight.grad.isfinite().all()


def test_meta_device():
    assert orthogonality(many_layers(device="meta"), "normalized").device.type == "meta"


def test_compiles_as_one_graph():
    model = many_layers()
    compiled = torch.compile(lambda: orthogonality(model), backend="aot_eager", fullgraph=True)
    value, expected = compiled(), orthogonality(model)
    torch.testing.assert_close(value, expected)
    weights = list(model.parameters())
    torch.testing.assert_close(torch.autograd.grad(value, weights), torch.autograd.grad(expected, weights))


def test_replaced_layer_is_used():
    model = nn.Sequential(SphereLinear(3, 3), SphereLinear(3, 3))
    orthogonality(model)
    model[0] = SphereLinear(3, 3)
    torch.testing.assert_close(orthogonality(model), orthogonality(model[0]) + orthogonality(model[1]))


def test_parametrized_weights():
    layer = nn.utils.parametrizations.weight_norm(SphereLinear(4, 3))
    value = orthogonality(layer)
    torch.testing.assert_close(value.double(), slow_orthogonality(layer, "raw"))
    value.backward()
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: orthogonality(SphereLinear(2, 2), "normalize"),
            ValueError,
            "'normalize'.*Did you mean 'normalized'",
        ),
        (lambda: orthogonality_minimum(SphereLinear(2, 2), "Raw"), ValueError, "form must be one of"),
        (lambda: orthogonality(3), TypeError, "model must be a module or several modules, got 3"),
        (lambda: orthogonality(torch.zeros(2)), TypeError, "modules only, got an object of type Tensor"),
        (lambda: orthogonality([nn.ReLU(), "conv"]), TypeError, "modules only, got an object of type str"),
        (lambda: orthogonality(LazySphereLinear(2)), ValueError, "LazySphereLinear is lazy and has no weight yet"),
        (lambda: orthogonality(nn.Sequential(LazySphereLinear(2))), ValueError, "0 is lazy .* run one batch"),
    ],
)
def test_invalid_arguments(call, error, words):
    with pytest.raises(error, match=words):
        call()
