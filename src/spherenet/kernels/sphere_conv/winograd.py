"""3×3 convolutions on CPUs by Winograd's algorithm, with all passes of a sphere layer inside of it (csrc/winograd.cpp).

F(4×4, 3×3) takes 4 times fewer multiplications than the direct algorithm that torch uses, F(2×2, 3×3) 2.25 times fewer.
It takes float32, stride 1, dilation 1, one group and zero padding of at most 2, and computes on channels-last memory.
`plan_for` decides which calls it serves.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from spherenet.kernels.backends import Case, Gradients, Pass, Saved
from spherenet.kernels.library import (
    ConvolutionBackwardStruct,
    ConvolutionForwardStruct,
    ConvolutionStruct,
    GeometryStruct,
    dense_like,
    layout_of,
    load,
)
from spherenet.kernels.settings import CONVOLUTION
from spherenet.kernels.sphere_conv import native
from spherenet.kernels.sphere_conv.native import SCRATCH_LIMIT, AngleArguments, addresses, angle_arguments, scratch
from spherenet.ops.geometry import Geometry
from spherenet.ops.operation import Operation, Parameters

__all__ = [
    "BACKEND",
    "Layer",
    "Needs",
    "Plan",
    "Results",
    "backward",
    "forward",
    "make_plan",
    "plan_for",
]

_SAVED_OUTPUT, _SAVED_COSINE = 0, 1


class Layer(NamedTuple):
    """What the engine computes besides the convolution; the defaults are those of a plain one."""

    angle: AngleArguments | None = None
    """g, h and the affine map of a sphere layer."""

    eps: float = 0.0
    center_patch: bool = False
    bias: Tensor | None = None
    """Bias of a plain convolution."""

    @property
    def struct(self) -> Any:
        """Reference to the `AngleStruct`, or None."""
        return None if self.angle is None else self.angle.struct


class Needs(NamedTuple):
    """Results of `backward` that are needed."""

    x: bool = True
    weight: bool = True
    sums: bool = False


class Results(NamedTuple):
    """Results of `forward`; all but the first are None unless they are kept."""

    out: Tensor
    inverse_norm: Tensor | None = None
    """1/‖patch‖ [N, 1, *out]."""

    cosine: Tensor | None = None
    mean: Tensor | None = None
    """Means of the patches [N, 1, *out] if they are centered."""


# --- the choice ----------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """Arguments of calls with the same shapes."""

    geometry: Any
    out_shape: tuple[int, int, int, int]
    tile: int
    """Side of the tiles, 4 or 2."""

    threads: int
    scratch: tuple[int, int]
    """Bytes of scratch memory of forward and backward."""


def plan_for(x: Tensor, filters: int, geometry: Geometry) -> Plan | None:
    """Return the plan of a convolution of x, or None if torch's direct algorithm serves it."""
    threads = torch.get_num_threads()
    return _plan(CONVOLUTION.current(), threads, x.dtype, x.shape, x.stride(), filters, geometry, False)


def _plan_of(case: Case) -> Plan | None:
    """Return the plan of a sphere layer, or None if torch's direct algorithm serves it."""
    filters = case.weight_shape[0]
    return _plan(case.convolution, case.threads, case.dtype, case.x_shape, case.x_stride, filters, case.geometry, True)


@lru_cache(maxsize=1024)
def _plan(
    algorithm: str,
    threads: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    filters: int,
    geometry: Geometry,
    is_sphere: bool,
) -> Plan | None:
    if algorithm == "direct" or dtype != torch.float32 or len(shape) != 4:
        return None
    is_rows = layout_of(shape, stride) == "rows"
    calls = -_CALLS if not is_sphere else _CALLS if is_rows else 0
    tile = _tile_size(shape, filters, geometry, is_rows, threads, calls, algorithm == "winograd")
    return make_plan(shape, filters, cast(tuple[int, int], geometry.padding), tile, threads) if tile else None


def make_plan(shape: tuple[int, ...], filters: int, padding: tuple[int, int], tile: int, threads: int) -> Plan:
    """Return the plan of a 3×3 convolution of a batch [N, channels, height, width] with tiles of one size."""
    batch, channels, height, width = shape
    out = height + 2 * padding[0] - 2, width + 2 * padding[1] - 2
    ones = (1, 1, 1)
    struct = GeometryStruct(
        batch, channels, filters, 1, (1, height, width), (1, *out), (1, 3, 3), ones, (0, *padding), ones, 1, 1
    )
    geometry = ctypes.byref(struct)
    forward_size, backward_size = (load().winograd_scratch(geometry, tile, backward, threads) for backward in (0, 1))
    return Plan(geometry, (batch, filters, *out), tile, threads, (forward_size, backward_size))


