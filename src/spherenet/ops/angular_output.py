"""What an angular head says about a batch: all that any loss of the family needs to make its logits."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["AngularOutput"]


class AngularOutput(NamedTuple):
    """Angles and lengths between features and class weights: cos θ_ij, ‖x_i‖, ‖w_j‖, b_j (SPEC 6).

    The inner product of plain softmax is weight_norm_j · feature_norm_i · cosine_ij + bias_j; angular losses
    leave out one norm or both. All are float32 where features and weights are half precision.

    Shapes: cosine [*, C], feature_norm [*], weight_norm [C], bias [C] or None.
    """

    cosine: Tensor
    feature_norm: Tensor
    weight_norm: Tensor
    bias: Tensor | None = None
