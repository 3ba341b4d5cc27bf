"""SphereConv on GPUs, written in Triton: five functions around the convolutions of torch.

Launches per layer, forward and backward: unit weights, norms and g, gradient of g, correction, gradient of the
weights, and the three convolutions. A gradient of k, or of the affine map, adds one reduction. Centered layers and
magnitude functions have no Triton kernels.

| module | idea |
|---|---|
| angles | g, its slope and its inverse as device code |
| weights, patches, gradients | the kernels and the functions that launch them |
| launch | geometry, strides, block sizes; what happens if kernels cannot be compiled or launched |
"""

import torch
from torch import Tensor

from spherenet.kernels.backends import Backend, Case, Gradients, Pass, Saved
from spherenet.kernels.sphere_conv.triton import gradients, patches, weights
from spherenet.kernels.sphere_conv.triton.angles import KERNEL_IDS
from spherenet.kernels.sphere_conv.triton.launch import reported
from spherenet.ops.geometry import convolve, convolve_backward
from spherenet.ops.operation import Operation, Parameters

__all__ = ["BACKEND", "TritonBackend"]


class TritonBackend(Backend):
    """Torch's convolution with unit weights, and one launch before and after it."""

    name = "triton"

    def supports(self, case: Case) -> bool:
        """Return whether there are kernels for g; centers, magnitudes and transposed convolutions have none."""
        extended = case.center is not None or case.magnitude is not None or case.geometry.transposed
        return case.angle in KERNEL_IDS and not extended

    def unit_weight(self, weight: Tensor, operation: Operation, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """See `Backend.unit_weight`."""
        return weights.unit_weight(weight, operation.eps, dtype)

    @reported
    def forward(
        self, x: Tensor, weight: Tensor, operation: Operation, parameters: Parameters, save_cosine: bool
    ) -> tuple[Tensor, Saved]:
        """See `Backend.forward`."""
        unit, scale = self.unit_weight(weight, operation, x.dtype)
        product = convolve(x, unit, operation.geometry)
        out, inverse_norm, saved_map = patches.forward(product, x, operation, parameters, save_cosine)
        return out, Saved(unit, scale, inverse_norm, saved_map)

    @reported
    def backward(self, grad: Tensor, x: Tensor, dtype: torch.dtype, asked: Pass) -> Gradients:
        """See `Backend.backward`."""
        saved, geometry, unit = asked.saved, asked.operation.geometry, asked.saved.unit_weight
        of_product, spread, sums = gradients.backward(grad, asked)
        grad_x, grad_unit = convolve_backward(of_product, x, unit, geometry, asked.needs[0], asked.needs[1])
        if grad_x is not None and spread is not None:
            grad_x = gradients.correct(grad_x, x, spread, geometry.groups)
        if grad_unit is not None:
            grad_unit = weights.unit_weight_backward(grad_unit, unit, saved.scale, dtype)
        return Gradients(grad_x, grad_unit, sums)


BACKEND = TritonBackend()
