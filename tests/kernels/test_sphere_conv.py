"""Fused kernels against the plain formula: values, all gradients, memory, and behavior inside torch."""

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import spherenet as sn
from cases import GEOMETRIES, OPERATORS, Geometry
from spherenet.kernels.sphere_conv import native
from spherenet.ops import sphere_conv as plain

every_operator = pytest.mark.parametrize("operator", OPERATORS, ids=str)
LAYOUTS = {
    "planes": Geometry(2, (9, 8), channels=4, arguments={"padding": 1}),
    "rows": Geometry(2, (9, 8), channels=4, filters=20, arguments={"padding": 1}),
    "grouped planes": Geometry(2, (9, 8), channels=4, arguments={"padding": 1, "groups": 2, "stride": 2}),
    "grouped rows": Geometry(2, (9, 8), channels=4, filters=36, arguments={"padding": 1, "groups": 2, "stride": 2}),
    "depthwise rows": Geometry(2, (9, 8), channels=4, filters=4, arguments={"padding": 1, "groups": 4}),
    "1d": Geometry(1, (20,), channels=4, arguments={"dilation": 2}),
    "3d": Geometry(3, (5, 6, 7), channels=4, arguments={"stride": 2}),
}


def gradients(layer, x, backend, weighting=None):
    """Return the output and the gradients of input and parameters under one backend."""
    layer.zero_grad()
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    with sn.backend(backend):
        out = layer(x)
    weighting = torch.randn_like(out, dtype=torch.float64) if weighting is None else weighting
    out.backward(weighting.to(out.dtype))
    result = {"input": x.grad} | {name: p.grad.clone() for name, p in layer.named_parameters()}
    return out.detach(), result, weighting


def assert_same(layer, x, rtol, backend="auto"):
    """Compare a backend with the plain formula; errors of gradients are relative to their largest entry."""
    expected, expected_gradients, weighting = gradients(layer, x, "reference")
    got, got_gradients, _ = gradients(layer, x, backend, weighting)
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=0, atol=rtol)
    for name, value in expected_gradients.items():
        peak = value.abs().max().item()
        torch.testing.assert_close(
            got_gradients[name],
            value,
            rtol=0,
            atol=rtol * max(peak, 1e-3),
            msg=lambda text, n=name: f"{n}: {text}",
        )


def in_layout(name, layer, x):
    if not name.endswith("rows"):
        return layer, x
    return layer.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)


@every_operator
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_all_geometries_in_float64(geometry, operator):
    layer = geometry.layer(**operator.arguments, bias=True, rescale="learned")
    assert_same(layer, geometry.images(), 1e-10)
    assert_same(geometry.layer(**operator.arguments), geometry.images(), 1e-10)


@every_operator
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_all_geometries_in_float32(geometry, operator):
    layer = geometry.layer(**operator.arguments, dtype=torch.float32)
    assert_same(layer, geometry.images(dtype=torch.float32), 2e-5)


@every_operator
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("affine", [{}, {"rescale": "learned", "bias": True}, {"rescale": (0.5, 2.0)}], ids=str)
def test_layouts_in_float32(layout, operator, affine):
    geometry = LAYOUTS[layout]
    layer, x = geometry.layer(**operator.arguments, **affine, dtype=torch.float32), geometry.images(3, torch.float32)
    assert_same(*in_layout(layout, layer, x), 2e-5)


@every_operator
@pytest.mark.parametrize("layout", ["planes", "rows"])
def test_float32_equals_float64_up_to_a_few_roundings(operator, layout):
    """The float32 convolution itself rounds as much as the kernels; test_winograd.py bounds Winograd's algorithm."""
    torch.manual_seed(1)
    double = sn.SphereConv2d(32, 48, 3, padding=1, **operator.arguments, dtype=torch.float64)
    x = torch.randn(4, 32, 10, 10, dtype=torch.float64)
    single = sn.SphereConv2d(32, 48, 3, padding=1, **operator.arguments)
    single.load_state_dict({name: value.float() for name, value in double.state_dict().items()})
    double.load_state_dict({name: value.double() for name, value in single.state_dict().items()})
    x = x.float().double()
    expected, expected_gradients, weighting = gradients(*in_layout(layout, double, x), "reference")
    with sn.convolution("direct"):
        got, got_gradients, _ = gradients(*in_layout(layout, single, x.float()), "native", weighting)
    assert (got - expected).abs().max() <= 5e-7 * operator.steepest()
    for name in ("input", "weight"):
        error = (got_gradients[name] - expected_gradients[name]).abs().max()
        assert error <= 1.5e-6 * expected_gradients[name].abs().max(), name


