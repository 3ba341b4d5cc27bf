"""S-Softmax: features and class weights both of unit length, and the scale that makes such a loss train."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spherenet.losses.base import AngularLoss, angle_of_loss
from spherenet.ops.angle_functions import DEFAULT_K, AngleFunction
from spherenet.ops.angular_output import AngularOutput
from spherenet.ops.arguments import require_positive

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from spherenet.losses.base import CrossEntropyOptions

__all__ = ["SSoftmaxLoss", "default_scale"]

CONFIDENCE = 0.999
"""The probability that a feature at 45° from its class should be able to reach."""

SMALLEST_SCALE, LARGEST_SCALE = 10.0, 70.0
"""The range in which the paper reports that S-Softmax trains."""


def default_scale(num_classes: int, similarity_at_45: float = math.sqrt(0.5)) -> float:
    """s = log(p·(C − 1)/(1 − p)) / g(π/4) with p = 0.999, kept from 10 to 70.

    Logits lie in [−s, s], so s bounds the probability a class can get, and for more classes it must be larger.
    A feature at 45° from its class and at right angles to the others gets p = e^{s·g(π/4)} / (e^{s·g(π/4)} + C − 1);
    solved for s, that is the rule. With less, the loss keeps pulling on features that are already well placed;
    with much more, its gradient is gone as soon as a class is ahead. 10 classes and g = cosine: 12.9; 1,000:
    19.5; 100,000: 26.0.
    """
    wanted = math.log(CONFIDENCE / (1 - CONFIDENCE) * (num_classes - 1)) / similarity_at_45
    return min(LARGEST_SCALE, max(SMALLEST_SCALE, wanted))


class SSoftmaxLoss(AngularLoss):
    """Sphere-normalised softmax: z_j = s·g(θ_j) + b_j, then cross entropy (SPEC 1 (6)).

    angle: "cosine", "linear", "sigmoid" or an `AngleFunction` object; k: of the sigmoid. s: a number > 0; None
    takes `default_scale` of the number of classes. s = 1 does not train from scratch; 10 to 70 do.
    Other keyword arguments as in `AngularLoss`.
    """

    angle: AngleFunction

    def __init__(
        self,
        angle: str | AngleFunction = "cosine",
        s: float | None = None,
        k: float = DEFAULT_K,
        **cross_entropy: Unpack[CrossEntropyOptions],
    ) -> None:
        super().__init__(angle=angle_of_loss(angle, k), **cross_entropy)
        self.s = None if s is None else require_positive("s", s)
        self._similarity_at_45 = self._probe() if s is None else math.nan

    def scale(self, output: AngularOutput) -> float:
        """s."""
        return self.scale_for(output.cosine.shape[-1])

    def scale_for(self, num_classes: int) -> float:
        """The s that is used for so many classes."""
        return default_scale(num_classes, self._similarity_at_45) if self.s is None else self.s

    def extra_repr(self) -> str:
        """Name the scale."""
        return ", ".join(filter(None, (f"s={self.s}", super().extra_repr())))

    def _probe(self) -> float:
        """g(π/4) as a number, the mean over the classes where they differ."""
        k = self.angle.k
        device = k.device if isinstance(k, Tensor) else torch.device("cpu")
        with torch.no_grad():
            value = self.angle(torch.full((1,), math.sqrt(0.5), dtype=torch.float64, device=device)).mean().item()
        if not value > 0:
            raise ValueError(f"s must be given for an angle function that is not positive at 45°, got {value!r} there.")
        return float(value)
