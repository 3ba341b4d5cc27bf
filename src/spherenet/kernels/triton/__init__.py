"""SphereConv on GPUs, written in Triton: five functions around the convolutions of torch.

Launches per layer, forward and backward: unit weights, norms and g, gradient of g, correction, gradient of the
weights, and the three convolutions. A gradient of k, or of the affine map, adds one reduction.
"""

from spherenet.kernels.triton.gradients import Spread, backward, correct
from spherenet.kernels.triton.patches import forward
from spherenet.kernels.triton.weights import unit_weight, unit_weight_backward

__all__ = ["Spread", "backward", "correct", "forward", "unit_weight", "unit_weight_backward"]
