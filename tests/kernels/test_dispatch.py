"""Choice of the implementation, and the private torch API that `dispatch` calls."""

import copy
import logging
import os
import subprocess
import sys
import threading

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import spherenet as sn
from spherenet.kernels import dispatch
from spherenet.kernels.classes import blockwise
from spherenet.kernels.dispatch import compiled_or_plain
from spherenet.kernels.sphere_conv import autograd as unit_weights
from spherenet.kernels.sphere_conv import native
from spherenet.layers.head import AngularHead
from spherenet.losses import batch as losses


def test_cpu_layers_are_native():
    assert dispatch.implementation(torch.randn(3)) == "native"
    assert dispatch.implementation_name("cpu") == f"native ({native.instruction_set()})"
    assert native.instruction_set() in ("avx512", "avx2", "baseline")


def test_backend_names():
    x = torch.randn(3)
    with sn.backend("reference"):
        assert dispatch.implementation(x) == "plain"
        assert dispatch.implementation_name("cpu") == "plain"
        with sn.backend("native"):
            assert dispatch.implementation(x) == "native"
        with sn.backend("fused"):  # the name until 0.1
            assert dispatch.implementation(x) == "native"
        assert dispatch.current_backend() == "reference"
    with (
        pytest.raises(ValueError, match=r"backend must be one of 'auto', 'native', .*, got 'fast'"),
        sn.backend("fast"),
    ):
        pass


def test_backend_without_with_is_global():
    x, results = torch.randn(3), []

    def read():
        results.append(dispatch.implementation(x))

    sn.backend("reference")
    try:
        read()
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        with sn.backend("native"):
            read()
        read()
    finally:
        sn.backend("auto")
    read()
    assert results == ["plain", "plain", "native", "plain", "native"]


def test_backend_in_with_applies_to_this_thread_only():
    results = []
    with sn.backend("reference"):
        thread = threading.Thread(target=lambda: results.append(dispatch.implementation(torch.randn(3))))
        thread.start()
        thread.join()
    assert results == ["native"]


def test_backward_uses_implementation_of_forward():
    layer, x = sn.SphereConv2d(3, 4, 3), torch.randn(2, 3, 6, 6)
    layer(x).sum().backward()
    expected, layer.weight.grad = layer.weight.grad, None
    out = layer(x).sum()
    with sn.backend("reference"):
        out.backward()
    torch.testing.assert_close(layer.weight.grad, expected)


def test_unsupported_calls_use_plain_formula():
    x = torch.randn(3, 4)
    assert dispatch.implementation(x, has_kernel=False) == "plain"
    assert dispatch.implementation(x[:0]) == "plain"
    assert dispatch.implementation(x.to("meta")) == "plain"
    seen = []
    torch.func.vmap(lambda row: seen.append(dispatch.implementation(row)) or row)(x)
    with forward_ad.dual_level():
        seen.append(dispatch.implementation(x))
    assert seen == ["plain", "plain"]
    assert dispatch.implementation(x) == "native"


def test_reference_backend_applies_to_heads_and_losses(monkeypatch):
    monkeypatch.setattr(dispatch, "LARGE_MAP", 0)
    calls = []
    for module, name in ((blockwise, "angular_cosine"), (losses, "angular_cross_entropy")):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, f=original, n=name: calls.append(n) or f(*a))
    head, loss = AngularHead(4, 3), sn.WSoftmaxLoss("linear")
    features, labels = torch.randn(5, 4), torch.randint(3, (5,))
    expected = loss(head(features), labels)
    assert calls == ["angular_cosine", "angular_cross_entropy"]
    with sn.backend("reference"):
        torch.testing.assert_close(loss(head(features), labels), expected)
    assert len(calls) == 2


