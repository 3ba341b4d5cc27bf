"""Sphere layers for inference, made of plain torch operations with constants computed once.

    out = h(‖x‖)·scale·s(c) + shift,   c = cos θ,   s = c, asin c, tanh(asin(c)/(2k)) or a custom g

scale contains β and the constant factor of g (Eq. 1: 2/π or C(k)), shift contains β·b + γ (Eq. 3). A BatchNorm that
follows is folded into both. Centered kernels are constants like others; centered patches need the sums of x besides
those of x² (Eq. 14). h is 1 unless the layer has a magnitude function (Eq. 15). A call computes the convolution, the
patch norms, s and h. Intermediate tensors are overwritten, because allocating memory costs more than the arithmetic.
The layers are not meant for training: their gradients are infinite at θ = 0 and π.

As in `spherenet.functional`, the cosine is 0 for zero patches and for patches whose squares overflow. If they overflow,
1/‖x‖ is 0, and weights of norm 2⁻²⁰ instead of 1 keep the product finite that it multiplies. This saves a pass over the
output that would search for infinities. Infinite inputs give NaN.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spherenet.angles import AngleFunction
from spherenet.layers import SphereConv1d, SphereConv2d, SphereConv3d, SphereLayer, SphereLinear
from spherenet.magnitudes import Magnitude
from spherenet.ops.geometry import Geometry, convolve, resolve_padding, sum_slices
from spherenet.ops.norms import SHRINK, autocast_is_on, direction, without_autocast, working_dtype
from spherenet.ops.sphere_conv import FLAT, center_weight

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["BatchNorm", "FrozenAngle", "FrozenMagnitude", "FrozenSphereConv", "FrozenSphereLinear", "constants_of",
           "restore_constants"]  # fmt: skip

BatchNorm: TypeAlias = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d

WEIGHT_NORM = 2.0**-20
"""Norm of frozen kernels: a power of two, which rounds nothing, and so small that its product with ‖x‖ is finite.

