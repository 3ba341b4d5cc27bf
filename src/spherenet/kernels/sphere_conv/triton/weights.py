"""Unit weights and their gradient: u = w/‖w‖ per filter, one program per filter."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from spherenet.kernels.sphere_conv.triton.launch import index_dtype, launch, work_dtype
from spherenet.ops.norms import SHRINK, working_dtype

__all__ = ["unit_weight", "unit_weight_backward"]

LONGEST_BLOCK = 1024
SHRINK_BY = tl.constexpr(SHRINK)


@triton.jit
def entry_offset(entry, sizes, strides):
    """Return where an entry of a filter lies, with the sizes and strides of its four dimensions, slowest first."""
    offset = (entry % sizes[3]) * strides[3]
    entry = entry // sizes[3]
    offset += (entry % sizes[2]) * strides[2]
    entry = entry // sizes[2]
    return offset + (entry % sizes[1]) * strides[1] + (entry // sizes[1]) * strides[0]


@triton.jit
def unit_weight_kernel(
    weight, unit, scale, entries, sizes, weight_strides, unit_strides,
    EPS: tl.constexpr, BLOCK: tl.constexpr, INDEX: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    """Write w·s and s = 1/‖w‖ for one filter."""
    row = tl.program_id(0).to(INDEX)
    squares = tl.zeros([BLOCK], dtype=WORK)
    for first in range(0, entries, BLOCK):
        entry = first + tl.arange(0, BLOCK).to(INDEX)
        at = row * weight_strides[0] + entry_offset(entry, sizes, weight_strides[1:])
        w = tl.load(weight + at, mask=entry < entries, other=0.0).to(WORK) * SHRINK_BY
        squares += w * w
    s = tl.rsqrt(tl.sum(squares, 0) + EPS * SHRINK_BY * SHRINK_BY) * SHRINK_BY
    tl.store(scale + row, s)
    for first in range(0, entries, BLOCK):
        entry = first + tl.arange(0, BLOCK).to(INDEX)
        inside = entry < entries
        at = row * weight_strides[0] + entry_offset(entry, sizes, weight_strides[1:])
        w = tl.load(weight + at, mask=inside, other=0.0).to(WORK)
        to = row * unit_strides[0] + entry_offset(entry, sizes, unit_strides[1:])
        tl.store(unit + to, w * s, mask=inside)


@triton.jit
def unit_weight_backward_kernel(
    grad, unit, scale, grad_weight, entries, sizes, grad_strides, unit_strides,
    BLOCK: tl.constexpr, INDEX: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    """Write (g − u·(u·g))·s for one filter; the gradient of the weight lies in memory as the unit weight."""
    row = tl.program_id(0).to(INDEX)
    products = tl.zeros([BLOCK], dtype=WORK)
    for first in range(0, entries, BLOCK):
        entry = first + tl.arange(0, BLOCK).to(INDEX)
        inside = entry < entries
        at_grad = row * grad_strides[0] + entry_offset(entry, sizes, grad_strides[1:])
        at_unit = row * unit_strides[0] + entry_offset(entry, sizes, unit_strides[1:])
        g = tl.load(grad + at_grad, mask=inside, other=0.0).to(WORK)
        products += g * tl.load(unit + at_unit, mask=inside, other=0.0).to(WORK)
    along = tl.sum(products, 0)
    s = tl.load(scale + row)
    for first in range(0, entries, BLOCK):
        entry = first + tl.arange(0, BLOCK).to(INDEX)
        inside = entry < entries
        at_grad = row * grad_strides[0] + entry_offset(entry, sizes, grad_strides[1:])
        at_unit = row * unit_strides[0] + entry_offset(entry, sizes, unit_strides[1:])
        g = tl.load(grad + at_grad, mask=inside, other=0.0).to(WORK)
        u = tl.load(unit + at_unit, mask=inside, other=0.0).to(WORK)
        tl.store(grad_weight + at_unit, (g - u * along) * s, mask=inside)


def _fastest_last(by: Tensor, *tensors: Tensor) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Return the sizes of a filter's four dimensions and each tensor's five strides, in the memory order of `by`."""
    order = sorted(range(1, by.dim()), key=by.stride, reverse=True)
    missing = 4 - len(order)
    sizes = (1,) * missing + tuple(by.shape[dim] for dim in order)
    return sizes, [(t.stride(0), *(0,) * missing, *(t.stride(dim) for dim in order)) for t in tensors]


def _block(entries: int) -> int:
    return max(1, min(LONGEST_BLOCK, triton.next_power_of_2(entries)))


def unit_weight(weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return weight/‖weight‖ per filter in `dtype`, with the strides of the weight, and 1/‖weight‖ [O]."""
    unit = torch.empty_like(weight, dtype=dtype)
    scale = torch.empty(weight.shape[0], dtype=working_dtype(weight.dtype), device=weight.device)
    if unit.numel() == 0:
        return unit, scale.fill_(eps**-0.5)
    entries = math.prod(weight.shape[1:])
    sizes, strides = _fastest_last(unit, weight, unit)
    launch(
        unit_weight_kernel, (weight.shape[0],), weight,
        weight, unit, scale, entries, sizes, *strides,
        EPS=eps, BLOCK=_block(entries), INDEX=index_dtype(weight, unit), WORK=work_dtype(weight.dtype),
    )  # fmt: skip
    return unit, scale


def unit_weight_backward(grad_unit: Tensor, unit: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient of the weight in `dtype` from that of the unit weight."""
    grad_weight = torch.empty_like(unit, dtype=dtype)
    if unit.numel() == 0:
        return grad_weight
    if grad_weight.stride() != unit.stride():
        unit = unit.contiguous()
        grad_weight = torch.empty_like(unit, dtype=dtype)
    entries = math.prod(unit.shape[1:])
    sizes, strides = _fastest_last(unit, grad_unit, unit)
    launch(
        unit_weight_backward_kernel, (unit.shape[0],), unit,
        grad_unit, unit, scale, grad_weight, entries, sizes, *strides,
        BLOCK=_block(entries), INDEX=index_dtype(grad_unit, unit), WORK=work_dtype(scale.dtype),
    )  # fmt: skip
    return grad_weight