@every_operator
@pytest.mark.parametrize("rescale", [None, "learned"])
def test_linear_layers(operator, rescale):
    layer = sn.SphereLinear(7, 21, **operator.arguments, rescale=rescale)
    assert_same(layer, torch.randn(6, 7), 2e-5)
    assert_same(layer, torch.randn(2, 3, 7), 2e-5)


@every_operator
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["planes", "rows", "grouped rows"])
@pytest.mark.parametrize("rescale", [None, "learned"])
def test_half_precision(operator, dtype, layout, rescale):
    geometry = LAYOUTS[layout]
    layer, x = geometry.layer(**operator.arguments, rescale=rescale, dtype=dtype), geometry.images(3, dtype)
    # A half-precision result may be rounded up or down.
    assert_same(*in_layout(layout, layer, x), 8 * torch.finfo(dtype).eps * max(1, operator.steepest()))


@every_operator
def test_autocast_with_float32_weights(operator):
    layer, x = sn.SphereConv2d(4, 20, 3, **operator.arguments), torch.randn(3, 4, 7, 7)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
        assert_same(layer, x, 8 * torch.finfo(torch.bfloat16).eps * max(1, operator.steepest()))
    assert layer.weight.grad.dtype == torch.float32


@every_operator
def test_gradcheck(operator):
    """The native kernels against finite differences, in float64."""
    layer = sn.SphereConv2d(2, 3, 3, padding=1, rescale="learned", bias=True, **operator.arguments, dtype=torch.float64)
    x = torch.randn(2, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    names, values = zip(*layer.named_parameters(), strict=True)

    def run(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    with sn.backend("native"):
        assert torch.autograd.gradcheck(run, (x, *values))
        assert torch.autograd.gradgradcheck(run, (x, *values), fast_mode=True)


@every_operator
@pytest.mark.parametrize("layout", ["planes", "rows"])
def test_edges(operator, layout):
    """Zero patches, θ = 0 and π, and overflowing patches have defined values and finite gradients."""
    layer = sn.SphereConv2d(4, 20, 3, **operator.arguments)
    x = torch.randn(6, 4, 5, 5)
    layer, x = in_layout(layout, layer, x)
    x[0] = 0
    x[1, ..., 1:4, 1:4] = 50 * layer.weight[0]
    x[2, ..., 1:4, 1:4] = -50 * layer.weight[0]
    x[3] = 1e30
    x[4] = torch.finfo(torch.float32).max
    x[5] *= 1e-30
    x = x.detach().requires_grad_()
    out = layer(x)
    assert (out[[0, 3, 4]] == 0).all()
    assert out[1, 0, 1, 1] > 0.95
    assert out[2, 0, 1, 1] < -0.95
    out.sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    assert layer(torch.full_like(x, math.nan)).isnan().all()


@pytest.mark.parametrize("k", [1e-6, 0.01, 3.0, 100.0, 1e4])
def test_extreme_k_against_float64(k):
    """For a sigmoid that is almost a step or a line, a formula with 1 − t would lose all digits."""
    layer = sn.SphereConv2d(4, 20, 3, operator="sigmoid", k=k)
    double = sn.SphereConv2d(4, 20, 3, operator="sigmoid", k=k, dtype=torch.float64)
    double.load_state_dict({"weight": layer.weight.double()})
    x = torch.randn(3, 4, 7, 7)
    expected, expected_gradients, weighting = gradients(double, x.double(), "reference")
    got, got_gradients, _ = gradients(layer, x, "native", weighting)
    if k >= 0.01:
        steepest = max(1, 1 / k)
        assert (got - expected).abs().max() < 1e-6 * steepest
        for name, value in expected_gradients.items():
            assert (got_gradients[name] - value).abs().max() < 1e-5 * steepest * value.abs().max(), name
    assert all(value.isfinite().all() for value in got_gradients.values())


def test_small_cosines_keep_their_digits():
    """For patches nearly orthogonal to the kernel, the sigmoid is accurate relative to its value."""
    layer = sn.SphereLinear(2, 1, operator="sigmoid", k=0.3)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 0.0]]))
        x = torch.tensor([[10.0**-power, 1.0] for power in range(1, 30)])
        with sn.backend("reference"):
            expected = sn.SphereLinear(2, 1, operator="sigmoid", k=0.3, dtype=torch.float64)
            expected.weight.copy_(layer.weight)
            expected = expected(x.double())
        torch.testing.assert_close(layer(x).double(), expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, :, ::2],
        lambda x: x.transpose(2, 3),
        lambda x: x[:1].expand(5, -1, -1, -1),
        lambda x: x[:, :1].expand(-1, 4, -1, -1),
        lambda x: x.permute(0, 2, 3, 1)[..., 1:5].permute(0, 3, 1, 2),
    ],
    ids=["strided", "transposed", "expanded batch", "expanded channels", "slice of rows"],
)
def test_views(view):
    base = torch.randn(3, 8, 9, 9).to(memory_format=torch.channels_last)
    x = view(base)
    layer = sn.SphereConv2d(x.shape[1], 6, 3, operator="sigmoid")
    assert_same(layer, x, 2e-5)


