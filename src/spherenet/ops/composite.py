"""SphereConv from torch's own differentiable operations: the reference that the fused kernels are twins of.

Slower and with more memory than `kernels`, but it can be differentiated any number of times, in both directions,
mapped and traced. One convolution with unit weights gives ‖x‖·cos θ; dividing by the patch norm leaves cos θ.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from spherenet.ops import angles
from spherenet.ops.norms import norm, patch_norm, working_dtype

__all__ = ["apply_affine", "apply_angle", "conv_product", "cosines"]

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def conv_product(
    x: Tensor, unit_weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> Tensor:
    """‖x‖·cos θ: an ordinary convolution, or a matrix product for a weight of two dimensions."""
    if unit_weight.dim() == 2:
        return F.linear(x, unit_weight)
    return _CONV[unit_weight.dim() - 2](x, unit_weight, None, stride, padding, dilation, groups)


def cosines(
    x: Tensor,
    unit_weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    eps: float,
) -> Tensor:
    """cos θ between each patch of x [N, C, *spatial] and each unit kernel [O, C/groups, *kernel], in float32 at least.

    For a weight [out, in] the patches are the rows of x [N, in]. Autocast must be off.
    """
    product = conv_product(x, unit_weight, stride, padding, dilation, groups)
    if unit_weight.dim() == 2:
        length = norm(x, 1, eps)
    else:
        length = patch_norm(x, unit_weight.shape[2:], stride, padding, dilation, groups, eps=eps)
        if groups > 1:  # one norm a group, for all filters of the group
            length = length.repeat_interleave(unit_weight.shape[0] // groups, 1)
    # An overflowed norm leaves no direction. Its product may be inf or NaN, which 0/inf must not meet, neither here
    # nor in backward: so the product is replaced, not the quotient. (`where`: masked_fill would give up channels-last.)
    wide = product.to(working_dtype(product.dtype))
    safe = torch.where(length.isinf(), torch.zeros((), dtype=wide.dtype, device=wide.device), wide)
    return safe / length


def apply_angle(cosine: Tensor, angle: str, k: Tensor | float | None) -> Tensor:
    """g of cosines [N, O, *spatial] for one of the built-in angle functions; k: a number or a tensor [O] or []."""
    if angle == "sigmoid":
        assert k is not None
        if isinstance(k, Tensor):
            return angles.sigmoid(cosine.movedim(1, -1), k.to(cosine.dtype)).movedim(-1, 1)
        return angles.sigmoid(cosine, k)
    return angles.linear(cosine) if angle == "linear" else angles.cosine(cosine)


def apply_affine(
    value: Tensor, bias: Tensor | None, beta: Tensor | float | None, gamma: Tensor | float | None
) -> Tensor:
    """β·(value + bias) + γ for maps [N, O, *spatial] and one number per filter."""
    if bias is None and beta is None and gamma is None:
        return value
    value = value.movedim(1, -1)
    value = value if bias is None else value + bias
    value = value if beta is None else value * beta
    value = value if gamma is None else value + gamma
    return value.movedim(-1, 1)