_CALLS = 400_000
"""Work of calls from Python, about 8 µs of one thread: a plain layer needs more of them with the engine, a sphere layer
more with torch's convolution, which stands between two passes."""

_SHARED = 1 << 20
"""Multiplications of the direct algorithm from which several threads work (csrc/winograd_plan.h)."""


def _tile_size(
    shape: tuple[int, ...], filters: int, geometry: Geometry, is_rows: bool, threads: int, calls: int, always: bool
) -> int:
    """Return the side of tiles with the least work, 0 if the direct algorithm with `calls` more has less.

    Work is counted in multiplications. The constants are fitted to times on AVX-512 for maps of 2 to 56 pixels, 3 to
    512 channels and batches of 1 to 128: a channel of a tile costs as much as 10 multiplications per frequency, the
    weights as much as 16 tiles (more beyond the cache, and 48 more if they travel between cores), and a change of the
    memory layout 60 per number.
    """
    kernel_size, stride, padding, dilation, groups = geometry[:5]
    batch, channels, height, width = shape
    if kernel_size != (3, 3) or stride != (1, 1) or dilation != (1, 1) or groups != 1 or geometry.transposed:
        return 0
    if isinstance(padding, str) or max(padding) > 2 or min(batch, channels, filters) < 1:
        return 0
    rows, columns = height + 2 * padding[0] - 2, width + 2 * padding[1] - 2
    if rows < 1 or columns < 1:
        return 0
    if not always and min(channels, filters) < 8:
        return 0
    pairs, both, pixels = channels * filters, channels + filters, batch * rows * columns
    relayout = 0 if is_rows else 60 * pixels * both
    work = {0: 0.85 * 9 * pixels * pairs + calls}
    for side in (4, 2):
        frequencies, tiles = (side + 2) ** 2, batch * -(-rows // side) * -(-columns // side)
        if frequencies * pairs * 4 * (threads + 2) > SCRATCH_LIMIT:
            continue
        of_weights = 16 * (1 + pairs / 20_000)
        if threads > 1 and pixels * pairs >= _SHARED:
            of_weights += 48
        work[side] = frequencies * (tiles * (pairs + 10 * both) + of_weights * pairs) + relayout
    if always and len(work) > 1:
        del work[0]
    return min(work, key=work.__getitem__)


PLAIN = Layer()
"""A plain convolution without a bias."""

# --- calls ---------------------------------------------------------------------------------------------------------


def _rows(x: Tensor) -> Tensor:
    """Return x with its channels last in memory, copied only if necessary."""
    return x.contiguous(memory_format=torch.channels_last)


def _convolution(x: Tensor, weight: Tensor, plan: Plan, is_backward: bool) -> Any:
    of_filter, of_channel, _, of_tap = weight.stride()
    memory = scratch(plan.scratch[is_backward]).data_ptr()
    return ctypes.byref(
        ConvolutionStruct(x.data_ptr(), weight.data_ptr(), of_filter, of_channel, of_tap, memory, plan.tile)
    )


def _with_even_taps(weight: Tensor) -> Tensor:
    """Return the weight with one step from each of its nine taps to the next."""
    return weight if weight.stride(2) == 3 * weight.stride(3) else weight.contiguous()


def forward(
    x: Tensor,
    weight: Tensor,
    plan: Plan,
    layer: Layer = PLAIN,
    *,
    keep_norms: bool = False,
    save_cosine: bool = False,
) -> Results:
    """Return the output of a layer.

    Args:
        x: Batch [N, channels, height, width] in float32.
        weight: Kernels [filters, channels, 3, 3], of norm 1 for a sphere layer.
        plan: From `plan_for` or `make_plan`.
        layer: What is computed besides the convolution.
        keep_norms: Whether backward needs the norms and means of patches.
        save_cosine: Whether backward needs the cosines.
    """
    x, weight = _rows(x), _with_even_taps(weight)
    out = torch.empty(plan.out_shape, memory_format=torch.channels_last, device="cpu")
    map_shape = (out.shape[0], 1, *out.shape[2:])
    inverse_norm = torch.empty(map_shape, device="cpu") if keep_norms else None
    mean = torch.empty(map_shape, device="cpu") if keep_norms and layer.center_patch else None
    cosine = torch.empty_like(out) if save_cosine else None
    tensors = (out, layer.bias, inverse_norm, mean, cosine)
    pointers = ConvolutionForwardStruct(*addresses(*tensors), layer.eps, layer.center_patch)
    convolution = _convolution(x, weight, plan, False)
    load().winograd_forward(plan.geometry, layer.struct, convolution, ctypes.byref(pointers), plan.threads)
    return Results(out, inverse_norm, cosine, mean)


def backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    plan: Plan,
    needs: Needs,
    layer: Layer = PLAIN,
    results: Results | None = None,
) -> Gradients:
    """Return the gradients of x and weight, and the sums for those of the parameters.

    Args:
        grad: Gradient of the output.
        x: Input of `forward`.
        weight: Weight of `forward`.
        plan: As in `forward`.
        needs: Results that are needed.
        layer: As in `forward`.
        results: Results of `forward` for a sphere layer; the output is used if the cosines were not saved.
    """
    x, grad, even = _rows(x), _rows(grad), _with_even_taps(weight)
    is_cosine = results is not None and results.cosine is not None
    saved = inverse_norm = mean = None
    if results is not None:
        inverse_norm, mean = results.inverse_norm, results.mean
        saved = _rows(results.out if results.cosine is None else results.cosine)
    grad_x = torch.empty_like(x) if needs.x else None
    grad_weight = torch.empty_like(even) if needs.weight else None
    sums = torch.empty(4, weight.shape[0], device="cpu") if needs.sums else None
    tensors = (grad, inverse_norm, mean, saved, grad_x, grad_weight, sums)
    pointers = ConvolutionBackwardStruct(*addresses(*tensors), _SAVED_COSINE if is_cosine else _SAVED_OUTPUT)
    convolution = _convolution(x, even, plan, True)
    load().winograd_backward(plan.geometry, layer.struct, convolution, ctypes.byref(pointers), plan.threads)
    return Gradients(grad_x, grad_weight, sums)


