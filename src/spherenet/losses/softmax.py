"""Losses without a margin: softmax and W-Softmax (unit class weights)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spherenet.angles import DEFAULT_K, AngleFunction
from spherenet.losses.arguments import angle_of_loss
from spherenet.losses.base import AngularLoss
from spherenet.ops.angular import AngularOutput

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from spherenet.losses.arguments import CrossEntropyOptions

__all__ = ["SoftmaxLoss", "WSoftmaxLoss"]


class SoftmaxLoss(AngularLoss):
    """Plain softmax: z_j = ‖w_j‖·‖x‖·cos θ_j + b_j = w_jᵀx + b_j, then cross entropy.

    It equals `torch.nn.CrossEntropyLoss` on a linear layer and allows comparisons on the same head.

    Args:
        **cross_entropy: class_weight, ignore_index, label_smoothing and reduction as in `AngularLoss`.
    """

    def __init__(self, **cross_entropy: Unpack[CrossEntropyOptions]) -> None:
        super().__init__(**cross_entropy)

    @property
    def uses_weight_norm(self) -> bool:
        """True: ‖w_j‖ multiplies the logit."""
        return True

    def scales(self, output: AngularOutput) -> tuple[Tensor, Tensor]:
        """Return ‖x‖ and ‖w‖, with ‖x‖ limited so that no product exceeds 6e30 in float32.

        The product of two norms can overflow, and the softmax of infinite logits is NaN.
        """
        largest_logit = torch.finfo(output.cosine.dtype).max ** 0.8
        largest_norm = largest_logit / output.weight_norm.detach().amax().clamp_min(1)
        return torch.minimum(output.feature_norm, largest_norm), output.weight_norm


class WSoftmaxLoss(AngularLoss):
    """Weight-normalized softmax (Eq. 5): z_j = ‖x‖·g(θ_j) + b_j, then cross entropy.

    Without a bias, the predicted class depends on the angles only.

    Args:
        angle: "cosine", "linear", "sigmoid" or an `AngleFunction` object.
        k: Parameter of the sigmoid; not allowed with another angle function.
        **cross_entropy: class_weight, ignore_index, label_smoothing and reduction as in `AngularLoss`.
    """

    angle: AngleFunction

    def __init__(
        self,
        angle: str | AngleFunction = "cosine",
        k: float = DEFAULT_K,
        **cross_entropy: Unpack[CrossEntropyOptions],
    ) -> None:
        super().__init__(angle=angle_of_loss(angle, k), **cross_entropy)
