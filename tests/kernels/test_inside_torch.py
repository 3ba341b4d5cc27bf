"""Fused layers inside torch: shared weights under create_graph, tracing, exporters, devices, batches of gradients."""

import copy
import subprocess
import sys

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import spherenet as sn
from spherenet.functional import sphere_linear
from spherenet.kernels import dispatch

FORMS = [
    {},
    {"center": "weight"},
    {"magnitude": "linear"},
    {"magnitude": "tanh", "radius": "learned"},
    {"center": "patch"},
]
every_form = pytest.mark.parametrize("form", FORMS, ids=str)


@every_form
def test_create_graph_does_not_change_the_gradient_of_a_shared_layer(form):
    layer = sn.SphereConv2d(4, 4, 3, padding=1, dtype=torch.float64, **form)
    x = torch.randn(1, 4, 5, 5, dtype=torch.float64)

    def gradient(create_graph):
        return torch.autograd.grad(layer(layer(x)).pow(2).sum(), layer.weight, create_graph=create_graph)[0]

    torch.testing.assert_close(gradient(True), gradient(False))
    direction = torch.randn_like(layer.weight)
    step = 1e-6
    values = []
    for sign in (1, -1):
        moved = copy.deepcopy(layer)
        moved.weight.data.add_(sign * step * direction)
        values.append(moved(moved(x)).pow(2).sum().item())
    expected = (values[0] - values[1]) / (2 * step)
    assert (gradient(True) * direction).sum().item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_create_graph_with_an_input_that_is_also_the_weight():
    v = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    loss = sphere_linear(v, v).pow(2).sum() + sphere_linear(v, v.mean(0, keepdim=True).sigmoid() * v).sum()
    first = torch.autograd.grad(loss, v, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(loss, v, create_graph=True)[0], first)
    assert torch.autograd.gradgradcheck(lambda v: sphere_linear(v, v), v)


# --- devices ------------------------------------------------------------------------------------------------------


DEVICES = """
import copy, torch, spherenet as sn
from torch import nn
layer, x = sn.SphereConv2d(3, 8, 3, rescale="learned"), torch.randn(1, 3, 8, 8)
lstm, rows = sn.SphereLSTM(3, 4), torch.randn(5, 2, 3)
with torch.device("meta"):
    assert layer(x).device.type == "cpu"
    layer(x).sum().backward()
    lstm(rows)[0].sum().backward()
print("context", flush=True)
with torch.no_grad(), torch.device("meta"):
    assert layer(x).device.type == "cpu"
print("inference", flush=True)
sn.SphereConv2d(3, 8, 3, device="meta")(x)
print("weight", flush=True)
with sn.backend("native"):
    assert copy.deepcopy(layer).to("meta")(x.to("meta")).is_meta
print("named", flush=True)
layer.beta = nn.Parameter(layer.beta.detach().to("meta"))
try:
    layer(x)
except RuntimeError:
    print("parameter", flush=True)
torch.set_default_device("meta")
assert sn.SphereConv2d(3, 8, 3, device="cpu")(x).device.type == "cpu"
print("default", flush=True)
"""


def test_tensors_without_memory_do_not_crash():
    """In a separate process, because kernels that read a wrong address end it."""
    ended = subprocess.run([sys.executable, "-c", DEVICES], capture_output=True, text=True)
    assert ended.stdout.split() == ["context", "inference", "weight", "named", "parameter", "default"], ended.stderr
    assert ended.returncode == 0


# --- subclasses, dispatch modes, tracing, batches of gradients -------------------------------------------------------


class MyParameter(nn.Parameter):
    """A subclass, as libraries for quantization and sharding define."""


@every_form
def test_weight_of_a_subclass_gives_the_same_output(form):
    layer, x = sn.SphereConv2d(3, 8, 3, **form), torch.randn(2, 3, 6, 6)
    expected = layer(x)
    layer.weight = MyParameter(layer.weight.detach().clone())
    torch.testing.assert_close(layer(x), expected)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected)


