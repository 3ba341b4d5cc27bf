"""A SphereConv by the Triton backend, without the choice of `dispatch`."""

import copy

from spherenet.kernels.dispatch import SphereConvFunction
from spherenet.kernels.sphere_conv.triton import BACKEND
from spherenet.ops.operation import Operation


def triton_sphere_conv(x, weight, geometry, angle, k=None, affine=(None, None, None), eps=1e-4, save_cosine=False):
    """Evaluate the layer for autograd; save_cosine saves the cosines although the output determines them."""
    if save_cosine:
        angle = copy.copy(angle)
        angle.is_recoverable = False
    return SphereConvFunction.apply(x, weight, k, *affine, None, Operation(angle, geometry, eps), BACKEND)
