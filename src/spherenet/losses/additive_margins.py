"""Losses with additive margins: CosFace and ArcFace."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from spherenet._util.validation import require_integer, require_number
from spherenet.errors import InvalidArgument
from spherenet.losses.arguments import CrossEntropyOptions, named_scale
from spherenet.losses.base import NamedScale
from spherenet.ops.angular import additive_angle, additive_cosine

if TYPE_CHECKING:
    from typing_extensions import Unpack


__all__ = ["ArcFaceLoss", "CosFaceLoss", "FaceLoss", "SubcenterArcFaceLoss"]

MANY_CLASSES, SCALE_OF_MANY_CLASSES = 1_000, 64.0
"""Number of classes from which CosFace and ArcFace use the published scale."""


class FaceLoss(NamedScale):
    """S-Softmax with g = cosine and an additive margin on the target class."""

    def __init__(
        self,
        m: float,
        s: float | Literal["auto"] | None,
        margin_gradient: str,
        **cross_entropy: Unpack[CrossEntropyOptions],
    ) -> None:
        super().__init__(operator="cosine", scale=named_scale(s), margin_gradient=margin_gradient, **cross_entropy)
        self.m = require_number("m", m)

    def scale_for(self, num_classes: int) -> float | None:
        """Return s; if it is "auto", 64 from 1,000 classes on, and `default_scale` for fewer."""
        if self.scale == "auto" and num_classes >= MANY_CLASSES:
            return SCALE_OF_MANY_CLASSES
        return super().scale_for(num_classes)

    def extra_repr(self) -> str:
        """Return the margin, the scale and the options that differ from their defaults."""
        return ", ".join(filter(None, (f"m={self.m:g}, s={self.s!r}", super().extra_repr())))


class CosFaceLoss(FaceLoss):
    """Large-margin cosine loss: z_j = s·cos θ_j + b_j, and s·(cos θ_y − m) + b_y for the target class y.

    The margin is constant, so that its gradient is that of m = 0.

    Args:
        m: Margin, at least 0 (S-Softmax) and less than 2, the range of the cosine. The published value is 0.35.
        s: Scale > 0, or "auto" (the same as None) for the published 64 from 1,000 classes on and `default_scale` for
            fewer classes, for which 64 is too large.
        **cross_entropy: class_weight, ignore_index, label_smoothing and reduction as in `AngularLoss`.
    """

    def __init__(
        self,
        m: float = 0.35,
        s: float | Literal["auto"] | None = "auto",
        **cross_entropy: Unpack[CrossEntropyOptions],
    ) -> None:
        super().__init__(m, s, "full", **cross_entropy)
        if not 0 <= self.m < 2:
            raise InvalidArgument("m", f"must be at least 0 and less than 2, got {m!r}.")

    def target_similarity(self, cosine: Tensor) -> Tensor:
        """Return cos θ − m."""
        return additive_cosine(cosine, self.m)


class ArcFaceLoss(FaceLoss):
    """Additive angular margin loss: z_j = s·cos θ_j + b_j, and s·cos(θ_y + m) + b_y for the target class y.

    If θ_y + m > π, cos(θ_y + m) would increase again. There the target's logit is s·(−2 − cos(θ_y + m)), which
    continues value and slope and keeps decreasing, like ψ in Eq. 6. (The published code uses cos θ_y − m·sin m there,
    which is discontinuous.)

    Args:
        m: Margin in radians, at least 0 (S-Softmax) and less than π. The published value is 0.5.
        s: Scale > 0, or "auto" (the same as None) for the published 64 from 1,000 classes on and `default_scale` for
            fewer classes, for which 64 is too large.
        margin_gradient: "full" as published, or "detached" for the gradient of m = 0 (Eq. 16).
        **cross_entropy: class_weight, ignore_index, label_smoothing and reduction as in `AngularLoss`.
    """

    def __init__(
        self,
        m: float = 0.5,
        s: float | Literal["auto"] | None = "auto",
        *,
        margin_gradient: str = "full",
        **cross_entropy: Unpack[CrossEntropyOptions],
    ) -> None:
        super().__init__(m, s, margin_gradient, **cross_entropy)
        if not 0 <= self.m < math.pi:
            raise InvalidArgument("m", f"must be at least 0 and less than π, got {m!r}.")

    def target_similarity(self, cosine: Tensor) -> Tensor:
        """Return cos(θ + m), continued beyond π."""
        return additive_angle(cosine, self.m)


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
