"""Sub-center ArcFace: several directions per class, of which the nearest one counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from spherenet._util.validation import require_integer
from spherenet.losses.additive_margins import ArcFaceLoss

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from spherenet.losses.arguments import CrossEntropyOptions

__all__ = ["SubcenterArcFaceLoss"]


class SubcenterArcFaceLoss(ArcFaceLoss):
    """Sub-center ArcFace (Eq. 25; Deng et al., ECCV 2020): `ArcFaceLoss` on a head with several directions per class.

        cos θ_j = max_d cos θ_jd,   z_j = s·cos θ_j,   z_y = s·cos(θ_y + m)

    Noisy samples of a class gather at a separate direction instead of pulling the class away. The directions belong
    to the head: `create_model` makes one that fits, otherwise use `AngularHead(..., directions=subcenters)`.

    Args:
        m: Margin in radians, as in `ArcFaceLoss`.
        s: Scale, as in `ArcFaceLoss`.
        subcenters: Number of directions per class of the head of a new model, at least 1. Published: 3.
        margin_gradient: As in `ArcFaceLoss`.
        **cross_entropy: class_weight, ignore_index, label_smoothing and reduction as in `AngularLoss`.
    """

    def __init__(
        self,
        m: float = 0.5,
        s: float | Literal["auto"] | None = "auto",
        subcenters: int = 3,
        *,
        margin_gradient: str = "full",
        **cross_entropy: Unpack[CrossEntropyOptions],
    ) -> None:
        super().__init__(m, s, margin_gradient=margin_gradient, **cross_entropy)
        self.directions = require_integer("subcenters", subcenters, minimum=1)

    def extra_repr(self) -> str:
        """Return the options."""
        return f"{super().extra_repr()}, subcenters={self.directions}"
