"""The fused kernels equal the reference, value and every gradient, compiled and not, and keep what they promise."""

import logging
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import spherenet as sn
from cases import GEOMETRIES, OPERATORS, Geometry
from spherenet.kernels import compiled
from spherenet.kernels.sphere_conv import sphere_conv

every_operator = pytest.mark.parametrize("operator", OPERATORS, ids=str)
LARGE = {
    "planes": Geometry(2, (9, 8), channels=4, arguments={"padding": 1}),
    "rows": Geometry(2, (9, 8), channels=4, arguments={"padding": 1}),
    "grouped planes": Geometry(2, (9, 8), channels=4, arguments={"padding": 1, "groups": 2, "stride": 2}),
    "grouped rows": Geometry(2, (9, 8), channels=4, arguments={"padding": 1, "groups": 2, "stride": 2}),
    "1d": Geometry(1, (20,), channels=4, arguments={"dilation": 2}),
    "3d": Geometry(3, (5, 6, 7), channels=4, arguments={"stride": 2}),
}


@pytest.fixture
def compile_everything(monkeypatch):
    monkeypatch.setattr(compiled, "SMALLEST_COMPILED", 0)


def gradients(layer, x, backend, weighting=None):
    """Output and gradients of input and parameters under one backend."""
    layer.zero_grad()
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    with sn.functional.backend(backend):
        out = layer(x)
    weighting = torch.randn_like(out, dtype=torch.float64) if weighting is None else weighting
    out.backward(weighting.to(out.dtype))
    found = {"input": x.grad} | {name: p.grad.clone() for name, p in layer.named_parameters()}
    return out.detach(), found, weighting


def assert_twins(layer, x, rtol):
    """Fused = reference; each gradient's error is relative to its largest entry (SPEC 1)."""
    expected, expected_gradients, weighting = gradients(layer, x, "reference")
    got, got_gradients, _ = gradients(layer, x, "fused", weighting)
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


@every_operator
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_equal_in_float64_over_every_geometry(geometry, operator):
    layer = geometry.layer(**operator.arguments, bias=True, rescale="learned")
    assert_twins(layer, geometry.images(), 1e-10)
    assert_twins(geometry.layer(**operator.arguments), geometry.images(), 1e-10)


@every_operator
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_equal_in_float32_over_every_geometry(geometry, operator):
    layer = geometry.layer(**operator.arguments, dtype=torch.float32)
    assert_twins(layer, geometry.images(dtype=torch.float32), 2e-5)


@every_operator
@pytest.mark.parametrize("layout", LARGE)
def test_compiled_kernels_equal_the_reference(layout, operator, compile_everything):
    geometry = LARGE[layout]
    layer, x = geometry.layer(**operator.arguments, dtype=torch.float32), geometry.images(3, torch.float32)
    if layout.endswith("rows"):
        layer, x = layer.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    before = compiled.compilations()
    assert_twins(layer, x, 2e-5)
    assert compiled.compilations() >= before
    assert not compiled._broken


@every_operator
def test_compiled_linear_equals_the_reference(operator, compile_everything):
    layer = sn.SphereLinear(7, 5, **operator.arguments)
    assert_twins(layer, torch.randn(6, 7), 2e-5)


@every_operator
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", ["compiled", "in steps"])
def test_half_precision(operator, dtype, how, monkeypatch):
    if how == "compiled":
        monkeypatch.setattr(compiled, "SMALLEST_COMPILED", 0)
    geometry = LARGE["rows"]
    layer, x = geometry.layer(**operator.arguments, dtype=dtype), geometry.images(3, dtype)
    # Two roundings of a half-precision result may fall on either side.
    assert_twins(layer, x, 8 * torch.finfo(dtype).eps * max(1, operator.steepest()))


@every_operator
@pytest.mark.parametrize("how", ["compiled", "in steps"])
def test_edges(operator, how, monkeypatch):
    """Zero patches, θ = 0 and π, overflowing patches: defined values, finite gradients, by the kernels too."""
    if how == "compiled":
        monkeypatch.setattr(compiled, "SMALLEST_COMPILED", 0)
    layer = sn.SphereConv2d(4, 4, 3, **operator.arguments)
    x = torch.randn(6, 4, 5, 5)
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


def samples_for_opcheck():
    x, w = torch.randn(2, 4, 5, 6), torch.randn(4, 4, 3, 3)
    w = sn.ops.norms.direction(w, (1, 2, 3))
    k = torch.full((4,), 0.3)
    for angle, this_k in (("cosine", None), ("linear", None), ("sigmoid", k)):
        yield angle, (x, w, this_k, [1, 1], [1, 1], [1, 1], 1, 1e-4, angle, False)
    yield "grouped, strided", (x, w[:, :2], None, [2, 2], [1, 1], [1, 1], 2, 1e-4, "linear", False)
    yield "keeps cosines", (x, w, k, [1, 1], [0, 0], [1, 1], 1, 1e-4, "sigmoid", True)
    rows = (x.to(memory_format=torch.channels_last), w.to(memory_format=torch.channels_last))
    grouped = w[:, :2].contiguous(memory_format=torch.channels_last)
    yield "grouped rows", (rows[0], grouped, k, [1, 1], [1, 1], [1, 1], 2, 1e-4, "sigmoid", False)
    yield "rows", (*rows, None, [1, 1], [1, 1], [1, 1], 1, 1e-4, "cosine", False)
    yield "linear layer", (torch.randn(3, 7), torch.randn(4, 7), k, [], [], [], 1, 1e-4, "sigmoid", False)


