"""W-Softmax: softmax whose class weights have unit length."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spherenet.losses.base import AngularLoss, angle_of_loss
from spherenet.ops.angle_functions import DEFAULT_K, AngleFunction

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from spherenet.losses.base import CrossEntropyOptions

__all__ = ["WSoftmaxLoss"]


class WSoftmaxLoss(AngularLoss):
    """Weight-normalised softmax: z_j = ‖x‖·g(θ_j) + b_j, then cross entropy (SPEC 1 (4)).

    The decision depends on the angles alone (without bias). angle: "cosine", "linear", "sigmoid" or an
    `AngleFunction` object; k: of the sigmoid. Other keyword arguments as in `AngularLoss`.
    """

    angle: AngleFunction

    def __init__(
        self,
        angle: str | AngleFunction = "cosine",
        k: float = DEFAULT_K,
        **cross_entropy: Unpack[CrossEntropyOptions],
    ) -> None:
        super().__init__(angle=angle_of_loss(angle, k), **cross_entropy)
