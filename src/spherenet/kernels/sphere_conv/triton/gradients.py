"""Backward: gradient of the convolution's output, sums per filter, and correction of the input's gradient.

    D = grad·β·g'(c)·r,   s = r²·Σ grad·β·g'(c)·c over the filters of a group,   grad_x ← grad_x − x·m

with m the sum of s over the windows that contain a pixel. m is computed by the launch that corrects grad_x, so that
`backward` returns s and the geometry instead of a map of m. Sums per filter are written per block of pixels and added
afterwards in a fixed order, so that results do not change from run to run.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from spherenet.kernels.backends import Pass
from spherenet.kernels.sphere_conv.triton.angles import derivatives, parameters, value
from spherenet.kernels.sphere_conv.triton.launch import (
    block_of_channels,
    block_of_pixels,
    dense,
    image_strides,
    in_three,
    index_dtype,
    k_arguments,
    launch,
    pixel_axis,
    window_of,
    with_map_strides,
    work_dtype,
)
from spherenet.kernels.sphere_conv.triton.patches import contiguous_or_none, position
from spherenet.ops.geometry import Geometry

__all__ = ["Spread", "backward", "correct"]


class Spread(NamedTuple):
    """s [N, groups, *out] and the geometry over which `correct` sums it."""

    s: Tensor
    geometry: Geometry


@triton.jit
def backward_kernel(
    grad, saved, inverse_norm, grad_product, s, sums, k, beta,
    pixels, filters, groups, area, grad_strides, saved_strides, norm_strides,
    ANGLE: tl.constexpr, SAVED_IS_COSINE: tl.constexpr, NEEDS_K: tl.constexpr, NEEDS_AFFINE: tl.constexpr,
    K: tl.constexpr, K_STRIDE: tl.constexpr, AXIS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_O: tl.constexpr, INDEX: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    """Write D and s for a block of pixels of one group, and this block's sums per filter."""
    block = tl.program_id(0).to(INDEX)
    pixel = block * BLOCK_P + tl.arange(0, BLOCK_P)
    group = tl.program_id(1).to(INDEX)
    is_pixel = pixel < pixels
    n = pixel // area
    p = pixel % area
    at_norm = n * norm_strides[0] + group * norm_strides[1] + p * norm_strides[2]
    r = tl.load(inverse_norm + at_norm, mask=is_pixel, other=0.0)
    wide_r = tl.expand_dims(r, 1 - AXIS)
    at_grad = tl.expand_dims(n * grad_strides[0] + p * grad_strides[2], 1 - AXIS)
    at_saved = tl.expand_dims(n * saved_strides[0] + p * saved_strides[2], 1 - AXIS)
    total = tl.zeros([BLOCK_P], dtype=WORK)
    for first in range(0, filters, BLOCK_O):
        o = first + tl.arange(0, BLOCK_O).to(INDEX)
        is_filter = o < filters
        o = group * filters + o
        mask = tl.expand_dims(is_pixel, 1 - AXIS) & tl.expand_dims(is_filter, AXIS)
        at = at_saved + tl.expand_dims(o * saved_strides[1], AXIS)
        g = tl.load(grad + at_grad + tl.expand_dims(o * grad_strides[1], AXIS), mask=mask, other=0.0).to(WORK)
        y = tl.load(saved + at, mask=mask, other=0.0).to(WORK)
        half_inverse = 0.0
        tau = 0.0
        decline = 0.0
        if ANGLE == "sigmoid" or ANGLE == "sharpened-cosine":
            if k is not None:
                half_inverse, tau, decline = parameters(tl.load(k + o * K_STRIDE, mask=is_filter, other=1.0), ANGLE)
            else:
                half_inverse, tau, decline = parameters(tl.full([BLOCK_O], K, dtype=WORK), ANGLE)
            half_inverse = tl.expand_dims(half_inverse, AXIS)
            tau = tl.expand_dims(tau, AXIS)
            decline = tl.expand_dims(decline, AXIS)
        c, slope, by_k = derivatives(y, half_inverse, tau, decline, ANGLE, SAVED_IS_COSINE)
        to = sums + (block * 3) * (groups * filters) + o
        if NEEDS_AFFINE:
            output = value(c, half_inverse, tau, ANGLE) if SAVED_IS_COSINE else y
            tl.store(to, tl.sum(g, AXIS), mask=is_filter)
            tl.store(to + groups * filters, tl.sum(g * output, AXIS), mask=is_filter)
        if NEEDS_K:
            tl.store(to + 2 * groups * filters, tl.sum(g * by_k, AXIS), mask=is_filter)
        u = g * slope
        if beta is not None:
            u *= tl.expand_dims(tl.load(beta + o, mask=is_filter, other=0.0).to(WORK), AXIS)
        tl.store(grad_product + at, u * wide_r, mask=mask)
        total += tl.sum(u * c, 1 - AXIS)
    if s is not None:
        tl.store(s + at_norm, total * r * r, mask=is_pixel)


