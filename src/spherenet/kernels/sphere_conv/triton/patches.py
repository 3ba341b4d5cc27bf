"""Forward: patch norms and out = β·(g(P·r) + b) + γ in one launch, with P the convolution's output and r = 1/‖patch‖.

A program processes a block of output pixels of one group: it sums the squares of their patches, then loops over the
group's filters. The windows of neighboring pixels overlap, so that most reads hit the caches. Only for large windows
over many channels are the squares summed over channels first, by a separate launch.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from spherenet.kernels.sphere_conv.triton.angles import clamp_to_one, parameters, value
from spherenet.kernels.sphere_conv.triton.launch import (
    block_of_channels,
    block_of_pixels,
    dense,
    image_strides,
    in_three,
    index_dtype,
    k_arguments,
    launch,
    map_strides,
    pixel_axis,
    window_of,
    work_dtype,
)
from spherenet.ops.geometry import Geometry
from spherenet.ops.norms import SHRINK, working_dtype
from spherenet.ops.operation import Operation, Parameters

__all__ = ["forward"]

MOST_DIRECT_TAPS = 27
"""Windows up to this size (3×3×3) are summed directly from x."""

MOST_DIRECT_ENTRIES = 256
"""Larger windows are too, if they have at most this many entries over all channels of a group."""

SHRINK_BY = tl.constexpr(SHRINK)


@triton.jit
def position(pixel, size):
    """Return image, depth, row and column of a pixel counted over the batch."""
    w = pixel % size[2]
    pixel = pixel // size[2]
    h = pixel % size[1]
    pixel = pixel // size[1]
    return pixel // size[0], pixel % size[0], h, w


@triton.jit
def window_squares(
    x, pixel, pixels, group, channels, in_size, out_size, x_strides,
    WINDOW: tl.constexpr, SQUARED: tl.constexpr, AXIS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, INDEX: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    """Sum (x/64)², or maps of such sums, over each pixel's window."""
    n, d, h, w = position(pixel, out_size)
    d = d * WINDOW[1][0] - WINDOW[2][0]
    h = h * WINDOW[1][1] - WINDOW[2][1]
    w = w * WINDOW[1][2] - WINDOW[2][2]
    squares = tl.zeros([BLOCK_P, BLOCK_C] if AXIS == 0 else [BLOCK_C, BLOCK_P], dtype=WORK)
    for first in range(0, channels, BLOCK_C):
        channel = first + tl.arange(0, BLOCK_C).to(INDEX)
        at_channel = tl.expand_dims((group * channels + channel) * x_strides[1], AXIS)
        is_channel = tl.expand_dims(channel < channels, AXIS)
        for tap in range(WINDOW[0][0] * WINDOW[0][1] * WINDOW[0][2]):
            i = d + (tap // (WINDOW[0][1] * WINDOW[0][2])) * WINDOW[3][0]
            j = h + (tap // WINDOW[0][2] % WINDOW[0][1]) * WINDOW[3][1]
            k = w + (tap % WINDOW[0][2]) * WINDOW[3][2]
            inside = (pixel < pixels) & (i >= 0) & (i < in_size[0]) & (j >= 0) & (j < in_size[1])
            inside = inside & (k >= 0) & (k < in_size[2])
            at = n * x_strides[0] + i * x_strides[2] + j * x_strides[3] + k * x_strides[4]
            mask = tl.expand_dims(inside, 1 - AXIS) & is_channel
            v = tl.load(x + tl.expand_dims(at, 1 - AXIS) + at_channel, mask=mask, other=0.0).to(WORK)
            if SQUARED:
                squares += v
            else:
                v = v * SHRINK_BY
                squares += v * v
    return tl.sum(squares, 1 - AXIS)


@triton.jit
def squares_kernel(
    x, squares, pixels, channels, groups, in_size, x_strides,
    WINDOW: tl.constexpr, AXIS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, INDEX: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    """Write the sum of (x/64)² over the channels of a group, per pixel of the input."""
    pixel = tl.program_id(0).to(INDEX) * BLOCK_P + tl.arange(0, BLOCK_P)
    group = tl.program_id(1).to(INDEX)
    total = window_squares(
        x, pixel, pixels, group, channels, in_size, in_size, x_strides,
        WINDOW, False, AXIS, BLOCK_P, BLOCK_C, INDEX, WORK,
    )  # fmt: skip
    area = in_size[0] * in_size[1] * in_size[2]
    tl.store(squares + (pixel // area * groups + group) * area + pixel % area, total, mask=pixel < pixels)


@triton.jit
def forward_kernel(
    product, cosines, inverse_norm, x, k, bias, beta, gamma,
    pixels, channels, filters, in_size, out_size, x_strides, out_strides, norm_strides,
    WINDOW: tl.constexpr, SQUARED: tl.constexpr, X_AXIS: tl.constexpr, OUT_AXIS: tl.constexpr,
    EPS: tl.constexpr, ANGLE: tl.constexpr, K: tl.constexpr, K_STRIDE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_O: tl.constexpr, INDEX: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    """Replace the products of a block of pixels by outputs; write r and, if requested, the cosines."""
    pixel = tl.program_id(0).to(INDEX) * BLOCK_P + tl.arange(0, BLOCK_P)
    group = tl.program_id(1).to(INDEX)
    is_pixel = pixel < pixels
    total = window_squares(
        x, pixel, pixels, group, channels, in_size, out_size, x_strides,
        WINDOW, SQUARED, X_AXIS, BLOCK_P, BLOCK_C, INDEX, WORK,
    )  # fmt: skip
    r = tl.rsqrt(total + EPS * SHRINK_BY * SHRINK_BY) * SHRINK_BY
    area = out_size[0] * out_size[1] * out_size[2]
    n = pixel // area
    p = pixel % area
    tl.store(inverse_norm + n * norm_strides[0] + group * norm_strides[1] + p * norm_strides[2], r, mask=is_pixel)
    r = tl.expand_dims(r, 1 - OUT_AXIS)
    at_pixel = tl.expand_dims(n * out_strides[0] + p * out_strides[2], 1 - OUT_AXIS)
    for first in range(0, filters, BLOCK_O):
        o = first + tl.arange(0, BLOCK_O).to(INDEX)
        is_filter = o < filters
        o = group * filters + o
        mask = tl.expand_dims(is_pixel, 1 - OUT_AXIS) & tl.expand_dims(is_filter, OUT_AXIS)
        at = at_pixel + tl.expand_dims(o * out_strides[1], OUT_AXIS)
        c = tl.load(product + at, mask=mask, other=0.0).to(WORK)
        # r = 0 marks a patch whose squares overflowed: cosine 0, even if the product is inf or NaN.
        c = clamp_to_one(tl.where(r == 0, 0.0, c * r))
        if cosines is not None:
            tl.store(cosines + at, c, mask=mask)
        half_inverse = 0.0
        tau = 0.0
        if ANGLE == "sigmoid" or ANGLE == "sharpened-cosine":
            if k is not None:
                half_inverse, tau, _ = parameters(tl.load(k + o * K_STRIDE, mask=is_filter, other=1.0), ANGLE)
            else:
                half_inverse, tau, _ = parameters(tl.full([BLOCK_O], K, dtype=WORK), ANGLE)
            half_inverse = tl.expand_dims(half_inverse, OUT_AXIS)
            tau = tl.expand_dims(tau, OUT_AXIS)
        out = value(c, half_inverse, tau, ANGLE)
        if bias is not None:
            out += tl.expand_dims(tl.load(bias + o, mask=is_filter, other=0.0).to(WORK), OUT_AXIS)
        if beta is not None:
            out *= tl.expand_dims(tl.load(beta + o, mask=is_filter, other=0.0).to(WORK), OUT_AXIS)
        if gamma is not None:
            out += tl.expand_dims(tl.load(gamma + o, mask=is_filter, other=0.0).to(WORK), OUT_AXIS)
        tl.store(product + at, out, mask=mask)


def _channel_squares(x: Tensor, groups: int) -> Tensor:
    """Return the sum of (x/64)² over the channels of each group, [N, groups, *spatial]."""
    squares = torch.empty((x.shape[0], groups, *x.shape[2:]), dtype=working_dtype(x.dtype), device=x.device)
    pixels, channels = squares.numel() // groups, x.shape[1] // groups
    block = block_of_pixels(pixels, groups, channels)
    launch(
        squares_kernel, (triton.cdiv(pixels, block), groups), x,
        x, squares, pixels, channels, groups, in_three(x.shape[2:], 1), image_strides(x),
        WINDOW=window_of(Geometry()), AXIS=pixel_axis(x), BLOCK_P=block, BLOCK_C=block_of_channels(channels, block),
        INDEX=index_dtype(x, squares), WORK=work_dtype(x.dtype),
    )  # fmt: skip
    return squares


def _map_per_group(product: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """Return an empty map [N, groups, *out] in the memory format of the convolution's output."""
    batch, _, *size = product.shape
    if groups > 1 and size and pixel_axis(product) == 0:
        return torch.empty((batch, *size, groups), dtype=dtype, device=product.device).movedim(-1, 1)
    return torch.empty((batch, groups, *size), dtype=dtype, device=product.device)


def contiguous_or_none(value: Any) -> Tensor | None:
    """Return a vector whose elements are adjacent."""
    return None if value is None else value.detach().contiguous()


def forward(
    product: Tensor, x: Tensor, operation: Operation, parameters: Parameters, save_cosine: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Convert the output of the convolution to out = β·(g + b) + γ, in place.

    Returns:
        out [N, O, *out], 1/‖patch‖ [N, groups, *out] in the working dtype (0 if the squares overflowed), and what
        backward needs: the clamped cosines in the working dtype if save_cosine, otherwise the output.
    """
    angle, geometry, eps, _, _ = operation
    k, *affine, _ = parameters
    work = working_dtype(product.dtype)
    groups = geometry.groups
    product = dense(product)
    inverse_norm = _map_per_group(product, groups, work)
    cosines = torch.empty_like(product, dtype=work) if save_cosine else None
    pixels = inverse_norm.numel() // groups
    if pixels == 0:
        return product, inverse_norm, product if cosines is None else cosines
    window = window_of(geometry)
    channels, filters = x.shape[1] // groups, product.shape[1] // groups
    squared = window.taps > MOST_DIRECT_TAPS and window.taps * channels > MOST_DIRECT_ENTRIES
    if squared:
        x, channels = _channel_squares(x, groups), 1
    block = block_of_pixels(pixels, groups, max(channels, filters))
    out_strides, norm_strides = map_strides(product), map_strides(inverse_norm)
    assert out_strides is not None  # both tensors are dense
    k_tensor, constants = k_arguments(k, product.dtype)
    launch(
        forward_kernel, (triton.cdiv(pixels, block), groups), product,
        product, cosines, inverse_norm, x, k_tensor, *map(contiguous_or_none, affine),
        pixels, channels, filters, in_three(x.shape[2:], 1), in_three(product.shape[2:], 1),
        image_strides(x), out_strides, norm_strides,
        WINDOW=window, SQUARED=squared, X_AXIS=pixel_axis(x), OUT_AXIS=pixel_axis(product),
        EPS=eps, ANGLE=angle.kernel_id, **constants,
        BLOCK_P=block, BLOCK_C=block_of_channels(channels, block), BLOCK_O=block_of_channels(filters, block),
        INDEX=index_dtype(x, product), WORK=work_dtype(product.dtype),
    )  # fmt: skip
    return product, inverse_norm, product if cosines is None else cosines