@every_form
def test_backward_alone_under_a_dispatch_mode(form):
    layer, x = sn.SphereConv2d(3, 8, 3, **form), torch.randn(2, 3, 6, 6, requires_grad=True)
    inputs = [x, *layer.parameters()]
    expected = torch.autograd.grad(layer(x).square().sum(), inputs)
    loss = layer(x).square().sum()
    with FlopCounterMode(display=False):
        actual = torch.autograd.grad(loss, inputs)
    for gradient, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-4)


@every_form
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_trace_computes_the_layer(form, tmp_path):
    layer = sn.SphereConv2d(3, 8, 3, **form).eval()
    first, second = torch.randn(2, 1, 3, 6, 6)
    layer(first)
    traced = torch.jit.trace(layer, first)
    torch.testing.assert_close(traced(second), layer(second))
    torch.jit.save(traced, tmp_path / "layer.ts")  # functions of Python could not be saved
    torch.testing.assert_close(torch.jit.load(tmp_path / "layer.ts")(second), layer(second))


@every_form
@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_exporter_of_torch_writes_the_layer(form, dynamo, tmp_path):
    layer, x = sn.SphereConv2d(3, 8, 3, padding=1, stride=2, **form).eval(), torch.randn(1, 3, 7, 6)
    file = str(tmp_path / "layer.onnx")
    torch.onnx.export(layer, (x,), file, dynamo=dynamo, verbose=False)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    [output] = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    np.testing.assert_allclose(output, layer(x).detach().numpy(), rtol=1e-4, atol=1e-5)


@every_form
def test_batched_gradients(form):
    layer, x = sn.SphereConv2d(2, 3, 3, dtype=torch.float64, **form), torch.randn(1, 2, 4, 4, dtype=torch.float64)
    expected = torch.autograd.functional.jacobian(layer, x)
    torch.testing.assert_close(torch.autograd.functional.jacobian(layer, x, vectorize=True), expected)


@pytest.mark.parametrize("name", ["SphereLSTM", "SphereGRU"])
def test_batched_gradients_of_recurrent_layers(name):
    layer, x = getattr(sn, name)(3, 4, dtype=torch.float64), torch.randn(5, 2, 3, dtype=torch.float64)
    expected = torch.autograd.functional.jacobian(lambda x: layer(x)[0], x)
    torch.testing.assert_close(torch.autograd.functional.jacobian(lambda x: layer(x)[0], x, vectorize=True), expected)


# --- layers that users replace or watch ---------------------------------------------------------------------------


class Silent(sn.SphereLinear):
    """A layer whose forward is not that of its base class."""

    def forward(self, input):
        return super().forward(input) * 0


@pytest.mark.parametrize(("name", "gates"), [("SphereLSTM", 4), ("SphereGRU", 3)])
def test_forward_of_a_replaced_recurrent_layer_is_called(name, gates):
    layer, x = getattr(sn, name)(4, 6), torch.randn(5, 2, 4)
    layer.cells[0].hh = Silent(6, 6 * gates, rescale="learned")
    with sn.backend("reference"):
        expected = layer(x)[0]
    torch.testing.assert_close(layer(x)[0], expected)


def test_hooks_of_all_modules_see_every_step():
    seen = []
    assert not dispatch.has_global_hooks()
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module)))
    try:
        assert dispatch.has_global_hooks()
        sn.SphereLSTM(4, 6)(torch.randn(5, 2, 4))
    finally:
        handle.remove()
    assert seen.count(sn.SphereLinear) == 6  # the input once, the state in five steps


@pytest.mark.parametrize("center", ["weight", "patch"])
def test_lazy_layers_with_small_kernels_can_be_centered(center):
    torch.manual_seed(0)
    linear, conv = sn.LazySphereLinear(4, center=center), sn.LazySphereConv2d(4, 1, center=center)
    assert linear(torch.randn(2, 5)).shape == (2, 4)
    assert conv(torch.randn(2, 5, 3, 3)).shape == (2, 4, 3, 3)
    assert linear.center == conv.center == center
    with pytest.raises(ValueError, match="center must be None for kernels with a single entry"):
        sn.LazySphereLinear(4, center=center)(torch.randn(2, 1))
