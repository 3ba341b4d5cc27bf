"""A kernel that cannot be compiled or launched is replaced for calls with its signature, with one warning."""

import warnings

import pytest
import torch
from driver import triton_sphere_conv

import spherenet as sn
from spherenet.kernels.sphere_conv.triton import fallback, gradients, launch, patches, weights
from spherenet.ops.geometry import Geometry

GEOMETRY = Geometry((3, 3), (2, 1), (1, 1), (1, 1), 2)
FUNCTIONS = ("unit_weight", "forward", "backward", "correct", "unit_weight_backward")


@pytest.fixture(autouse=True)
def nothing_failed(monkeypatch):
    monkeypatch.setattr(launch, "FEWEST_PROGRAMS", 1)
    monkeypatch.setattr(fallback, "_failed", set())


def break_kernels(monkeypatch, error, *names):
    def refuse(kernel, *_, **__):
        if not names or kernel.__name__ in names:
            raise error
        return original(kernel, *_, **__)

    original = launch.launch
    for module in (weights, patches, gradients):
        monkeypatch.setattr(module, "launch", refuse)


def results(dtype=torch.float64, k=0.5, with_affine=True, save_cosine=None):
    torch.manual_seed(0)
    x = torch.randn(2, 4, 5, 4, dtype=dtype, requires_grad=True)
    weight = torch.randn(6, 2, 3, 3, dtype=dtype, requires_grad=True)
    if isinstance(k, float):
        k = torch.full((6,), k, dtype=dtype, requires_grad=True)
    affine = tuple(torch.randn(6, dtype=dtype, requires_grad=True) for _ in range(3)) if with_affine else (None,) * 3
    out = triton_sphere_conv(
        x, weight, GEOMETRY, sn.LinearAngle() if k is None else sn.SigmoidAngle(), k, affine, save_cosine=save_cosine
    )
    inputs = [value for value in (x, weight, k, *affine) if value is not None]
    return [out, *torch.autograd.grad(out, inputs, torch.randn_like(out))]


@pytest.mark.parametrize("k", [0.5, None], ids=["learned k", "linear"])
@pytest.mark.parametrize("affine", [True, False])
def test_fallback_of_all_kernels_gives_same_results(monkeypatch, k, affine):
    expected = results(k=k, with_affine=affine)
    break_kernels(monkeypatch, RuntimeError("no C compiler\nand more"))
    with pytest.warns(RuntimeWarning, match=r"^spherenet computes \w+ without Triton .*: no C compiler$") as seen:
        got = results(k=k, with_affine=affine)
    assert sorted(str(warning.message).split()[2] for warning in seen) == sorted(FUNCTIONS)
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e)


@pytest.mark.parametrize("kernel", ["unit_weight_kernel", "forward_kernel", "backward_kernel", "correct_kernel",
                                    "unit_weight_backward_kernel"])  # fmt: skip
def test_broken_kernel_warns_once_per_signature(monkeypatch, kernel):
    expected = results()
    break_kernels(monkeypatch, RuntimeError("Triton Error [CUDA]: invalid device function"), kernel)
    with pytest.warns(RuntimeWarning, match="invalid device function") as seen:
        first = results()
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = results()
    for g, again, e in zip(first, second, expected, strict=True):
        torch.testing.assert_close(g, e)
        torch.testing.assert_close(again, e)
    with pytest.warns(RuntimeWarning, match="invalid device function"):  # another signature
        results(torch.float32)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no memory"), RuntimeError("Triton Error [CUDA]: out of memory")]
)
def test_running_out_of_memory_propagates(monkeypatch, error):
    break_kernels(monkeypatch, error)
    with pytest.raises(type(error), match=str(error)[-9:]):
        results()
    assert not fallback._failed


def test_fallback_in_half_precision(monkeypatch):
    layer = sn.SphereConv2d(4, 6, 3, operator="sigmoid", dtype=torch.bfloat16)
    x = torch.randn(2, 4, 5, 5, dtype=torch.bfloat16)
    geometry = Geometry((3, 3), (1, 1), (0, 0), (1, 1), 1)
    expected = triton_sphere_conv(x, layer.weight, geometry, layer.angle, 0.3)
    break_kernels(monkeypatch, RuntimeError("no"))
    with pytest.warns(RuntimeWarning, match="without Triton"):
        got = triton_sphere_conv(x, layer.weight, geometry, layer.angle, 0.3)
    torch.testing.assert_close(got, expected, rtol=0, atol=2**-6)
