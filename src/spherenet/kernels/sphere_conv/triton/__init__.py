"""SphereConv on GPUs, written in Triton: five functions around the convolutions of torch.

Launches per layer, forward and backward: unit weights, norms and g, gradient of g, correction, gradient of the
weights, and the three convolutions. A gradient of k, or of the affine map, adds one reduction. Centered layers and
magnitude functions have no Triton kernels (`kernels/dispatch.py`); their arguments are accepted and not used.

| module | idea |
|---|---|
| angles | g, its slope and its inverse as device code |
| weights, patches, gradients | the kernels and the functions that launch them |
| launch | geometry, strides, block sizes |
| fallback | plain operations for kernels that cannot be compiled or launched |
"""

from spherenet.kernels.sphere_conv.triton import fallback, gradients, patches, weights
from spherenet.kernels.sphere_conv.triton.fallback import guarded
from spherenet.kernels.sphere_conv.triton.gradients import Spread

__all__ = ["Spread", "backward", "correct", "forward", "unit_weight", "unit_weight_backward"]

unit_weight = guarded(weights.unit_weight, fallback.unit_weight)
unit_weight_backward = guarded(weights.unit_weight_backward, fallback.unit_weight_backward)
forward = guarded(patches.forward, fallback.forward)
backward = guarded(gradients.backward, fallback.backward)
correct = guarded(gradients.correct, fallback.correct)
