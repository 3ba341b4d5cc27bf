"""Layers for inference alone: unit weights and the constants of g computed once, plain torch operations only.

    out = scale·h(c) + shift,   c = cos θ,   h = c, asin c, tanh(asin(c)/(2k)) or a user's own g

scale holds 2/π or C(k), and β; shift holds β·b + γ (SPEC 1 (1), (2)); a BatchNorm that follows is folded into both. A
call pays the convolution, the patch norm and h. Maps that a layer made itself are overwritten, because fresh memory
costs more than the arithmetic in it. The layers are not for training: their gradients are infinite at θ = 0 and π.

Zero patches and patches whose squares overflow have the cosine 0, as in `spherenet.functional`: for the latter 1/‖x‖ is
0, and the product that it multiplies is kept finite by weights of length 2⁻²⁰ in place of 1. That spares the pass over
the output that would look for infinities. An input that is infinite itself gives NaN.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spherenet.angles import AngleFunction, CosineAngle, CustomAngle, LearnableSigmoidAngle, LinearAngle, SigmoidAngle
from spherenet.layers import SphereConv1d, SphereConv2d, SphereConv3d, SphereLayer, SphereLinear
from spherenet.ops.geometry import pad_input, same_as_numbers
from spherenet.ops.norms import SHRINK, autocast_is_on, direction, without_autocast, working_dtype

__all__ = ["BatchNorm", "FrozenAngle", "FrozenSphereConv", "FrozenSphereLinear"]

BatchNorm: TypeAlias = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}

WEIGHT_LENGTH = 2.0**-20
"""The length of frozen kernels: a power of two, which costs no digit, so small that ‖x‖ times it is finite.

‖x‖ is at most sqrt(n)·3e38 for n finite float32 numbers; 10¹² of them would be needed to overflow.
"""

_FORMS = {LinearAngle: "linear", CosineAngle: "cosine", SigmoidAngle: "sigmoid", LearnableSigmoidAngle: "sigmoid"}


class FrozenAngle(nn.Module):
    """scale·h(c) + shift, one scale and shift a filter, from cosines that it may overwrite.

    Shapes: [N, filters, *spatial] with `spatial_dims` of them, or [*, filters] without → the same; scale and shift
    [filters] in float64, so that constants are rounded once.
    """

    steepness: Tensor | None
    scale: Tensor | None
    shift: Tensor | None

    def __init__(
        self, angle: AngleFunction, scale: Tensor, shift: Tensor, dtype: torch.dtype, spatial_dims: int = 0
    ) -> None:
        super().__init__()
        # By exact type: a subclass may have changed the function.
        self.form = _FORMS.get(type(angle), "custom")
        self.angle = angle if self.form == "custom" else None
        self.spatial_dims = spatial_dims
        steepness = None
        if self.form == "linear":
            scale = scale * (2 / math.pi)
        elif self.form == "sigmoid":
            k = torch.as_tensor(angle.k, dtype=torch.float64, device=scale.device).detach().expand_as(scale)
            steepness, scale = 0.5 / k, scale / (math.pi / (4 * k)).tanh()
        constants = {
            "steepness": steepness,
            "scale": None if bool((scale == 1).all()) else scale,
            "shift": None if bool((shift == 0).all()) else shift,
        }
        for name, value in constants.items():
            shaped = None if value is None else value.to(dtype).reshape(-1, *(1,) * spatial_dims)
            self.register_buffer(name, shaped)

    def forward(self, cosine: Tensor) -> Tensor:
        """Return scale·h(c) + shift."""
        into = _reusable(cosine)
        value = torch.clamp(cosine, -1, 1, out=into)
        if self.angle is not None:
            value, into = self._custom(value), None
        elif self.form != "cosine":
            value = torch.asin(value, out=into)
        if self.steepness is not None:
            value = torch.tanh(torch.mul(value, self.steepness, out=into), out=into)
        if self.scale is not None:
            value = torch.mul(value, self.scale, out=into)
        return value if self.shift is None else torch.add(value, self.shift, out=into)

    def _custom(self, cosine: Tensor) -> Tensor:
        """A user's own g, which sees the filters last and may give back any tensor, even a constant of its own."""
        assert self.angle is not None
        seen = cosine.movedim(1, -1) if self.spatial_dims else cosine
        # θ without the bounded derivative of `ops.angles.asin`, a Python function that TorchScript cannot hold.
        of_theta = type(self.angle) is CustomAngle
        value: Tensor = self.angle.g(math.pi / 2 - seen.asin()) if of_theta else self.angle(seen)  # type: ignore[operator]
        return value.movedim(-1, 1) if self.spatial_dims else value


