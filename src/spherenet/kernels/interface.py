"""What the implementations of the kernels share: the description of g and of the affine map behind it.

An implementation is a module with five functions, `native` on CPUs and `triton` on GPUs:

    unit_weight(weight, eps, dtype) → (unit, scale)
    unit_weight_backward(grad_unit, unit, scale, dtype) → grad_weight
    forward(product, x, kernel_size, geometry, eps, angle, affine, keep_cosine) → (out, inverse_norm, cosine)
    backward(grad, known, known_is_cosine, inverse_norm, x, kernel_size, geometry, angle, affine,
             needs_x, needs_k, needs_affine) → (grad_product, spread, sums)
    correct(grad_x, x, spread, groups) → grad_x

`kernels/sphere_conv.py` calls them around torch's own convolutions and documents what each returns.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["ANGLES", "Affine", "Angle"]

ANGLES = ("cosine", "linear", "sigmoid")
"""The names of the angle functions that the kernels know, in the order of their numbers in csrc/api.h."""


class Angle(NamedTuple):
    """An angle function as the kernels know it; k is a number, or a tensor with one element or one per filter."""

    name: str
    k: Tensor | float | None = None


class Affine(NamedTuple):
    """The map β·(g + b) + γ behind g; each a tensor with one element per filter, or None."""

    bias: Tensor | None = None
    beta: Tensor | None = None
    gamma: Tensor | None = None

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return not (self.bias is None and self.beta is None and self.gamma is None)