‖x‖ is at most sqrt(n)·3e38 for n finite float32 numbers, so that an overflow would need n > 10¹².
"""


class FrozenAngle(nn.Module):
    """Angle function with scale and shift per filter: scale·s(c) + shift. It may overwrite its input.

    Args:
        angle: Angle function g.
        scale: Scale of each filter [filters], in float64 so that constants are rounded once.
        shift: Shift of each filter, likewise.
        dtype: Dtype of the computation.
        spatial_dims: Number of dimensions after the filters; 0 if the filters come last.

    Shape:
        [N, filters, *spatial] or [*, filters] → the same.
    """

    steepness: Tensor | None
    scale: Tensor | None
    shift: Tensor | None

    def __init__(
        self, angle: AngleFunction, scale: Tensor, shift: Tensor, dtype: torch.dtype, spatial_dims: int = 0
    ) -> None:
        super().__init__()
        k = angle.k
        if k is not None:
            k = torch.as_tensor(k, dtype=torch.float64, device=scale.device).detach().expand_as(scale)
        factors = angle.factors(k)
        self.form = "custom" if factors is None else angle.kernel_id or angle.name
        self.angle = angle if factors is None else None
        self.angle_class = type(angle)
        self.spatial_dims = spatial_dims
        steepness = None
        if factors is not None:
            steepness, outer = factors
            scale = scale * outer
        constants = {
            "steepness": steepness,
            "scale": None if bool((scale == 1).all()) else scale,
            "shift": None if bool((shift == 0).all()) else shift,
        }
        for name, value in constants.items():
            shaped = None if value is None else value.to(dtype).reshape(-1, *(1,) * spatial_dims)
            self.register_buffer(name, shaped)

    def forward(self, cosine: Tensor, magnitude: Tensor | None = None) -> Tensor:
        """Return scale·s(c) + shift, or magnitude·scale·s(c) + shift."""
        out = _reusable(cosine)
        value = torch.clamp(cosine, -1, 1, out=out)
        if self.angle is not None:
            value, out = self._custom(value), None
        else:
            value = self.angle_class.shape(value, self.steepness, out)
        if self.scale is not None:
            value = torch.mul(value, self.scale, out=out)
        if magnitude is not None:
            value = torch.mul(value, magnitude, out=out)
        return value if self.shift is None else torch.add(value, self.shift, out=out)

    def _custom(self, cosine: Tensor) -> Tensor:
        """Return a custom g(θ), which takes the filters in the last dimension and may return any tensor."""
        assert self.angle is not None
        cosine = cosine.movedim(1, -1) if self.spatial_dims else cosine
        value = self.angle.for_inference(cosine)
        return value.movedim(-1, 1) if self.spatial_dims else value


class FrozenMagnitude(nn.Module):
    """Magnitude function with a constant radius: norms → h.

    Args:
        magnitude: Magnitude function.
        dtype: Dtype of the computation.
        shape: Shape of one radius per filter.

    Shape:
        Norms that broadcast against `shape` → h, of the same shape or with one value per filter.
    """

    radius: Tensor | None

    def __init__(self, magnitude: Magnitude, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        super().__init__()
        radius = magnitude.radius
        self.fixed_radius = radius if isinstance(radius, float) else 0.0
        self.register_buffer("radius", radius.detach().to(dtype).reshape(shape) if isinstance(radius, Tensor) else None)
        self.magnitude = copy.deepcopy(magnitude)
        self.magnitude.raw_radius = None

    def forward(self, norm: Tensor) -> Tensor:
        """Return h for each norm."""
        return self.magnitude.value(norm, self.fixed_radius if self.radius is None else self.radius)


class _FrozenSphereLayer(nn.Module):
    """Base class of the frozen layers: short weights, folded constants and the dtype of the computation."""

    short_weight: Tensor

    def __init__(self, layer: SphereLayer, batch_norm: BatchNorm | None, spatial_dims: int, groups: int = 1) -> None:
        super().__init__()
        weight: Tensor = layer.weight.detach()  # type: ignore[operator]
        self.spatial_dims = spatial_dims
        self.eps = layer.eps
        self._set_dtype(weight.dtype)
        self.center_patch = layer.center == "patch"
        self.kernel_entries = weight[0].numel() if len(weight) else 1
        centered = weight if layer.center is None else center_weight(weight)
        unit_weight = direction(centered, tuple(range(1, weight.dim())), layer.eps).to(weight.dtype)
        # Not called `weight`, so that code which reads the weight of plain layers does not use this one.
        self.register_buffer("short_weight", unit_weight * self.weight_norm)
        scale, shift = _scale_and_shift(layer, weight, batch_norm)
        self.angle = FrozenAngle(layer.angle, scale, shift, self.dtype, spatial_dims)
        filters = (len(weight),) if groups == 1 else (groups, len(weight) // groups)
        self.magnitude = (
            None
            if layer.magnitude is None
            else FrozenMagnitude(layer.magnitude, self.dtype, (*filters, *(1,) * spatial_dims))
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the layer to another device or dtype, with the constants that belong to the dtype."""
        unit_weight, dtype = self.short_weight / self.weight_norm, self.short_weight.dtype
        before = constants_of(self)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.short_weight.dtype != dtype:
            self._set_dtype(self.short_weight.dtype)
            self.short_weight = fn(unit_weight) * self.weight_norm
            restore_constants([entry for entry in before if entry[1] != "short_weight"], self.dtype)
        return self

    def _set_dtype(self, dtype: torch.dtype) -> None:
        """Set the dtype of the computation and the norm of the weights for weights of a dtype."""
        self.dtype = working_dtype(dtype)
        # float16 cannot represent short weights. Its products may overflow when norms do not, which `_cosine` checks.
        self.weight_norm = WEIGHT_NORM if dtype != torch.float16 else 1.0

    def _squares(self, x: Tensor) -> Tensor:
        """Return (x/64)², see `ops.norms`."""
        shrunk = (x.to(self.dtype) if x.dtype != self.dtype else x) * SHRINK
        return torch.mul(shrunk, shrunk, out=_reusable(shrunk))

    def _inverse_norm(self, sums: Tensor) -> Tensor:
        """Return 1/(‖x‖‖w‖) from Σ(x/64)², with the norm of the short weights; 0 if the sum overflowed."""
        return (sums + self.eps * SHRINK**2).rsqrt() * (SHRINK / self.weight_norm)

    def _centered_inverse_norm(self, squares: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Return 1/(‖x‖‖w‖) of centered patches from Σx² and Σx in float64, and which patches are flat."""
        variation = squares - sums * sums / self.kernel_entries
        flat = variation <= FLAT * squares
        inverse_norm = (torch.where(flat, 0.0, variation) + self.eps).rsqrt().to(self.dtype) / self.weight_norm
        return inverse_norm, flat

    def _magnitude(self, inverse_norm: Tensor) -> Tensor | None:
        """Return h(‖x‖), or None without a magnitude function; a norm that overflowed counts as 0."""
        if self.magnitude is None:
            return None
        norm = torch.where(inverse_norm == 0, 0.0, 1 / (inverse_norm * self.weight_norm))
        value: Tensor = self.magnitude(norm)
        return value

    def _cosine(self, product: Tensor, inverse_norm: Tensor) -> Tensor:
        """Return cos θ from ‖x‖‖w‖·cos θ, which may be overwritten."""
        if self.weight_norm == 1:
            product = torch.where(inverse_norm == 0, 0.0, product.to(self.dtype))
        elif product.dtype != self.dtype:
            product = product.to(self.dtype)
        return torch.mul(product, inverse_norm, out=_reusable(product))

    def _in_weight_dtype(self, x: Tensor) -> Tensor:
        """Return x in the dtype of the weights if autocast, which is disabled in here, changed it."""
        return x.to(self.short_weight.dtype) if x.dtype != self.short_weight.dtype and autocast_is_on(x) else x


class FrozenSphereConv(_FrozenSphereLayer):
    """SphereConv1d, SphereConv2d or SphereConv3d for inference.

    Args:
        layer: The layer to freeze.
        batch_norm: BatchNorm that follows the layer, to be folded into it.

    Shape:
        As for the layer. The output has the dtype of the weights.
    """

    box: Tensor

    def __init__(self, layer: SphereConv1d | SphereConv2d | SphereConv3d, batch_norm: BatchNorm | None = None) -> None:
        super().__init__(layer, batch_norm, len(layer.kernel_size), layer.groups)
        self.geometry = Geometry(
            layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups, layer.padding_mode
        )
        self.groups = layer.groups
        box = torch.ones(self.groups, 1, *layer.kernel_size, dtype=self.dtype, device=layer.weight.device)
        self.register_buffer("box", box)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for a batched or unbatched input."""
        x = self._in_weight_dtype(x)
        with without_autocast(x):
            batch = x if x.dim() == self.spatial_dims + 2 else x.unsqueeze(0)
            out = self._forward_batch(batch)
            return out if batch is x else out.squeeze(0)

    def _forward_batch(self, x: Tensor) -> Tensor:
        x, geometry = resolve_padding(x, self.geometry)
        product = convolve(x, self.short_weight, geometry)
        flat = None
        if self.center_patch:
            wide = _widened(x)
            squares = sum_slices(self._per_group(wide * wide), geometry)
            sums = sum_slices(self._per_group(wide), geometry)
            inverse_norm, flat = self._centered_inverse_norm(squares, sums)
        else:
            maps = self._per_group(self._squares(x))
            if not geometry.is_pointwise:
                # Some convolution algorithms return a tiny negative for a sum of zeros.
                maps = convolve(maps, self.box, geometry).clamp_min(0)
            inverse_norm = self._inverse_norm(maps)
        if self.groups > 1:
            # One norm for all filters of a group.
            product, inverse_norm = torch.unflatten(product, 1, (self.groups, -1)), inverse_norm.unsqueeze(2)
            flat = None if flat is None else flat.unsqueeze(2)
        if flat is not None:
            product = torch.where(flat, 0.0, product)
        cosine, magnitude = self._cosine(product, inverse_norm), self._magnitude(inverse_norm)
        if self.groups > 1:
            magnitude = None if magnitude is None else magnitude.expand(cosine.shape).flatten(1, 2)
            cosine = cosine.flatten(1, 2)
        out: Tensor = self.angle(cosine, magnitude)
        return out.to(x.dtype) if out.dtype != x.dtype else out

    def _per_group(self, maps: Tensor) -> Tensor:
        """Return one map per group, the sum over its channels: windows are then summed once per group."""
        return maps.sum(1, keepdim=True) if self.groups == 1 else torch.unflatten(maps, 1, (self.groups, -1)).sum(2)

    def extra_repr(self) -> str:
        """Return the geometry."""
        shape, stride = list(self.short_weight.shape), self.geometry.stride
        return f"{shape}, form={self.angle.form!r}, stride={stride}, groups={self.groups}"


class FrozenSphereLinear(_FrozenSphereLayer):
    """SphereLinear for inference, [*, in_features] → [*, out_features]."""

    def __init__(self, layer: SphereLinear) -> None:
        super().__init__(layer, None, 0)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        x = self._in_weight_dtype(x)
        with without_autocast(x):
            product = F.linear(x, self.short_weight)
            if self.center_patch:
                wide = _widened(x)
                squares, sums = (wide * wide).sum(-1, keepdim=True), wide.sum(-1, keepdim=True)
                inverse_norm, flat = self._centered_inverse_norm(squares, sums)
                product = torch.where(flat, 0.0, product)
            else:
                inverse_norm = self._inverse_norm(self._squares(x).sum(-1, keepdim=True))
            out: Tensor = self.angle(self._cosine(product, inverse_norm), self._magnitude(inverse_norm))
            return out.to(x.dtype) if out.dtype != x.dtype else out

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"{list(self.short_weight.shape)}, form={self.angle.form!r}"


def constants_of(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Return the buffers of a module and of those inside of it, with their owner and name."""
    return [
        (owner, name, buffer)
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]


def restore_constants(constants: list[tuple[nn.Module, str, Tensor]], dtype: torch.dtype) -> None:
    """Give buffers that were converted to half precision their earlier values, in the dtype of the computation."""
    for owner, name, before in constants:
        now = owner._buffers[name]
        if now is not None and now.is_floating_point():
            owner._buffers[name] = (now if before.is_meta else before.to(now.device)).to(dtype)


def _widened(x: Tensor) -> Tensor:
    """Return x in float64, in which Σx² − (Σx)²/n does not cancel; MPS has no float64."""
    return x if x.device.type == "mps" else x.double()


def _reusable(tensor: Tensor) -> Tensor | None:
    """Return an intermediate tensor as `out`, or None if autograd needs it or a compiler plans the memory."""
    return None if tensor.requires_grad or torch.compiler.is_compiling() else tensor


def _scale_and_shift(layer: Any, weight: Tensor, batch_norm: BatchNorm | None) -> tuple[Tensor, Tensor]:
    """Return the scale and shift that follow g for each filter, in float64."""

    def double(value: Tensor | float) -> Tensor:
        return torch.as_tensor(value, dtype=torch.float64, device=weight.device).detach()

    scale, shift = weight.new_ones(len(weight), dtype=torch.float64), weight.new_zeros(len(weight), dtype=torch.float64)
    if layer.bias is not None:
        shift = shift + double(layer.bias)
    if layer.beta is not None:
        scale, shift = scale * double(layer.beta), shift * double(layer.beta)
    if layer.gamma is not None:
        shift = shift + double(layer.gamma)
    if batch_norm is not None:
        assert batch_norm.running_mean is not None
        assert batch_norm.running_var is not None
        factor = (double(batch_norm.running_var) + batch_norm.eps).rsqrt()
        if batch_norm.weight is not None:
            factor = factor * double(batch_norm.weight)
        scale, shift = scale * factor, (shift - double(batch_norm.running_mean)) * factor
        if batch_norm.bias is not None:
            shift = shift + double(batch_norm.bias)
    return scale, shift
