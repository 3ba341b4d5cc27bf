"""Reference implementation of the operators: one patch at a time, formulas of docs/concepts.md (Eq. 1 to 3, 14, 15).

This is the oracle behind every fast path in the tests. It is differentiable (away from θ = 0 and π, where
acos has no derivative), runs in any floating dtype and is meant for float64. Nothing else may use it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["MAGNITUDES", "g_cosine", "g_linear", "g_power", "g_sigmoid", "patches", "slope_cosine", "slope_linear",
           "slope_power", "slope_sigmoid", "sphere_conv", "sphere_linear", "theta"]  # fmt: skip


def g_linear(theta: Tensor) -> Tensor:
    """1 − 2θ/π."""
    return 1 - 2 * theta / math.pi


def g_cosine(theta: Tensor) -> Tensor:
    """cos θ."""
    return torch.cos(theta)


def g_sigmoid(theta: Tensor, k: Tensor | float) -> Tensor:
    """C(k)·(1−e^u)/(1+e^u), u = θ/k − π/(2k), C(k) = (1+e^{−π/2k})/(1−e^{−π/2k})."""
    k = torch.as_tensor(k, dtype=theta.dtype)
    u = theta / k - math.pi / (2 * k)
    scale = (1 + torch.exp(-math.pi / (2 * k))) / (1 - torch.exp(-math.pi / (2 * k)))
    return scale * (1 - torch.exp(u)) / (1 + torch.exp(u))


def g_power(theta: Tensor, p: Tensor | float) -> Tensor:
    """sign(cos θ)·|cos θ|^p."""
    return torch.sign(torch.cos(theta)) * torch.cos(theta).abs() ** p


def slope_linear(theta: Tensor) -> Tensor:
    """dg/dθ = −2/π."""
    return torch.full_like(theta, -2 / math.pi)


def slope_cosine(theta: Tensor) -> Tensor:
    """dg/dθ = −sin θ."""
    return -torch.sin(theta)


def slope_sigmoid(theta: Tensor, k: Tensor | float) -> Tensor:
    """dg/dθ = −C(k)·2e^u / (k(1+e^u)²); the paper omits C(k)."""
    k = torch.as_tensor(k, dtype=theta.dtype)
    u = theta / k - math.pi / (2 * k)
    scale = (1 + torch.exp(-math.pi / (2 * k))) / (1 - torch.exp(-math.pi / (2 * k)))
    return -scale * 2 * torch.exp(u) / (k * (1 + torch.exp(u)) ** 2)


def slope_power(theta: Tensor, p: Tensor | float) -> Tensor:
    """dg/dθ = −p·|cos θ|^(p−1)·sin θ."""
    return -p * torch.cos(theta).abs() ** (p - 1) * torch.sin(theta)


def theta(w: Tensor, x: Tensor, eps: float, center: str | None = None) -> Tensor:
    """The angle between two vectors of any shape: acos(wᵀx / (‖w‖‖x‖)), ‖v‖ = sqrt(Σv² + eps).

    center="weight" subtracts the mean of w first, and center="patch" the means of both.
    """
    if center is not None:
        w = w - w.sum() / w.numel()
    length = torch.sqrt((w * w).sum() + eps) * norm(x, eps, center)
    return torch.acos((w * centered(x, center)).sum() / length)


def centered(x: Tensor, center: str | None) -> Tensor:
    """A patch without its mean if center="patch"."""
    return x - x.sum() / x.numel() if center == "patch" else x


def norm(x: Tensor, eps: float, center: str | None = None) -> Tensor:
    """The norm of a patch, sqrt(Σx² + eps)."""
    x = centered(x, center)
    return torch.sqrt((x * x).sum() + eps)


def h_segmented(r: Tensor, radius: Tensor | float, alpha: float, beta: float) -> Tensor:
    """α·r below the radius, and a line with slope β above it."""
    return alpha * r if bool(r < radius) else beta * r + (alpha - beta) * radius


MAGNITUDES: dict[str, Callable[[Tensor, Tensor | float, float, float], Tensor]] = {
    "ball": lambda r, radius, alpha, beta: r / radius if bool(r < radius) else 1 + 0 * r / radius,
    "tanh": lambda r, radius, alpha, beta: torch.tanh(r / radius),
    "linear": lambda r, radius, alpha, beta: alpha * r,
    "segmented": h_segmented,
    "log": lambda r, radius, alpha, beta: alpha * torch.log(1 + r),
    "mixed": lambda r, radius, alpha, beta: alpha * r + beta * torch.log(1 + r),
}
"""h(‖x‖) by name, for the arguments norm, radius, α and β."""


def patches(
    image: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> tuple[list[Tensor], list[int]]:
    """All patches [C, *kernel_size] of an already padded image [C, *spatial] in row order, and the output's size."""
    reach = [d * (k - 1) + 1 for k, d in zip(kernel_size, dilation, strict=True)]
    size = [(n - r) // s + 1 for n, r, s in zip(image.shape[1:], reach, stride, strict=True)]
    found = []
    for position in itertools.product(*(range(n) for n in size)):
        window = tuple(slice(p * s, p * s + r, d) for p, s, r, d in zip(position, stride, reach, dilation, strict=True))
        found.append(image[(slice(None), *window)])
    return found, size


def sphere_conv(
    padded: Tensor,
    weight: Tensor,
    g: Callable[[Tensor, int], Tensor],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    eps: float,
    center: str | None = None,
    h: Callable[[Tensor, int], Tensor] | None = None,
) -> Tensor:
    """SphereConv by five nested loops: h(‖x‖)·g(θ) for each image, filter and patch.

    padded: [N, C, *spatial], padded already. weight: [O, C/groups, *kernel]. g: (θ, filter's index) → value.
    h: (‖x‖, filter's index) → value, or None for 1.
    """
    filters_a_group = weight.shape[0] // groups
    channels_a_group = padded.shape[1] // groups
    images = []
    for image in padded:
        maps = []
        for index, w in enumerate(weight):
            first = (index // filters_a_group) * channels_a_group
            seen, size = patches(image[first : first + channels_a_group], weight.shape[2:], stride, dilation)
            maps.append(torch.stack([output(w, x, g, h, index, eps, center) for x in seen]).reshape(size))
        images.append(torch.stack(maps))
    return torch.stack(images)


def output(
    w: Tensor,
    x: Tensor,
    g: Callable[[Tensor, int], Tensor],
    h: Callable[[Tensor, int], Tensor] | None,
    index: int,
    eps: float,
    center: str | None,
) -> Tensor:
    """h(‖x‖)·g(θ) of one kernel and one patch."""
    value = g(theta(w, x, eps, center), index)
    return value if h is None else h(norm(x, eps, center), index) * value


def sphere_linear(
    x: Tensor,
    weight: Tensor,
    g: Callable[[Tensor, int], Tensor],
    eps: float,
    center: str | None = None,
    h: Callable[[Tensor, int], Tensor] | None = None,
) -> Tensor:
    """SphereLinear by two loops. x: [N, in], weight: [out, in]."""
    rows = [[output(w, row, g, h, i, eps, center) for i, w in enumerate(weight)] for row in x]
    return torch.stack([torch.stack(values) for values in rows])