# --- sphere layers -------------------------------------------------------------------------------------------------


class WinogradBackend(native.NativeBackend):
    """The convolution and all passes of a layer in one call, where that is faster than torch's convolution."""

    name = "winograd"

    def __init__(self, plan: Any = None) -> None:
        self.plan: Plan = plan

    def supports(self, case: Case) -> bool:
        """Return whether the layer is a 3×3 convolution that this algorithm computes in less time, or on request."""
        return super().supports(case) and _plan_of(case) is not None

    def prepared(self, case: Case) -> WinogradBackend:
        """Return the backend with the plan for a case."""
        return WinogradBackend(_plan_of(case))

    def forward(
        self, x: Tensor, weight: Tensor, operation: Operation, parameters: Parameters, save_cosine: bool
    ) -> tuple[Tensor, Saved]:
        """See `Backend.forward`."""
        unit, scale = self.unit_weight(weight, operation, x.dtype)
        layer = _engine_layer(operation, parameters)
        results = forward(x, unit, self.plan, layer, keep_norms=True, save_cosine=save_cosine)
        out, norms = dense_like(results.out, x), cast(Tensor, results.inverse_norm)
        return out, Saved(unit, scale, norms, out if results.cosine is None else results.cosine, results.mean)

    def infer(self, x: Tensor, weight: Tensor, operation: Operation, parameters: Parameters) -> Tensor:
        """See `Backend.infer`."""
        unit = self.unit_weight(weight, operation, x.dtype)[0]
        return dense_like(forward(x, unit, self.plan, _engine_layer(operation, parameters)).out, x)

    def backward(self, grad: Tensor, x: Tensor, dtype: torch.dtype, asked: Pass) -> Gradients:
        """See `Backend.backward`."""
        operation, parameters, saved, needs = asked
        results = Results(saved.map, saved.inverse_norm, None if saved.is_output else saved.map, saved.mean)
        wanted, layer = Needs(needs[0], needs[1], True in needs[2:]), _engine_layer(operation, parameters)
        grad_x, grad_weight, sums = backward(grad, x, saved.unit_weight, self.plan, wanted, layer, results)
        if grad_x is not None:
            grad_x = dense_like(grad_x, x)
        if grad_weight is not None:
            grad_weight = native.unit_weight_backward(grad_weight, saved, operation, dtype)
        return Gradients(grad_x, grad_weight, sums)


def _engine_layer(operation: Operation, parameters: Parameters) -> Layer:
    """Return a sphere layer as the engine takes it."""
    return Layer(angle_arguments(operation, parameters, torch.float32), operation.eps, operation.center == "patch")


BACKEND = WinogradBackend()
