"""The five functions from torch's own operations, for calls that Triton cannot compile or launch.

Falls back to torch's own operations for the kind of call that Triton could not compile or launch.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from spherenet import angles
from spherenet.kernels.interface import Affine, Angle
from spherenet.kernels.triton.gradients import Spread
from spherenet.ops import sphere_conv as composite
from spherenet.ops.geometry import Geometry, window_sum
from spherenet.ops.geometry import spread as spread_windows
from spherenet.ops.norms import SHRINK, working_dtype

__all__ = ["backward", "correct", "forward", "guarded", "unit_weight", "unit_weight_backward"]


def _of_filters(value: Tensor, like: Tensor) -> Tensor:
    """A number per filter, to broadcast against maps [N, O, *spatial]."""
    return value.detach().to(working_dtype(like.dtype)).reshape(-1, *(1,) * (like.dim() - 2))


def _grouped(maps: Tensor, groups: int) -> Tensor:
    return maps.reshape(maps.shape[0], groups, maps.shape[1] // groups, *maps.shape[2:])


def unit_weight(weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See `kernels.triton.weights`."""
    unit, scale = composite._UnitWeight.forward(weight.detach(), eps)
    return unit.to(dtype), scale.flatten()


def unit_weight_backward(grad_unit: Tensor, unit: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """See `kernels.triton.weights`."""
    grad, unit = grad_unit.to(scale.dtype), unit.to(scale.dtype)
    along = (grad * unit).sum(tuple(range(1, unit.dim())), keepdim=True)
    return ((grad - unit * along) * scale.reshape(along.shape)).to(dtype)


def forward(
    product: Tensor,
    x: Tensor,
    kernel_size: Sequence[int],
    geometry: Geometry,
    eps: float,
    angle: Angle,
    affine: Affine,
    keep_cosine: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `kernels.triton.patches`."""
    stride, padding, dilation, groups = geometry
    shrunk = x.detach().to(working_dtype(x.dtype)) * SHRINK
    squares = _grouped(shrunk * shrunk, groups).sum(2)
    sums = window_sum(squares, kernel_size, stride, padding, dilation)
    inverse_norm = (sums.add_(eps * SHRINK**2).rsqrt_() * SHRINK).contiguous()
    r = inverse_norm.repeat_interleave(product.shape[1] // groups, 1)
    cosine = torch.where(r == 0, r, product * r).clamp_(-1, 1)
    k = angle.k.detach() if isinstance(angle.k, Tensor) else angle.k
    out = composite.apply_angle(cosine, angle.name, k)
    bias, beta, gamma = (None if value is None else _of_filters(value, out) for value in affine)
    out = out if bias is None else out + bias
    out = out if beta is None else out * beta
    out = out if gamma is None else out + gamma
    return out.to(product.dtype), inverse_norm, cosine if keep_cosine else None


def backward(
    grad: Tensor,
    known: Tensor,
    known_is_cosine: bool,
    inverse_norm: Tensor,
    x: Tensor,
    kernel_size: Sequence[int],
    geometry: Geometry,
    angle: Angle,
    affine: Affine,
    needs_x: bool,
    needs_k: bool,
    needs_affine: bool,
) -> tuple[Tensor, Spread | None, Tensor | None]:
    """See `kernels.triton.gradients`."""
    wide, known = grad.to(inverse_norm.dtype), known.detach().to(inverse_norm.dtype)
    k = _of_filters(angle.k, known) if isinstance(angle.k, Tensor) else angle.k
    cosine = known if known_is_cosine else _inverse(known, angle.name, k)
    with torch.enable_grad():  # g, its slope and its derivative by k at once
        leaf = cosine.requires_grad_()
        k_leaf = k.expand(1, known.shape[1], *k.shape[1:]).clone().requires_grad_() if isinstance(k, Tensor) else None
        value = composite.apply_angle(leaf, angle.name, k) if k_leaf is None else angles.sigmoid(leaf, k_leaf)
        wanted = [leaf] if k_leaf is None or not needs_k else [leaf, k_leaf]
        slope, *by_k = torch.autograd.grad(value, wanted, wide)
    cosine, value = cosine.detach(), value.detach()
    by_g = slope if affine.beta is None else slope * _of_filters(affine.beta, known)
    of_product = by_g * inverse_norm.repeat_interleave(known.shape[1] // geometry.groups, 1)
    spread = None
    if needs_x:
        s = _grouped(of_product * cosine, geometry.groups).sum(2) * inverse_norm
        spread = Spread(s.contiguous(), tuple(kernel_size), geometry)
    if not (needs_k or needs_affine):
        return of_product.to(grad.dtype), spread, None
    over = (0, *range(2, grad.dim()))
    rows = [
        wide.sum(over),
        (wide * value).sum(over),
        by_k[0].flatten() if by_k else inverse_norm.new_zeros(len(wide[0])),
    ]
    return of_product.to(grad.dtype), spread, torch.stack(rows)


def _inverse(output: Tensor, name: str, k: Tensor | float | None) -> Tensor:
    if name == "sigmoid":
        assert k is not None
        return angles.sigmoid_inverse(output, k)
    return angles.linear_inverse(output) if name == "linear" else angles.cosine_inverse(output)


def correct(grad_x: Tensor, x: Tensor, spread: Spread, groups: int) -> Tensor:
    """See `kernels.triton.gradients`."""
    s, kernel_size, geometry = spread
    size = (x.shape[0], groups, *x.shape[2:])
    m = spread_windows(s, size, kernel_size, geometry.stride, geometry.padding, geometry.dilation)
    m = m.repeat_interleave(x.shape[1] // groups, 1)
    return (grad_x.to(m.dtype) - x.detach().to(m.dtype) * m).to(grad_x.dtype)


Function = TypeVar("Function", bound=Callable[..., Any])
_failed: set[object] = set()


def _kind(value: Any) -> object:
    """What decides how a kernel is compiled: not the sizes of a tensor, but everything else."""
    if isinstance(value, Tensor):
        return value.device, value.dtype, value.dim(), value.stride(1) == 1 if value.dim() > 1 else None
    if isinstance(value, tuple):
        return tuple(_kind(element) for element in value)
    return value


def _is_ours(error: Exception) -> bool:
    """Whether an error is one of compiling or launching: not of memory, and not of an earlier kernel."""
    if isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError, MemoryError)):
        return False
    return "out of memory" not in str(error).lower()


def guarded(kernel: Function, plain: Function) -> Function:
    """Return `kernel` with `plain` in its place for calls like one that failed; the first such call warns."""

    @wraps(kernel)
    def run(*arguments: Any) -> Any:
        if _failed and (kernel.__name__, *map(_kind, arguments)) in _failed:
            return plain(*arguments)
        try:
            return kernel(*arguments)
        except Exception as error:
            if not _is_ours(error):
                raise
            cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        _failed.add((kernel.__name__, *map(_kind, arguments)))
        warnings.warn(
            f"spherenet computes {kernel.__name__} without Triton for calls like this one: {cause}",
            RuntimeWarning,
            stacklevel=2,
        )
        return plain(*arguments)

    return run  # type: ignore[return-value]
