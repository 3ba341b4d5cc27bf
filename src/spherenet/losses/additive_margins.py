"""CosFace and ArcFace: S-Softmax with an additive margin on the cosine or the angle of the target class."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

from spherenet.losses.softmax import SSoftmaxLoss
from spherenet.ops.margins import additive_angle, additive_cosine
from spherenet.validation import require_number

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from spherenet.losses.base import CrossEntropyOptions

__all__ = ["ArcFaceLoss", "CosFaceLoss"]


class CosFaceLoss(SSoftmaxLoss):
    """Large-margin cosine loss: z_j = s·cos θ_j + b_j, and s·(cos θ_y − m) + b_y for the target class y.

    Args:
        m: Margin, at least 0 (S-Softmax) and less than 2, the range of the cosine. The published value is 0.35.
        s: Scale > 0 (64 is common for faces), or None for `default_scale` of the number of classes.
        **cross_entropy: class_weight, ignore_index, label_smoothing and reduction as in `AngularLoss`.
    """

    def __init__(
        self,
        m: float = 0.35,
        s: float | None = None,
        **cross_entropy: Unpack[CrossEntropyOptions],
    ) -> None:
        super().__init__("cosine", s, **cross_entropy)
        if not 0 <= require_number("m", m) < 2:
            raise ValueError(f"m must be at least 0 and less than 2, got {m!r}.")
        self.m = float(m)

    def target_similarity(self, cosine: Tensor) -> Tensor:
        """Return cos θ − m."""
        return additive_cosine(cosine, self.m)

    def extra_repr(self) -> str:
        """Return the margin, the scale and the options that differ from their defaults."""
        return f"m={self.m:g}, {super().extra_repr()}"


class ArcFaceLoss(SSoftmaxLoss):
    """Additive angular margin loss: z_j = s·cos θ_j + b_j, and s·cos(θ_y + m) + b_y for the target class y.

    If θ_y + m > π, cos(θ_y + m) would increase again. There the target's logit is s·(−2 − cos(θ_y + m)), which
    continues value and slope and keeps decreasing, like ψ in Eq. 5. (The published code uses cos θ_y − m·sin m there,
    which is discontinuous.)

    Args:
        m: Margin in radians, at least 0 (S-Softmax) and less than π. The published value is 0.5.
        s: Scale > 0 (64 is common for faces), or None for `default_scale` of the number of classes.
        **cross_entropy: class_weight, ignore_index, label_smoothing and reduction as in `AngularLoss`.
    """

    def __init__(
        self,
        m: float = 0.5,
        s: float | None = None,
        **cross_entropy: Unpack[CrossEntropyOptions],
    ) -> None:
        super().__init__("cosine", s, **cross_entropy)
        if not 0 <= require_number("m", m) < math.pi:
            raise ValueError(f"m must be at least 0 and less than π, got {m!r}.")
        self.m = float(m)

    def target_similarity(self, cosine: Tensor) -> Tensor:
        """Return cos(θ + m), continued beyond π."""
        return additive_angle(cosine, self.m)

    def extra_repr(self) -> str:
        """Return the margin, the scale and the options that differ from their defaults."""
        return f"m={self.m:g}, {super().extra_repr()}"
