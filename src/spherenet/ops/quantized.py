"""Weights that a quantizer stores as a tensor subclass."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["dequantized"]


def dequantized(weight: Tensor) -> Tensor:
    """Return the rounded values of a quantized weight as a plain tensor, and any other weight as it is.

    torchao replaces the weight of a layer by a subclass that knows linear functions only. A sphere layer also needs the
    norms of its kernels, so it computes from the values, in their floating point dtype.
    """
    if type(weight) is nn.Parameter or type(weight) is Tensor:
        return weight
    method = type(weight).dequantize
    return weight if method is Tensor.dequantize else method(weight)
