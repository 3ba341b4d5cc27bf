"""ArcFace: S-Softmax with an additive margin on the target's angle."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

from spherenet.losses.s_softmax import SSoftmaxLoss
from spherenet.ops.arguments import require_number
from spherenet.ops.margins import additive_angle

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from spherenet.losses.base import CrossEntropyOptions

__all__ = ["ArcFaceLoss"]


class ArcFaceLoss(SSoftmaxLoss):
    """Additive angular margin loss: z_j = s·cos θ_j + b_j, for the target s·cos(θ_y + m) + b_y.

    Where θ_y + m > π, cos(θ_y + m) would rise again; there the target's logit is s·(−2 − cos(θ_y + m)), which
    joins in value and slope and goes on falling: the continuation of ψ in SPEC 1 (5). (The published code
    takes cos θ_y − m·sin m there, which jumps.)

    m: from 0 (S-Softmax) to less than π; 0.5 is the published value. s: a number > 0 (64 is usual for faces),
    or None for `default_scale`. Other arguments as in `AngularLoss`.
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
        """cos(θ + m), continued beyond π."""
        return additive_angle(cosine, self.m)

    def extra_repr(self) -> str:
        """Name the margin."""
        return f"m={self.m:g}, {super().extra_repr()}"