class _FrozenSphereLayer(nn.Module):
    """What the two frozen layers share: unit weights, folded constants, and the dtype they compute in."""

    short_weight: Tensor

    def __init__(self, layer: SphereLayer, batch_norm: BatchNorm | None, spatial_dims: int) -> None:
        super().__init__()
        weight: Tensor = layer.weight.detach()  # type: ignore[operator]
        self.spatial_dims = spatial_dims
        self.eps = layer.eps
        self.dtype = working_dtype(weight.dtype)
        # float16 has no room for short weights. Its products overflow where norms do not, and are looked at.
        self.length = WEIGHT_LENGTH if weight.dtype != torch.float16 else 1.0
        unit_weight = direction(weight, tuple(range(1, weight.dim())), layer.eps)
        # Not called `weight`: code that reads a layer's weight to use it as a plain one must not find this one.
        self.register_buffer("short_weight", unit_weight * self.length)
        scale, shift = _after_g(layer, weight, batch_norm)
        self.angle = FrozenAngle(layer.angle, scale, shift, self.dtype, spatial_dims)

    def _squares(self, x: Tensor) -> Tensor:
        """(x/64)², see `ops.norms`."""
        shrunk = (x.to(self.dtype) if x.dtype != self.dtype else x) * SHRINK
        return torch.mul(shrunk, shrunk, out=_reusable(shrunk))

    def _inverse_norm(self, sums: Tensor) -> Tensor:
        """1/(‖x‖‖w‖) from Σ(x/64)², with the short weights' ‖w‖; 0 where the sum overflowed."""
        return (sums + self.eps * SHRINK**2).rsqrt() * (SHRINK / self.length)

    def _cosine(self, product: Tensor, inverse_norm: Tensor) -> Tensor:
        """cos θ from ‖x‖‖w‖·cos θ, which may be overwritten."""
        if self.length == 1:
            product = torch.where(inverse_norm == 0, 0.0, product.to(self.dtype))
        elif product.dtype != self.dtype:
            product = product.to(self.dtype)
        return torch.mul(product, inverse_norm, out=_reusable(product))

    def _as_weights(self, x: Tensor) -> Tensor:
        """x in the dtype of the weights where autocast, which is off in here, gave it another."""
        return x.to(self.short_weight.dtype) if x.dtype != self.short_weight.dtype and autocast_is_on(x) else x


