"""Magnitude-preserving layers: unit-variance inputs give unit-variance outputs, without normalizing activations.

Karras et al. 2024 ("Analyzing and improving the training dynamics of diffusion models", EDM2) remove the normalization
layers of a network and keep the expected magnitude E[x²] of every activation at 1 by design:

- A kernel w of n entries is used as w/‖w‖. If the inputs are uncorrelated with E[x²] = 1, so is the output.
- Sums, concatenations and activations are divided by the magnitude they would have (`mp_sum`, `mp_cat`, `mp_silu`).

The gradient of such a kernel is orthogonal to it, so that every step makes it longer and later steps rotate it less.
The paper therefore also resets the stored kernels to ‖w‖ = √n (forced weight normalization): in place at the start of
each forward pass in training, and w/‖w‖ is computed again in the graph, so that gradients pass through it.
`spherenet.keep_norms(optimizer, model)` resets them after each step instead, for the layers of this module, whose
kernels start at this norm. Each forward pass sees the same kernels; what is saved in between is normalized too.
`spherenet.param_groups` leaves these weights without decay.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spherenet._util.validation import OptionCheck, require_floating, require_integer, require_memory, require_number
from spherenet.errors import InvalidArgument
from spherenet.ops.norms import DEFAULT_EPS, direction

__all__ = ["MPConv2d", "MPLinear", "mp_cat", "mp_silu", "mp_sum"]

SILU_MAGNITUDE = 0.596
"""sqrt(E[silu(x)²]) for x ~ N(0, 1), as rounded in the paper."""


class _MPLayer(OptionCheck, nn.Module):
    """Weight of a magnitude-preserving layer: Gaussian kernels with the norm √n."""

    scale_invariant = True  # `keep_norms` and `param_groups` read this
    weight: nn.Parameter

    def __init__(self, shape: tuple[int, ...], device: Any, dtype: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw Gaussian kernels and scale them to the norm √n."""
        nn.init.normal_(self.weight)
        self.normalize_()

    @torch.no_grad()
    def normalize_(self) -> None:
        """Scale each kernel to the norm √n; a zero kernel stays zero."""
        entries = self.weight[0].numel()
        # No gradient needs a larger eps here: it only keeps 0/0 away.
        self.weight.copy_(_unit_kernels(self.weight, 1e-20) * math.sqrt(entries))


