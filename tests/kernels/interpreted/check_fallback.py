"""A layer whose kernels cannot be compiled or launched is computed by the plain formula, with one warning."""

import warnings

import pytest
import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

import spherenet as sn
from spherenet.kernels.sphere_conv.triton import gradients, launch, patches, weights

KERNELS = ["unit_weight_kernel", "forward_kernel", "backward_kernel", "correct_kernel", "unit_weight_backward_kernel"]


@pytest.fixture(autouse=True)
def nothing_failed(monkeypatch):
    monkeypatch.setattr(launch, "FEWEST_PROGRAMS", 1)
    monkeypatch.setattr(launch, "_failed", set())


def break_kernels(monkeypatch, error, *names):
    def refuse(kernel, *_, **__):
        if not names or kernel.__name__ in names:
            raise error
        return original(kernel, *_, **__)

    original = launch.launch
    for module in (weights, patches, gradients):
        monkeypatch.setattr(module, "launch", refuse)


def results(dtype=torch.float64, backend="triton", **options):
    torch.manual_seed(0)
    layer = sn.SphereConv2d(4, 6, 3, stride=(2, 1), padding=1, groups=2, dtype=dtype, **options)
    x = torch.randn(2, 4, 5, 4, dtype=dtype, requires_grad=True)
    with sn.backend(backend):
        out = layer(x)
        return [out, *torch.autograd.grad(out, [x, *layer.parameters()], torch.randn_like(out))]


@pytest.mark.parametrize("options", [{"operator": "linear"}, {"operator": "learnable", "rescale": "learned"}], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Triton Error [CUDA]: invalid device function\nand more"),
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
        OutOfResources(200, 100, "shared memory"),
        CompilationError("source", None, "here"),
        FileNotFoundError("ptxas"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_plain_formula_after_an_error_of_compiling_or_launching(monkeypatch, kernel, options, error):
    expected = results(backend="reference", **options)
    break_kernels(monkeypatch, error, kernel)
    with pytest.warns(RuntimeWarning, match=r"^spherenet computes layers like this one without Triton: ") as seen:
        first = results(**options)
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = results(**options)
    for got, again, wanted in zip(first, second, expected, strict=True):
        torch.testing.assert_close(got, wanted)
        torch.testing.assert_close(again, wanted)
    with pytest.warns(RuntimeWarning, match="without Triton"):  # another signature
        results(torch.float32, **options)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("no memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("size mismatch"),
        TypeError("unexpected keyword"),
        ValueError("wrong"),
    ],
    ids=str,
)
def test_other_errors_propagate(monkeypatch, error):
    break_kernels(monkeypatch, error)
    with pytest.raises(type(error), match=str(error)[-6:]):
        results()
    assert not launch._failed


def test_half_precision(monkeypatch):
    expected = results(torch.bfloat16, "reference", operator="sigmoid")
    break_kernels(monkeypatch, RuntimeError("Triton Error [CUDA]: no"))
    with pytest.warns(RuntimeWarning, match="without Triton"):
        got = results(torch.bfloat16, operator="sigmoid")
    for value, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(value, wanted)