@pytest.mark.parametrize(
    ("make", "shape"),
    [(lambda: sn.SphereConv2d(4, 3, 1, operator="learnable"), (0, 4, 5, 5)), (lambda: sn.SphereLinear(7, 3), (0, 7))],
    ids=["conv", "linear"],
)
def test_empty_batches(make, shape):
    layer, x = make(), torch.randn(shape, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == shape
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_number_of_threads_does_not_change_result(threads, batch):
    """A batch smaller than the number of threads is divided into bands of images."""
    layer = sn.SphereConv2d(8, 32, 3, padding=1, operator="learnable", rescale="learned")
    x = torch.randn(batch, 8, 40, 37)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for layout in ("planes", "rows"):
            assert_same(*in_layout(layout, layer, x), 2e-5)
    finally:
        torch.set_num_threads(before)


def test_results_are_reproducible():
    layer, x = sn.SphereConv2d(8, 32, 3, operator="learnable", rescale="learned"), torch.randn(33, 8, 12, 12)
    first, second = gradients(layer, x, "auto"), None
    second = gradients(layer, x, "auto", first[2])
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])


def test_flop_counter_counts_convolution():
    """Forward and backward count like those of the plain convolution."""
    x = torch.randn(2, 8, 10, 10, requires_grad=True)
    counts = []
    for layer in (nn.Conv2d(8, 16, 3, stride=2, bias=False), sn.SphereConv2d(8, 16, 3, stride=2, operator="sigmoid")):
        with FlopCounterMode(display=False) as counter:
            layer(x).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
    rows = torch.randn(5, 8, requires_grad=True)
    for layer in (nn.Linear(8, 16, bias=False), sn.SphereLinear(8, 16)):
        with FlopCounterMode(display=False) as counter:
            layer(rows).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[2] == counts[3] > 0


def saved_bytes(layer, x):
    """Return the bytes that autograd saves for backward, each storage once, without input and parameters."""
    owned = {t.untyped_storage().data_ptr() for t in (x, *layer.parameters())}
    kept = {}

    def pack(t):
        if t.untyped_storage().data_ptr() not in owned:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = layer(x)
    return out, kept


@every_operator
def test_forward_saves_one_map_norms_and_small_tensors(operator):
    """The map is the output, or that of the cosines if they cannot be recovered from it."""
    layer = sn.SphereConv2d(16, 32, 3, padding=1, **operator.arguments)
    x = torch.randn(4, 16, 12, 12, requires_grad=True)
    out, kept = saved_bytes(layer, x)
    assert (out.untyped_storage().data_ptr() in kept) == layer.angle.is_recoverable
    norm_map, weights = 4 * 4 * 12 * 12, 4 * layer.weight.numel()
    assert sum(kept.values()) <= out.untyped_storage().nbytes() + norm_map + 2 * weights + 32 * 64


@pytest.mark.parametrize(("operator", "maps"), [("cosine", 0), ("linear", 1), ("sigmoid", 1)])
def test_half_precision_saves_the_convolution_unless_g_is_cosine(operator, maps):
    layer = sn.SphereConv2d(16, 32, 3, padding=1, operator=operator, dtype=torch.bfloat16)
    x = torch.randn(4, 16, 12, 12, dtype=torch.bfloat16, requires_grad=True)
    out, kept = saved_bytes(layer, x)
    kept.pop(out.untyped_storage().data_ptr(), None)
    assert sum(kept.values()) <= maps * out.numel() * 2 + 4 * 4 * 12 * 12 + 4 * 4 * layer.weight.numel()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["planes", "rows"])