@triton.jit
def correct_kernel(
    grad_x, x, s, pixels, channels, in_size, out_size, grad_strides, x_strides, s_strides,
    WINDOW: tl.constexpr, AXIS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, INDEX: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    """Subtract x·m from a block of pixels of the input's gradient, for one group."""
    pixel = tl.program_id(0).to(INDEX) * BLOCK_P + tl.arange(0, BLOCK_P)
    group = tl.program_id(1).to(INDEX)
    is_pixel = pixel < pixels
    n, d, h, w = position(pixel, in_size)
    m = tl.zeros([BLOCK_P], dtype=WORK)
    for tap in range(WINDOW[0][0] * WINDOW[0][1] * WINDOW[0][2]):
        # The window at output position i contains this pixel at the tap if i·stride = pixel + padding − tap·dilation.
        i = d + WINDOW[2][0] - (tap // (WINDOW[0][1] * WINDOW[0][2])) * WINDOW[3][0]
        j = h + WINDOW[2][1] - (tap // WINDOW[0][2] % WINDOW[0][1]) * WINDOW[3][1]
        k = w + WINDOW[2][2] - (tap % WINDOW[0][2]) * WINDOW[3][2]
        inside = is_pixel & (i >= 0) & (j >= 0) & (k >= 0)
        inside = inside & (i % WINDOW[1][0] == 0) & (j % WINDOW[1][1] == 0) & (k % WINDOW[1][2] == 0)
        i = i // WINDOW[1][0]
        j = j // WINDOW[1][1]
        k = k // WINDOW[1][2]
        inside = inside & (i < out_size[0]) & (j < out_size[1]) & (k < out_size[2])
        at = n * s_strides[0] + group * s_strides[1] + ((i * out_size[1] + j) * out_size[2] + k) * s_strides[2]
        m += tl.load(s + at, mask=inside, other=0.0)
    m = tl.expand_dims(m, 1 - AXIS)
    at_x = tl.expand_dims(n * x_strides[0] + d * x_strides[2] + h * x_strides[3] + w * x_strides[4], 1 - AXIS)
    at_grad = n * grad_strides[0] + d * grad_strides[2] + h * grad_strides[3] + w * grad_strides[4]
    at_grad = tl.expand_dims(at_grad, 1 - AXIS)
    for first in range(0, channels, BLOCK_C):
        channel = first + tl.arange(0, BLOCK_C).to(INDEX)
        mask = tl.expand_dims(is_pixel, 1 - AXIS) & tl.expand_dims(channel < channels, AXIS)
        channel = tl.expand_dims(group * channels + channel, AXIS)
        v = tl.load(x + at_x + channel * x_strides[1], mask=mask, other=0.0).to(WORK)
        to = grad_x + at_grad + channel * grad_strides[1]
        g = tl.load(to, mask=mask, other=0.0).to(WORK)
        tl.store(to, g - v * m, mask=mask)


def backward(grad: Tensor, asked: Pass) -> tuple[Tensor, Spread | None, Tensor | None]:
    """Return the gradient of the convolution's output, s for `correct`, and sums per filter.

    Args:
        grad: Gradient of out [N, O, *out].
        asked: The layer, the results of its forward and the gradients that are needed.

    Returns:
        D in the dtype of grad; `Spread`, or None unless the gradient of x is needed; sums [3, O] of grad, grad·g and
        grad·∂g/∂k, with rows that are not needed undefined, or None.
    """
    angle, geometry, _, _, _ = asked.operation
    k, beta = asked.parameters.k, asked.parameters.beta
    needs_x, _, needs_k, *needs_affine = asked.needs[:6]
    needs_sums = needs_k or any(needs_affine)
    _, _, inverse_norm, saved_map, _, is_output = asked.saved
    groups = geometry.groups
    saved_map, inverse_norm = dense(saved_map.detach()), dense(inverse_norm)
    inverse_norm, norm_strides = with_map_strides(inverse_norm)
    grad, grad_strides = with_map_strides(grad)
    saved_map, saved_strides = with_map_strides(saved_map)
    grad_product = torch.empty_like(saved_map, dtype=grad.dtype)
    s = torch.empty_like(inverse_norm) if needs_x else None
    spread = None if s is None else Spread(s, geometry)
    pixels, filters = inverse_norm.numel() // groups, saved_map.shape[1] // groups
    if pixels == 0:
        return grad_product, spread, inverse_norm.new_zeros(3, saved_map.shape[1]) if needs_sums else None
    block = block_of_pixels(pixels, groups, filters)
    blocks = triton.cdiv(pixels, block)
    sums = inverse_norm.new_empty(blocks, 3, saved_map.shape[1]) if needs_sums else inverse_norm
    k_tensor, constants = k_arguments(k, inverse_norm.dtype)
    launch(
        backward_kernel, (blocks, groups), grad,
        grad, saved_map, inverse_norm, grad_product, s, sums, k_tensor, contiguous_or_none(beta),
        pixels, filters, groups, pixels // saved_map.shape[0], grad_strides, saved_strides, norm_strides,
        ANGLE=angle.kernel_id, SAVED_IS_COSINE=not is_output, NEEDS_K=needs_k, NEEDS_AFFINE=any(needs_affine),
        **constants, AXIS=pixel_axis(saved_map), BLOCK_P=block, BLOCK_O=block_of_channels(filters, block),
        INDEX=index_dtype(grad, saved_map, sums), WORK=work_dtype(inverse_norm.dtype),
    )  # fmt: skip
    return grad_product, spread, sums.sum(0) if needs_sums else None


def correct(grad_x: Tensor, x: Tensor, spread: Spread, groups: int) -> Tensor:
    """Return grad_x − x·m, in place, with m the sum of `spread.s` over the windows that contain a pixel."""
    grad_x = dense(grad_x)
    if grad_x.numel() == 0:
        return grad_x
    s, s_strides = with_map_strides(spread.s)
    channels = x.shape[1] // groups
    pixels = x.numel() // x.shape[1]
    block = block_of_pixels(pixels, groups, channels)
    launch(
        correct_kernel, (triton.cdiv(pixels, block), groups), grad_x,
        grad_x, x, s, pixels, channels, in_three(x.shape[2:], 1), in_three(s.shape[2:], 1),
        image_strides(grad_x), image_strides(x), s_strides,
        WINDOW=window_of(spread.geometry), AXIS=pixel_axis(grad_x),
        BLOCK_P=block, BLOCK_C=block_of_channels(channels, block),
        INDEX=index_dtype(grad_x, x, s), WORK=work_dtype(s.dtype),
    )  # fmt: skip
    return grad_x