class MPConv2d(_MPLayer):
    """Convolve with unit-norm kernels: out = gain·(w/‖w‖ ∗ x), without bias.

    The padding adds zeros, which lower the magnitude at borders.

    Args:
        in_channels: As in `torch.nn.Conv2d`.
        out_channels: As in `torch.nn.Conv2d`.
        kernel_size: Height and width of the kernels, or one number for both.
        stride: As in `torch.nn.Conv2d`.
        padding: As in `torch.nn.Conv2d`, but "same" for odd kernels by default.
        groups: As in `torch.nn.Conv2d`.
        device: Device of the weight.
        dtype: Dtype of the weight.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is not allowed.

    Shape:
        [N, in_channels, H, W] → [N, out_channels, H, W]; `weight` [out_channels, in_channels/groups, KH, KW].
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int = 1,
        padding: int | tuple[int, int] | None = None,
        groups: int = 1,
        *,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        height, width = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
        height = require_integer("kernel_size", height, minimum=1)
        width = require_integer("kernel_size", width, minimum=1)
        in_channels = require_integer("in_channels", in_channels, minimum=1)
        out_channels = require_integer("out_channels", out_channels, minimum=1)
        groups = require_integer("groups", groups, minimum=1)
        if in_channels % groups or out_channels % groups:
            raise InvalidArgument(
                "groups",
                f"must be a divisor of in_channels={in_channels} and out_channels={out_channels}, got {groups}.",
            )
        super().__init__((out_channels, in_channels // groups, height, width), device, dtype)
        self.stride, self.groups = require_integer("stride", stride, minimum=1), groups
        self.padding = (height // 2, width // 2) if padding is None else padding

    def forward(self, input: Tensor, gain: float | Tensor = 1.0) -> Tensor:
        """Return the convolution, times `gain`, which a network can learn where magnitudes should change."""
        require_floating("input", input)
        weight = _unit_kernels(self.weight) * gain
        return F.conv2d(input, weight.to(input.dtype), None, self.stride, self.padding, groups=self.groups)

    def extra_repr(self) -> str:
        """Return the sizes of the layer."""
        return f"{list(self.weight.shape)}, stride={self.stride}, padding={self.padding}, groups={self.groups}"


class MPLinear(_MPLayer):
    """Multiply by a matrix with unit-norm rows: out = gain·(W/‖W‖)x, without bias.

    Args:
        in_features: As in `torch.nn.Linear`.
        out_features: As in `torch.nn.Linear`.
        device: Device of the weight.
        dtype: Dtype of the weight.

    Shape:
        [*, in_features] → [*, out_features]; `weight` [out_features, in_features].
    """

    def __init__(self, in_features: int, out_features: int, *, device: Any = None, dtype: Any = None) -> None:
        in_features = require_integer("in_features", in_features, minimum=1)
        out_features = require_integer("out_features", out_features, minimum=1)
        super().__init__((out_features, in_features), device, dtype)

    def forward(self, input: Tensor, gain: float | Tensor = 1.0) -> Tensor:
        """Return the product, times `gain`."""
        require_floating("input", input)
        return F.linear(input, (_unit_kernels(self.weight) * gain).to(input.dtype))

    def extra_repr(self) -> str:
        """Return the sizes of the layer."""
        return f"in_features={self.weight.shape[1]}, out_features={self.weight.shape[0]}"


def mp_sum(a: Tensor, b: Tensor, t: float = 0.5) -> Tensor:
    """Return ((1 − t)·a + t·b)/√((1 − t)² + t²), which has magnitude 1 if a and b are uncorrelated and have.

    Args:
        a: First tensor, e.g. the main path of a residual block.
        b: Second tensor, e.g. the residual branch.
        t: Weight of b, from 0 to 1; the paper uses 0.3 for residual branches.

    Raises:
        ValueError: If t is not from 0 to 1.
    """
    require_memory(a, b)
    t = _weight(t)
    return ((1 - t) * a + t * b) / math.hypot(1 - t, t)


def mp_cat(a: Tensor, b: Tensor, dim: int = 1, t: float = 0.5) -> Tensor:
    """Concatenate two tensors so that they contribute with the weights 1 − t and t, whatever their sizes.

    With sizes n_a and n_b along `dim`, the result of magnitude 1 is

        √((n_a + n_b)/((1 − t)² + t²)) · [(1 − t)/√n_a · a, t/√n_b · b]

    Args:
        a: First tensor.
        b: Second tensor.
        dim: Dimension to concatenate along.
        t: Weight of b, from 0 to 1.

    Raises:
        ValueError: If t is not from 0 to 1, or a size is 0.
    """
    require_memory(a, b)
    t = _weight(t)
    sizes = a.shape[dim], b.shape[dim]
    if 0 in sizes:
        raise InvalidArgument(
            "a", f"and b must have at least 1 entry along dim={dim}, got sizes {sizes[0]} and {sizes[1]}."
        )
    total = math.sqrt(sum(sizes)) / math.hypot(1 - t, t)
    return torch.cat([a * (total * (1 - t) / math.sqrt(sizes[0])), b * (total * t / math.sqrt(sizes[1]))], dim)


def mp_silu(x: Tensor) -> Tensor:
    """Return silu(x)/0.596, which has magnitude 1 if x is Gaussian with magnitude 1."""
    require_memory(x)
    return F.silu(x) / SILU_MAGNITUDE


def _unit_kernels(weight: Tensor, eps: float = DEFAULT_EPS) -> Tensor:
    """Return each kernel divided by its norm. Kernels have the norm √n ≥ 1, so that eps = 1e-4 hardly matters."""
    return direction(weight, tuple(range(1, weight.dim())), eps)


def _weight(t: float) -> float:
    if not 0 <= require_number("t", t) <= 1:
        raise InvalidArgument("t", f"must be from 0 to 1, got {t!r}.")
    return float(t)