@pytest.mark.parametrize("options", [{"operator": "sigmoid"}, {"operator": "learnable", "rescale": "learned"}], ids=str)
def test_half_precision_gradients_of_zero_and_overflowing_patches(dtype, layout, options):
    layer = sn.SphereConv2d(4, 6, 1, **options, dtype=dtype)
    x = torch.randn(2, 4, 3, 3, dtype=dtype)
    x[0, :, 0, 0] = 0
    x[0, :, 1, 1] = 3e38 if dtype == torch.bfloat16 else math.inf
    layer, x = in_layout(layout, layer, x)
    results = {}
    for backend in ("native", "reference"):
        inputs = x.clone(memory_format=torch.preserve_format).requires_grad_()
        with sn.backend(backend):
            out = layer(inputs)
            results[backend] = [out, *torch.autograd.grad(out.square().sum(), [inputs, *layer.parameters()])]
    for got, expected in zip(*results.values(), strict=True):
        assert torch.equal(got.isnan(), expected.isnan())
        peak = expected.float().nan_to_num().abs().max()
        assert (got.float() - expected.float()).nan_to_num().abs().max() <= 0.03 * peak
    out, of_x = results["native"][:2]
    assert out[0, :, 0, 0].eq(out[0, :, 1, 1]).all()  # g(π/2)
    assert of_x[0, :, 0, 0].isfinite().all()


@every_operator
@pytest.mark.parametrize("change", [nn.ReLU(inplace=True), lambda y: y.mul_(3), lambda y: y.clamp_(0.1, 0.2)])
def test_gradients_after_in_place_change_of_output(operator, change):
    layer = sn.SphereConv2d(3, 4, 3, **operator.arguments, dtype=torch.float64)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)

    def run(backend):
        layer.zero_grad()
        inputs = x.clone().requires_grad_()
        with sn.backend(backend):
            change(layer(inputs)).square().sum().backward()
        return [inputs.grad, *(p.grad.clone() for p in layer.parameters())]

    for got, expected in zip(run("native"), run("reference"), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


def test_convolution_is_repeated_only_after_in_place_change(monkeypatch):
    again = []
    original = plain.cosines
    monkeypatch.setattr(plain, "cosines", lambda *a, **k: again.append(1) or original(*a, **k))
    layer, x = sn.SphereConv2d(3, 4, 3), torch.randn(2, 3, 6, 6)
    nn.functional.relu(layer(x)).sum().backward()
    assert not again
    nn.functional.relu_(layer(x)).sum().backward()
    assert again


def test_activation_checkpointing():
    block = nn.Sequential(sn.SphereConv2d(3, 4, 3, operator="sigmoid"), nn.ReLU(inplace=True))
    x = torch.randn(2, 3, 6, 6, requires_grad=True)
    (expected,) = torch.autograd.grad(block(x).square().sum(), x)
    (got,) = torch.autograd.grad(checkpoint(block, x, use_reentrant=False).square().sum(), x)
    torch.testing.assert_close(got, expected)


def test_retain_graph_and_frozen_weight():
    layer, x = sn.SphereConv2d(3, 4, 3, operator="learnable"), torch.randn(2, 3, 6, 6)
    out = layer(x).square().sum()
    first = torch.autograd.grad(out, layer.weight, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(out, layer.weight)[0], first)
    layer.weight.requires_grad_(False)
    layer(x).square().sum().backward()
    assert layer.weight.grad is None
    assert layer.angle.raw_k.grad is not None
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), layer(x.clone()))


def test_consecutive_backward_passes_do_not_share_memory():
    """Backward reuses scratch memory, but gradients that were returned do not change."""
    layers = [sn.SphereConv2d(3, 8, 3, padding=1), sn.SphereConv2d(8, 8, 3, padding=1)]
    x = torch.randn(4, 3, 9, 9, requires_grad=True)
    outputs = [layers[0](x), layers[1](torch.randn(4, 8, 9, 9))]
    (first,) = torch.autograd.grad(outputs[0].square().sum(), x)
    copy = first.clone()
    outputs[1].square().sum().backward()
    assert torch.equal(first, copy)
    native.release_scratch()
