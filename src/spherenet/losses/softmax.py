"""Losses without a margin: softmax, W-Softmax (unit class weights) and S-Softmax (unit features too)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spherenet.angles import DEFAULT_K, AngleFunction
from spherenet.losses.base import AngularLoss, angle_of_loss
from spherenet.ops.margins import AngularOutput
from spherenet.validation import require_positive

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from spherenet.losses.base import CrossEntropyOptions

__all__ = ["SSoftmaxLoss", "SoftmaxLoss", "WSoftmaxLoss", "default_scale"]

CONFIDENCE = 0.999
"""Probability that a feature at 45° from its class must be able to reach."""

SMALLEST_SCALE, LARGEST_SCALE = 10.0, 70.0
"""Range in which S-Softmax trains according to the paper."""


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
    """Weight-normalized softmax (Eq. 4): z_j = ‖x‖·g(θ_j) + b_j, then cross entropy.

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


def default_scale(num_classes: int, similarity_at_45: float = math.sqrt(0.5)) -> float:
    """Return the scale s of S-Softmax for a number of classes.

        s = log(p·(C − 1)/(1 − p)) / g(π/4) with p = 0.999, limited to [10, 70]

    Logits lie in [−s, s], so s bounds the probability of a class and must grow with the number of classes. A feature
    at 45° from its class and at 90° from the others has the probability
    p = e^{s·g(π/4)} / (e^{s·g(π/4)} + C − 1), which gives the formula. With a smaller s the loss still moves features
    that are already well placed; with a much larger one the gradient vanishes as soon as a class leads. Values for
    g = cosine: 12.9 for 10 classes, 19.5 for 1,000 and 26.0 for 100,000.

    Args:
        num_classes: Number of classes C.
        similarity_at_45: g(π/4) of the angle function.
    """
    scale = math.log(CONFIDENCE / (1 - CONFIDENCE) * (num_classes - 1)) / similarity_at_45
    return min(LARGEST_SCALE, max(SMALLEST_SCALE, scale))


class SSoftmaxLoss(AngularLoss):
    """Sphere-normalized softmax (Eq. 6): z_j = s·g(θ_j) + b_j, then cross entropy.

    Args:
        angle: "cosine", "linear", "sigmoid" or an `AngleFunction` object.
        s: Scale > 0, or None for `default_scale` of the number of classes. From scratch, s = 1 does not train; 10 to
            70 do.
        k: Parameter of the sigmoid; not allowed with another angle function.
        **cross_entropy: class_weight, ignore_index, label_smoothing and reduction as in `AngularLoss`.
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
        self._similarity_at_45 = self._measure_similarity_at_45() if s is None else math.nan

    def scales(self, output: AngularOutput) -> tuple[float, None]:
        """Return s, and None because class weights have unit length."""
        return self.scale_for(output.cosine.shape[-1]), None

    def scale_for(self, num_classes: int) -> float:
        """Return the scale s that is used for a number of classes."""
        return default_scale(num_classes, self._similarity_at_45) if self.s is None else self.s

    def extra_repr(self) -> str:
        """Return the scale and the options that differ from their defaults."""
        return ", ".join(filter(None, (f"s={self.s}", super().extra_repr())))

    def _measure_similarity_at_45(self) -> float:
        """Return g(π/4) as a number, the mean over classes if they differ."""
        k = self.angle.k
        device = k.device if isinstance(k, Tensor) else torch.device("cpu")
        with torch.no_grad():
            value = self.angle(torch.full((1,), math.sqrt(0.5), dtype=torch.float64, device=device)).mean().item()
        if not value > 0:
            raise ValueError(f"s must be given for an angle function that is not positive at 45°, got {value!r} there.")
        return float(value)
