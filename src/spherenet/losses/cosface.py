"""CosFace: S-Softmax with an additive margin on the target's cosine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from spherenet.losses.s_softmax import SSoftmaxLoss
from spherenet.ops.arguments import require_number
from spherenet.ops.margins import additive_cosine

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from spherenet.losses.base import CrossEntropyOptions

__all__ = ["CosFaceLoss"]


class CosFaceLoss(SSoftmaxLoss):
    """Large-margin cosine loss: z_j = s·cos θ_j + b_j, for the target s·(cos θ_y − m) + b_y.

    m: from 0 (S-Softmax) to less than 2, the whole range of the cosine; 0.35 is the published value. s: a
    number > 0 (64 is usual for faces), or None for `default_scale`. Other arguments as in `AngularLoss`.
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
        """cos θ − m."""
        return additive_cosine(cosine, self.m)

    def extra_repr(self) -> str:
        """Name the margin."""
        return f"m={self.m:g}, {super().extra_repr()}"