@pytest.mark.parametrize("sample", [pytest.param(s, id=name) for name, s in samples_for_opcheck()])
def test_opcheck(sample):
    arguments = [
        v.detach().clone(memory_format=torch.preserve_format).requires_grad_() if isinstance(v, torch.Tensor) else v
        for v in sample
    ]
    torch.library.opcheck(sphere_conv, tuple(arguments))


def saved_bytes(layer, x):
    """Bytes that autograd keeps for backward, each storage once, without those of the input and the parameters."""
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
def test_forward_keeps_its_output_the_norm_map_and_small_things(operator):
    layer = sn.SphereConv2d(16, 32, 3, padding=1, **operator.arguments)
    x = torch.randn(4, 16, 12, 12, requires_grad=True)
    out, kept = saved_bytes(layer, x)
    assert kept.pop(out.untyped_storage().data_ptr()) == out.untyped_storage().nbytes()
    norm_map, weights = 4 * 4 * 12 * 12, 4 * layer.weight.numel()
    assert sum(kept.values()) <= norm_map + 2 * weights + 32 * 64


def test_half_precision_keeps_one_more_map():
    layer = sn.SphereConv2d(16, 32, 3, padding=1, dtype=torch.bfloat16)
    x = torch.randn(4, 16, 12, 12, dtype=torch.bfloat16, requires_grad=True)
    out, kept = saved_bytes(layer, x)
    assert sum(kept.values()) <= out.numel() * 4 + 4 * 4 * 12 * 12 + 4 * 4 * layer.weight.numel()


@every_operator
@pytest.mark.parametrize("change", [nn.ReLU(inplace=True), lambda y: y.mul_(3), lambda y: y.clamp_(0.1, 0.2)])
def test_outputs_changed_in_place_still_give_right_gradients(operator, change):
    layer = sn.SphereConv2d(3, 4, 3, **operator.arguments, dtype=torch.float64)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)

    def run(backend):
        layer.zero_grad()
        inputs = x.clone().requires_grad_()
        with sn.functional.backend(backend):
            change(layer(inputs)).square().sum().backward()
        return [inputs.grad, *(p.grad.clone() for p in layer.parameters())]

    for got, expected in zip(run("fused"), run("reference"), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


def test_nothing_is_convolved_again_unless_the_output_was_changed(monkeypatch):
    again = []
    original = sn.ops.composite.cosines
    monkeypatch.setattr(sn.ops.composite, "cosines", lambda *a, **k: again.append(1) or original(*a, **k))
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


def test_retain_graph_and_frozen_parts():
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


def test_deep_networks_and_changing_batches_share_a_handful_of_compilations(monkeypatch):
    monkeypatch.setattr(compiled, "SMALLEST_COMPILED", 64)
    layers = []
    for index in range(69):
        width = (4, 6, 8)[index // 23]
        layers.append(sn.SphereConv2d((4, *[(4, 6, 8)[i // 23] for i in range(69)])[index], width, 3, padding=1))
    model = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    before = compiled.compilations()
    for batch in (2, 3, 5, 8):
        x = torch.randn(batch, 4, 6, 6, requires_grad=True).to(memory_format=torch.channels_last)
        model(x).sum().backward()
    with torch.no_grad():
        model.eval()(x)
    assert compiled.compilations() - before <= 6


def test_without_a_compiler_it_runs_in_steps_and_says_so_once(monkeypatch, caplog):
    def no_compiler(*_):
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(compiled, "SMALLEST_COMPILED", 0)
    monkeypatch.setattr(compiled, "_broken", False)
    monkeypatch.setattr(torch, "compile", lambda *a, **k: no_compiler)
    broken = compiled.fused(lambda x: None, lambda x: x + 1)
    with caplog.at_level(logging.INFO, logger="spherenet"):
        x = torch.ones(4, 4)
        torch.testing.assert_close(broken(x), x + 1)
        torch.testing.assert_close(broken(x), x + 1)
    assert [record.getMessage() for record in caplog.records] == [
        "spherenet runs without compiled kernels: no C++ compiler"
    ]


def test_unknown_backend():
    with (
        pytest.raises(ValueError, match="backend must be one of 'fused', 'reference', got 'fast'"),
        sn.functional.backend("fast"),
    ):
        pass
