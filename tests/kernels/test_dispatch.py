"""Choice of the implementation, and the private torch API that `dispatch` calls."""

import copy
import logging
import os
import subprocess
import sys
import threading

import pytest
import torch

import spherenet as sn
from spherenet.kernels import dispatch, library
from spherenet.kernels.classes import blockwise
from spherenet.kernels.compiled import compiled_or_plain
from spherenet.kernels.settings import BACKEND
from spherenet.layers.head import AngularHead
from spherenet.losses import batch as losses


def chosen(x=None, **options):
    """Return the name of the backend of a layer."""
    x = torch.randn(2, 3) if x is None else x
    names = []
    layer = sn.SphereLinear(3, 4, device=x.device, **options)
    original = dispatch.choose
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "choose", lambda *a: names.append(original(*a).name) or original(*a))
        layer(x)
    return names[0]


def test_cpu_layers_are_native():
    assert chosen() == "native"
    isa = library.instruction_set()
    assert dispatch.implementation_name("cpu") == f"native ({isa}, winograd)"
    with sn.convolution("direct"):
        assert dispatch.implementation_name("cpu") == f"native ({isa}, direct)"
    assert library.instruction_set() in ("avx512", "avx2", "baseline")


def test_backend_names():
    with sn.backend("reference"):
        assert chosen() == "plain"
        assert dispatch.implementation_name("cpu") == "plain"
        with sn.backend("native"):
            assert chosen() == "native"
        assert BACKEND.current() == "reference"
    with (
        pytest.raises(ValueError, match=r"backend must be one of 'auto', 'native', .*, got 'fast'"),
        sn.backend("fast"),
    ):
        pass
    with pytest.raises(ValueError, match=r"backend must be one of 'auto', 'native', .*, got 'fast'"):
        sn.set_backend("fast")


def test_set_backend_is_global():
    results = []

    def read():
        results.append(chosen())

    sn.set_backend("reference")
    try:
        read()
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        with sn.backend("native"):
            read()
        read()
    finally:
        sn.set_backend("auto")
    read()
    assert results == ["plain", "plain", "native", "plain", "native"]


def test_contexts_that_are_not_entered_change_nothing():
    context = sn.backend("reference")
    assert BACKEND.current() == "auto"
    sn.set_backend("native")
    try:
        with context:
            assert BACKEND.current() == "reference"
        assert BACKEND.current() == "native"
    finally:
        sn.set_backend("auto")


def test_backend_in_with_applies_to_this_thread_only():
    results = []
    with sn.backend("reference"):
        thread = threading.Thread(target=lambda: results.append(chosen()))
        thread.start()
        thread.join()
    assert results == ["native"]


def test_a_choice_can_be_used_again():
    reference = sn.backend("reference")
    assert BACKEND.current() == "auto"
    for _ in range(2):
        with reference:
            with reference:
                assert BACKEND.current() == "reference"
            assert BACKEND.current() == "reference"
        assert BACKEND.current() == "auto"

    @reference
    def names(depth):
        return [BACKEND.current(), *(names(depth - 1) if depth else [])]

    threads = [threading.Thread(target=names, args=(3,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert names(2) == ["reference"] * 3
    assert BACKEND.current() == "auto"


def test_a_choice_is_checked_when_it_is_made():
    with pytest.raises(ValueError, match="backend must be one of"):
        sn.backend("fast")
    with pytest.raises(ValueError, match="convolution must be one of"):
        sn.convolution("fast")


def test_backward_uses_implementation_of_forward():
    layer, x = sn.SphereConv2d(3, 4, 3), torch.randn(2, 3, 6, 6)
    layer(x).sum().backward()
    expected, layer.weight.grad = layer.weight.grad, None
    out = layer(x).sum()
    with sn.backend("reference"):
        out.backward()
    torch.testing.assert_close(layer.weight.grad, expected)


def test_unsupported_calls_use_plain_formula():
    x = torch.randn(2, 3)
    assert chosen(operator=sn.CustomAngle(torch.cos)) == "plain"
    assert chosen(x[:0]) == "plain"
    assert chosen(x.to("meta")) == "plain"
    assert chosen() == "native"


def test_attributes_of_a_layer_can_be_changed():
    """The operation is built in every call, so that it cannot be out of date."""
    layer, x = sn.SphereConv2d(2, 3, 3), torch.randn(1, 2, 8, 8)
    before = layer(x)
    layer.eps, layer.stride, layer.center, layer.angle = 0.5, (2, 2), "patch", sn.LinearAngle()
    other = sn.SphereConv2d(2, 3, 3, stride=2, eps=0.5, center="patch", operator="linear")
    other.weight = layer.weight
    torch.testing.assert_close(layer(x), other(x))
    assert layer(x).shape != before.shape


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
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, timeout=240
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
        "import torch\nfrom spherenet.kernels import library\nassert library.available()\n"
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


# --- inference --------------------------------------------------------------------------------------------------


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
def test_changed_weight_is_used(change):
    layer, x = sn.SphereConv2d(3, 4, 3), torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        layer(x)
        change(layer.weight)
        with sn.backend("reference"):
            expected = layer(x)
        torch.testing.assert_close(layer(x), expected)


def test_inference_saves_nothing():
    layer, x = sn.SphereConv2d(3, 4, 3), torch.randn(2, 3, 6, 6)
    with torch.inference_mode():
        first = layer(x)
    with torch.no_grad():
        second = layer(x)
    assert not second.is_inference()
    assert second.grad_fn is None
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
