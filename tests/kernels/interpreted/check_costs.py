"""Launches and memory traffic of the Triton path, counted while the interpreter runs it."""

from collections import Counter

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from driver import triton_sphere_conv
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime import interpreter

import spherenet as sn
from spherenet.kernels import dispatch
from spherenet.kernels.sphere_conv.triton import launch
from spherenet.ops.geometry import Geometry

MOST_LAUNCHES = 12
FREE = ("detach", "view", "expand", "alias", "unsqueeze", "squeeze", "select", "t", "empty", "empty_like", "new_empty",
        "empty_strided", "new_empty_strided", "is_non_overlapping_and_dense")  # fmt: skip
KERNELS_OF = {"convolution_backward": 2}  # the gradients of input and weight
GEOMETRY = Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    monkeypatch.setattr(launch, "FEWEST_PROGRAMS", 1)


class Launches(TorchDispatchMode):
    """Counts launches of Triton kernels and operations of torch that compute."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.counted = Counter()
        run = interpreter.GridExecutor.__call__

        def counted_run(executor, *args, **kwargs):
            self.counted[executor.fn.__name__] += 1
            with _disable_current_modes():  # operations of the interpreter itself are not launches
                return run(executor, *args, **kwargs)

        monkeypatch.setattr(interpreter.GridExecutor, "__call__", counted_run)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.overloadpacket.__name__
        if name not in FREE:
            self.counted[name] += KERNELS_OF.get(name, 1)
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["planes", "rows"])
@pytest.mark.parametrize(
    ("operator", "expected"), [("cosine", 8), ("linear", 8), ("sigmoid", 8), ("learnable", 12)], ids=lambda v: str(v)
)
def test_number_of_launches_of_forward_and_backward(operator, expected, memory_format, monkeypatch):
    layer = sn.SphereConv2d(16, 16, 3, padding=1, operator=operator).to(memory_format=memory_format)
    x = torch.randn(2, 16, 6, 6).to(memory_format=memory_format).requires_grad_()
    grad = torch.randn(2, 16, 6, 6).to(memory_format=memory_format)
    monkeypatch.setattr(dispatch, "readable", lambda *_: True)  # although a dispatch mode watches
    with Launches(monkeypatch) as launches:
        triton_sphere_conv(x, layer.weight, GEOMETRY, layer.angle, layer.k).backward(grad)
    assert x.grad is not None
    assert all(p.grad is not None for p in layer.parameters())
    total = sum(launches.counted.values())
    assert total == expected <= MOST_LAUNCHES, dict(launches.counted)
    assert launches.counted["forward_kernel"] == launches.counted["backward_kernel"] == 1


class Traffic:
    """Bytes that each kernel requests, and distinct bytes it touches: without caches, and with perfect caches."""

    def __init__(self, monkeypatch):
        self.requested, self.touched = Counter(), {}
        self.kernel = None
        run = interpreter.GridExecutor.__call__
        load, store = (
            getattr(interpreter.InterpreterBuilder, f"create_masked_{access}") for access in ("load", "store")
        )
        monkeypatch.setattr(interpreter.GridExecutor, "__call__", lambda e, *a, **k: self.enter(e) or run(e, *a, **k))
        monkeypatch.setattr(
            interpreter.InterpreterBuilder, "create_masked_load",
            lambda b, p, m, *rest: self.count(p, m, "read") or load(b, p, m, *rest),
        )  # fmt: skip
        monkeypatch.setattr(
            interpreter.InterpreterBuilder, "create_masked_store",
            lambda b, p, v, m, *rest: self.count(p, m, "written") or store(b, p, v, m, *rest),
        )  # fmt: skip

    def enter(self, executor):
        self.kernel = executor.fn.__name__

    def count(self, pointers, mask, access):
        size = pointers.get_element_ty().primitive_bitwidth // 8
        addresses = np.broadcast_to(pointers.data, np.shape(mask.data))[mask.data]
        self.requested[self.kernel] += addresses.size * size
        self.touched.setdefault((self.kernel, access), {}).update(dict.fromkeys(addresses.tolist(), size))

    def distinct(self, kernel):
        return sum(sum(sizes.values()) for (name, _), sizes in self.touched.items() if name == kernel)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["planes", "rows"])
def test_kernels_move_minimum_number_of_bytes(memory_format, monkeypatch):
    """Distinct bytes are those of the operands; repeated reads come from overlapping windows, and caches serve them."""
    batch, channels, filters, side = 2, 8, 16, 6
    x = torch.randn(batch, channels, side, side).to(memory_format=memory_format).requires_grad_()
    weight = torch.randn(filters, channels, 3, 3).to(memory_format=memory_format).requires_grad_()
    k = torch.full((filters,), 0.5, requires_grad=True)
    grad = torch.randn(batch, filters, side, side).to(memory_format=memory_format)
    traffic = Traffic(monkeypatch)
    triton_sphere_conv(x, weight, GEOMETRY, sn.SigmoidAngle(), k).backward(grad)
    pixels = batch * side * side
    map_in, map_out, norms, weights = (4 * n for n in (channels * pixels, filters * pixels, pixels, weight.numel()))
    sums = 4 * filters * -(-pixels // launch.block_of_pixels(pixels, 1, filters))
    least = {  # read + written
        "unit_weight_kernel": 2 * weights + 4 * filters,
        "forward_kernel": map_in + map_out + 4 * filters + map_out + norms,
        "backward_kernel": 2 * map_out + norms + 4 * filters + map_out + norms + sums,
        "correct_kernel": 2 * map_in + norms + map_in,
        "unit_weight_backward_kernel": 2 * weights + 4 * filters + weights,
    }
    repeated = {"unit_weight_kernel": weights, "forward_kernel": 8 * map_in, "backward_kernel": 0,
                "correct_kernel": 8 * norms, "unit_weight_backward_kernel": 2 * weights}  # fmt: skip
    small = {"forward_kernel": 4 * filters, "backward_kernel": 4 * filters}  # k is read once per block of pixels
    blocks = -(-pixels // launch.block_of_pixels(pixels, 1, filters))
    assert set(traffic.requested) == set(least)
    for kernel, minimum in least.items():
        unmasked = 4 * filters if kernel.startswith("unit_weight") else 0  # scale, one number per program
        assert traffic.distinct(kernel) in (minimum, minimum - unmasked), kernel
        again = repeated[kernel] + small.get(kernel, 0) * (blocks - 1)
        assert traffic.requested[kernel] <= minimum + again, kernel
        print(f"{kernel}: {minimum} bytes at least, {traffic.requested[kernel] / minimum:.2f} of them requested")


@triton.jit
def double_kernel(x):
    tl.store(x, tl.load(x) * 2)


def test_overflow_of_integers_raises():
    """The interpreter of these tests checks sums and products of offsets."""
    double_kernel[(1,)](torch.tensor([2**30 - 1], dtype=torch.int32))
    with pytest.raises(interpreter.InterpreterError, match="int32 overflows in mul"):
        double_kernel[(1,)](torch.tensor([2**30], dtype=torch.int32))
