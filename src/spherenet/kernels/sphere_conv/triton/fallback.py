"""The five functions by torch operations, for calls that Triton cannot compile or launch."""

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from spherenet.kernels.sphere_conv.triton.gradients import Spread
from spherenet.ops import sphere_conv as plain_formula
from spherenet.ops.geometry import spread as spread_windows
from spherenet.ops.geometry import window_sum
from spherenet.ops.norms import SHRINK, working_dtype
from spherenet.ops.sphere_conv import Affine, Operation

__all__ = ["backward", "correct", "forward", "guarded", "unit_weight", "unit_weight_backward"]


def _of_filters(value: Any, like: Tensor) -> Tensor:
    """Return one number per filter in a shape that broadcasts against maps [N, O, *spatial]."""
    return value.detach().to(working_dtype(like.dtype)).reshape(-1, *(1,) * (like.dim() - 2))


def _grouped(maps: Tensor, groups: int) -> Tensor:
    return maps.reshape(maps.shape[0], groups, maps.shape[1] // groups, *maps.shape[2:])


def unit_weight(weight: Tensor, eps: float, dtype: torch.dtype, centered: bool = False) -> tuple[Tensor, Tensor]:
    """See `kernels.triton.weights`."""
    unit, scale = plain_formula._UnitWeight.forward(weight.detach(), eps)
    return unit.to(dtype), scale.flatten()


def unit_weight_backward(
    grad_unit: Tensor, unit: Tensor, scale: Tensor, dtype: torch.dtype, centered: bool = False
) -> Tensor:
    """See `kernels.triton.weights`."""
    grad, unit = grad_unit.to(scale.dtype), unit.to(scale.dtype)
    along = (grad * unit).sum(tuple(range(1, unit.dim())), keepdim=True)
    return ((grad - unit * along) * scale.reshape(along.shape)).to(dtype)


def forward(
    product: Tensor,
    x: Tensor,
    operation: Operation,
    k: Tensor | float | None,
    affine: Affine | None,
    radius: Any = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `kernels.triton.patches`."""
    angle, geometry, eps, _, save_cosine = operation[:5]
    shrunk = x.detach().to(working_dtype(x.dtype)) * SHRINK
    sums = window_sum(_grouped(shrunk * shrunk, geometry.groups).sum(2), geometry)
    inverse_norm = (sums.add_(eps * SHRINK**2).rsqrt_() * SHRINK).contiguous()
    r = inverse_norm.repeat_interleave(product.shape[1] // geometry.groups, 1)
    cosine = torch.where(r == 0, r, product * r).clamp_(-1, 1)
    out = plain_formula.apply_angle(cosine, angle, k.detach() if isinstance(k, Tensor) else k)
    bias, beta, gamma = (None if value is None else _of_filters(value, out) for value in affine or Affine())
    out = out if bias is None else out + bias
    out = out if beta is None else out * beta
    out = out if gamma is None else out + gamma
    return out.to(product.dtype), inverse_norm, cosine if save_cosine else None


def backward(
    grad: Tensor,
    saved: Tensor,
    inverse_norm: Tensor,
    x: Tensor,
    operation: Operation,
    k: Tensor | float | None,
    affine: Affine | None,
    needs_x: bool,
    needs_k: bool,
    needs_affine: bool,
    mean: Any = None,
    radius: Any = None,
) -> tuple[Tensor, Spread | None, Tensor | None]:
    """See `kernels.triton.gradients`."""
    angle, geometry, _, _, save_cosine = operation[:5]
    wide, saved = grad.to(inverse_norm.dtype), saved.detach().to(inverse_norm.dtype)
    k = _of_filters(k, saved) if isinstance(k, Tensor) else k
    cosine = saved if save_cosine else angle.inverse(saved, k)
    with torch.enable_grad():  # g, its slope and its derivative by k at once
        leaf = cosine.requires_grad_()
        k_leaf = k.expand(1, saved.shape[1], *k.shape[1:]).clone().requires_grad_() if isinstance(k, Tensor) else None
        value = angle.value(leaf, k if k_leaf is None else k_leaf)
        differentiated = [leaf] if k_leaf is None or not needs_k else [leaf, k_leaf]
        slope, *by_k = torch.autograd.grad(value, differentiated, wide)
    cosine, value = cosine.detach(), value.detach()
    beta = None if affine is None else affine.beta
    by_g = slope if beta is None else slope * _of_filters(beta, saved)
    of_product = by_g * inverse_norm.repeat_interleave(saved.shape[1] // geometry.groups, 1)
    spread = None
    if needs_x:
        s = _grouped(of_product * cosine, geometry.groups).sum(2) * inverse_norm
        spread = Spread(s.contiguous(), geometry)
    if not (needs_k or needs_affine):
        return of_product.to(grad.dtype), spread, None
    over = (0, *range(2, grad.dim()))
    rows = [
        wide.sum(over),
        (wide * value).sum(over),
        by_k[0].flatten() if by_k else inverse_norm.new_zeros(len(wide[0])),
    ]
    return of_product.to(grad.dtype), spread, torch.stack(rows)


def correct(grad_x: Tensor, x: Tensor, spread: Spread, groups: int) -> Tensor:
    """See `kernels.triton.gradients`."""
    m = spread_windows(spread.s, (x.shape[0], groups, *x.shape[2:]), spread.geometry)
    m = m.repeat_interleave(x.shape[1] // groups, 1)
    return (grad_x.to(m.dtype) - x.detach().to(m.dtype) * m).to(grad_x.dtype)


Function = TypeVar("Function", bound=Callable[..., Any])
_failed: set[object] = set()


def _signature(value: Any) -> object:
    """Return what decides how a kernel is compiled: everything but the sizes of tensors."""
    if isinstance(value, Tensor):
        return value.device, value.dtype, value.dim(), value.stride(1) == 1 if value.dim() > 1 else None
    if isinstance(value, tuple):
        return tuple(_signature(element) for element in value)
    return getattr(value, "kernel_id", value)  # angle functions of one class are compiled once


def _is_launch_error(error: Exception) -> bool:
    """Return whether an error is one of compiling or launching, not of memory and not of an earlier kernel."""
    if isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError, MemoryError)):
        return False
    return "out of memory" not in str(error).lower()


def guarded(kernel: Function, plain: Function) -> Function:
    """Return `kernel`, replaced by `plain` for calls like one that failed; the first such call warns."""

    @wraps(kernel)
    def run(*arguments: Any) -> Any:
        if _failed and (kernel.__name__, *map(_signature, arguments)) in _failed:
            return plain(*arguments)
        try:
            return kernel(*arguments)
        except Exception as error:
            if not _is_launch_error(error):
                raise
            cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        _failed.add((kernel.__name__, *map(_signature, arguments)))
        warnings.warn(
            f"spherenet computes {kernel.__name__} without Triton for calls like this one: {cause}",
            RuntimeWarning,
            stacklevel=2,
        )
        return plain(*arguments)

    return run  # type: ignore[return-value]
