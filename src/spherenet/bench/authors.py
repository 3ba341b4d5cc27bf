"""SphereConv as the authors' released code computes it, as a baseline for benchmarks.

The patch norm is a convolution of x² with a kernel of ones over all channels, then acos and exp in separate passes.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spherenet.layers import SphereConv2d, SphereLinear

__all__ = ["as_authors_wrote_it"]


def _g(cosine: Tensor, layer: Any) -> Tensor:
    # The released code clamps nothing; acos needs it, or training stops at the first NaN.
    if layer.operator == "cosine":
        return cosine
    theta = torch.acos(cosine.clamp(-1 + 1e-7, 1 - 1e-7))
    if layer.operator == "linear":
        return 1 - 2 / math.pi * theta
    k = layer.k if isinstance(layer.k, Tensor) else torch.tensor(layer.k, dtype=cosine.dtype)
    k = k.reshape(-1, *(1,) * (cosine.dim() - 2))
    scale = (1 + torch.exp(-math.pi / (2 * k))) / (1 - torch.exp(-math.pi / (2 * k)))
    u = torch.exp(theta / k - math.pi / (2 * k))
    return scale * (1 - u) / (1 + u)


class _AuthorsConv2d(nn.Module):
    def __init__(self, layer: SphereConv2d) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        layer = self.layer
        geometry: Any = (layer.stride, layer.padding, layer.dilation)
        ones = torch.ones_like(layer.weight[:1])
        patch_norm = torch.sqrt(F.conv2d(x * x, ones, None, *geometry) + layer.eps)
        weight_norm = torch.sqrt((layer.weight * layer.weight).sum((1, 2, 3)) + layer.eps)
        product = F.conv2d(x, layer.weight, None, *geometry)
        return _g(product / patch_norm / weight_norm[:, None, None], layer)


class _AuthorsLinear(nn.Module):
    def __init__(self, layer: SphereLinear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        layer = self.layer
        norm = torch.sqrt((x * x).sum(1, keepdim=True) + layer.eps)
        weight_norm = torch.sqrt((layer.weight * layer.weight).sum(1) + layer.eps)
        return _g(F.linear(x, layer.weight) / norm / weight_norm, layer)


def as_authors_wrote_it(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose sphere layers (ungrouped, zero padded, unscaled) compute as released."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, SphereConv2d):
                setattr(module, name, _AuthorsConv2d(child))
            elif isinstance(child, SphereLinear):
                setattr(module, name, _AuthorsLinear(child))
    return model
