"""Plain softmax on an `AngularOutput`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spherenet.losses.base import AngularLoss
from spherenet.ops.angular_output import AngularOutput

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from spherenet.losses.base import CrossEntropyOptions

__all__ = ["SoftmaxLoss"]


class SoftmaxLoss(AngularLoss):
    """The loss of every classifier: z_j = ‖w_j‖·‖x‖·cos θ_j + b_j = w_jᵀx + b_j, then cross entropy.

    Here so that it can be compared with its relatives on one head. Keyword arguments as in `AngularLoss`.
    """

    def __init__(
        self,
        **cross_entropy: Unpack[CrossEntropyOptions],
    ) -> None:
        super().__init__(**cross_entropy)

    @property
    def uses_weight_norm(self) -> bool:
        """True: ‖w_j‖ multiplies the logit."""
        return True

    def scale(self, output: AngularOutput) -> Tensor:
        """‖x‖, cut off where its product with the largest ‖w‖ would exceed 6e30 in float32.

        The product of two norms may overflow, and softmax of infinite logits is NaN.
        """
        largest_logit = torch.finfo(output.cosine.dtype).max ** 0.8
        room = largest_logit / output.weight_norm.detach().amax().clamp_min(1)
        return torch.minimum(output.feature_norm, room)

    def class_scale(self, output: AngularOutput) -> Tensor:
        """‖w‖."""
        return output.weight_norm