def run_fresh(code, **environment):
    """Run code in a new process and return its output."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_first_layer_does_not_import_compiler():
    code = (
        "import sys, torch, spherenet as sn\n"
        "layer = sn.SphereConv2d(3, 4, 3, operator='learnable')\n"
        "layer(torch.randn(2, 3, 8, 8)).sum().backward()\n"
        "print([name for name in ('torch._dynamo', 'torch._inductor', 'triton') if name in sys.modules])"
    )
    assert run_fresh(code)[0].strip() == "[]"


def test_thread_pool_is_shared_with_torch():
    """Runs in a new process, because other packages have thread pools too."""
    if sys.platform != "linux":
        pytest.skip("reads /proc")
    code = (
        "import torch\nfrom spherenet.kernels.sphere_conv import native\nassert native.available()\n"
        "print(len({line.split()[-1] for line in open('/proc/self/maps') if 'libgomp' in line or 'libiomp' in line}))"
    )
    assert run_fresh(code)[0].strip() == "1"


def test_two_python_threads():
    """Each thread has its own scratch memory; results equal those of one thread."""
    layers = [sn.SphereConv2d(8, 24, 3, padding=1, operator="sigmoid") for _ in range(2)]
    inputs = [torch.randn(4, 8, 20, 20) for _ in range(2)]

    def gradients(index):
        layer = copy.deepcopy(layers[index])
        x = inputs[index].clone().requires_grad_()
        layer(x).square().sum().backward()
        return x.grad, layer.weight.grad

    expected = [gradients(index) for index in range(2)]
    wrong = []

    def work(index):
        for _ in range(30):
            found = gradients(index)
            if not all(torch.equal(a, b) for a, b in zip(found, expected[index], strict=True)):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- unit weights in inference ----------------------------------------------------------------------------------


@pytest.fixture
def normalizations(monkeypatch):
    counted = []
    original = native.unit_weight
    monkeypatch.setattr(native, "unit_weight", lambda *a: counted.append(1) or original(*a))
    return counted


def test_unit_weights_are_cached_in_inference(normalizations):
    layer, x = sn.SphereConv2d(3, 4, 3), torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        first = layer(x)
        assert torch.equal(layer(x), first)
    assert len(normalizations) == 1
    layer(x)
    assert len(normalizations) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.mul_(-1),
        lambda weight: weight.data.mul_(-1),  # does not advance the version counter
        lambda weight: weight.data.view(-1)[5:6].add_(1),
        lambda weight: weight.data.copy_(weight.flip(0)),
        lambda weight: setattr(weight, "data", weight.detach() * -1),
    ],
)
def test_changed_weight_is_detected(change):
    layer, x = sn.SphereConv2d(3, 4, 3), torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        layer(x)
        change(layer.weight)
        with sn.backend("reference"):
            expected = layer(x)
        torch.testing.assert_close(layer(x), expected)


def test_cached_unit_weights_are_freed_with_layer():
    before = len(unit_weights._unit_weights)
    layer = sn.SphereConv2d(3, 4, 3)
    with torch.no_grad():
        layer(torch.randn(2, 3, 6, 6))
    assert len(unit_weights._unit_weights) == before + 1
    del layer
    assert len(unit_weights._unit_weights) == before


def test_inference_mode_tensors_are_not_cached():
    layer, x = sn.SphereConv2d(3, 4, 3), torch.randn(2, 3, 6, 6)
    with torch.inference_mode():
        first = layer(x)
    with torch.no_grad():
        second = layer(x)
    assert not second.is_inference()
    torch.testing.assert_close(first.clone(), second)


# --- the path through torch's compiler --------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("operator", ["cosine", "sigmoid"])
def test_compiled_equals_plain(operator):
    layer, x = sn.SphereConv2d(3, 4, 3, operator=operator), torch.randn(2, 3, 7, 7)
    found = []
    for backend in ("reference", "compiled"):
        layer.zero_grad()
        images = x.clone().requires_grad_()
        with sn.backend(backend):
            out = layer(images)
        out.square().sum().backward()
        found.append((out.detach(), images.grad, layer.weight.grad.clone()))
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


def test_failed_compilation_uses_plain_formula_for_that_signature(monkeypatch, caplog):
    from torch._dynamo.exc import BackendCompilerFailed

    class Failing:
        def __call__(self, *arguments):
            raise BackendCompilerFailed(lambda: None, RuntimeError("no C++ compiler"), None)

    def one_more(x):
        return x + 1

    def two_more(x):
        return x + 2

    monkeypatch.setattr(torch, "compile", lambda f, **_: Failing() if f.__name__ == "one_more" else f)
    with caplog.at_level(logging.WARNING, logger="spherenet"):
        for _ in range(2):
            assert compiled_or_plain(one_more, torch.ones(2)).tolist() == [2, 2]
        assert compiled_or_plain(two_more, torch.ones(2)).tolist() == [3, 3]
    assert len(caplog.records) == 1
    assert "without torch.compile" in caplog.records[0].getMessage()


def test_running_out_of_memory_propagates(monkeypatch):
    def formula(x):
        raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError, match="too large"):
            compiled_or_plain(formula, torch.ones(2))


# --- private torch API ------------------------------------------------------------------------------------------


def test_is_traced():
    assert not dispatch.is_traced(torch.ones(2))
    seen = []
    torch.func.grad(lambda x: seen.append(dispatch.is_traced(x)) or x.sum())(torch.ones(2))
    torch.compile(lambda x: seen.append(dispatch.is_traced(x)) or x, backend="eager")(torch.ones(2))
    assert seen == [True, True]


def test_needs_operators():
    x = torch.ones(2)
    assert not dispatch.needs_operators(x, torch.nn.Parameter(x))
    assert dispatch.needs_operators(x.as_subclass(type("Mine", (torch.Tensor,), {})))
    with FlopCounterMode(display=False):
        assert dispatch.needs_operators(x)


def test_below_autograd():
    x = torch.ones(2, requires_grad=True)
    with dispatch.below_autograd():
        assert not (x * 2).requires_grad
    assert (x * 2).requires_grad


def test_change_detector():
    x = torch.ones(2)
    detector = dispatch.ChangeDetector(x)
    assert not detector.changed
    x.relu_()
    assert detector.changed
    assert detector._alias.untyped_storage().nbytes() == 0