class FrozenSphereConv(_FrozenSphereLayer):
    """A SphereConv1d, SphereConv2d or SphereConv3d for inference, with the BatchNorm that follows it, if given.

    Shapes: as the layer's. The dtype of the output is that of the weights.
    """

    box: Tensor

    def __init__(self, layer: SphereConv1d | SphereConv2d | SphereConv3d, batch_norm: BatchNorm | None = None) -> None:
        super().__init__(layer, batch_norm, len(layer.kernel_size))
        self.kernel_size, self.stride, self.dilation = layer.kernel_size, layer.stride, layer.dilation
        self.padding, self.padding_mode, self.groups = layer.padding, layer.padding_mode, layer.groups
        box = torch.ones(self.groups, 1, *self.kernel_size, dtype=self.dtype, device=layer.weight.device)
        self.register_buffer("box", box)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for a batched or unbatched input."""
        x = self._as_weights(x)
        with without_autocast(x):
            batch = x if x.dim() == self.spatial_dims + 2 else x.unsqueeze(0)
            out = self._of_batch(batch)
            return out if batch is x else out.squeeze(0)

    def _of_batch(self, x: Tensor) -> Tensor:
        if self.padding_mode == "zeros":
            x, padding = same_as_numbers(x, self.kernel_size, self.padding, self.dilation)
        else:
            x = pad_input(x, self.kernel_size, self.padding, self.dilation, self.padding_mode)
            padding = (0,) * self.spatial_dims
        convolve, geometry = _CONV[self.spatial_dims], (self.stride, padding, self.dilation, self.groups)
        product = convolve(x, self.short_weight, None, *geometry)
        squares = self._squares(x)
        # One map a group: summed over the channels first, then over each window.
        maps = (
            squares.sum(1, keepdim=True) if self.groups == 1 else torch.unflatten(squares, 1, (self.groups, -1)).sum(2)
        )
        if not self._windows_are_pixels(padding):
            # Some convolution algorithms return a tiny negative for a sum of zeros.
            maps = convolve(maps, self.box, None, *geometry).clamp_min(0)
        inverse_norm = self._inverse_norm(maps)
        if self.groups > 1:
            # One norm for all filters of a group.
            product, inverse_norm = torch.unflatten(product, 1, (self.groups, -1)), inverse_norm.unsqueeze(2)
        cosine = self._cosine(product, inverse_norm)
        out: Tensor = self.angle(cosine if self.groups == 1 else cosine.flatten(1, 2))
        return out.to(x.dtype) if out.dtype != x.dtype else out

    def _windows_are_pixels(self, padding: tuple[int, ...]) -> bool:
        return {*self.kernel_size, *self.stride} == {1} and not any(padding)

    def extra_repr(self) -> str:
        """Name the geometry."""
        return f"{list(self.short_weight.shape)}, form={self.angle.form!r}, stride={self.stride}, groups={self.groups}"


class FrozenSphereLinear(_FrozenSphereLayer):
    """A SphereLinear for inference. Shapes: [*, in_features] → [*, out_features]."""

    def __init__(self, layer: SphereLinear) -> None:
        super().__init__(layer, None, 0)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        x = self._as_weights(x)
        with without_autocast(x):
            inverse_norm = self._inverse_norm(self._squares(x).sum(-1, keepdim=True))
            out: Tensor = self.angle(self._cosine(F.linear(x, self.short_weight), inverse_norm))
            return out.to(x.dtype) if out.dtype != x.dtype else out

    def extra_repr(self) -> str:
        """Name the sizes."""
        return f"{list(self.short_weight.shape)}, form={self.angle.form!r}"


def _reusable(mine: Tensor) -> Tensor | None:
    """A map of our own, to be overwritten; None where autograd needs it or a compiler plans memory itself."""
    return None if mine.requires_grad or torch.compiler.is_compiling() else mine


def _after_g(layer: Any, weight: Tensor, batch_norm: BatchNorm | None) -> tuple[Tensor, Tensor]:
    """What is done with g: scale and shift of each filter, in float64."""

    def wide(value: Tensor | float) -> Tensor:
        return torch.as_tensor(value, dtype=torch.float64, device=weight.device).detach()

    scale, shift = weight.new_ones(len(weight), dtype=torch.float64), weight.new_zeros(len(weight), dtype=torch.float64)
    if layer.bias is not None:
        shift = shift + wide(layer.bias)
    if layer.beta is not None:
        scale, shift = scale * wide(layer.beta), shift * wide(layer.beta)
    if layer.gamma is not None:
        shift = shift + wide(layer.gamma)
    if batch_norm is not None:
        assert batch_norm.running_mean is not None
        assert batch_norm.running_var is not None
        factor = (wide(batch_norm.running_var) + batch_norm.eps).rsqrt()
        if batch_norm.weight is not None:
            factor = factor * wide(batch_norm.weight)
        scale, shift = scale * factor, (shift - wide(batch_norm.running_mean)) * factor
        if batch_norm.bias is not None:
            shift = shift + wide(batch_norm.bias)
    return scale, shift
