"""MagFace: a margin that grows with the norm of the feature, and a reward for large norms."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from spherenet._util.validation import require_number, require_positive
from spherenet.errors import InvalidArgument
from spherenet.losses.additive_margins import FaceLoss
from spherenet.losses.batch import AnyBatch
from spherenet.ops.angular import AngularLogits, additive_angle

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from spherenet.losses.arguments import CrossEntropyOptions

__all__ = ["MagFaceLoss"]


class MagFaceLoss(FaceLoss):
    """MagFace (Eq. 22; Meng et al., CVPR 2021): the norm of a feature becomes a measure of the sample's quality.

        a = ‖x‖ limited to [smallest_norm, largest_norm]
        m(a) = m + (largest_m − m)·(a − smallest_norm)/(largest_norm − smallest_norm)
        z_y = s·cos(θ_y + m(a)),   z_j = s·cos θ_j
        L = cross entropy + norm_weight·(1/a + a/largest_norm²)

    A sample near its class can afford a large norm, and the last term rewards it. Both depend on ‖x‖ with a gradient.
    Beyond θ_y + m(a) = π the cosine is continued as in `ArcFaceLoss`.

    Args:
        m: Margin at the smallest norm, at least 0. Published: 0.45.
        s: Scale > 0, or "auto" (the same as None) as in `ArcFaceLoss`. Published: 64.
        largest_m: Margin at the largest norm, at least m and less than π. Published: 0.8.
        smallest_norm: Smallest norm, > 0. Published: 10.
        largest_norm: Largest norm, greater than `smallest_norm`. Published: 110.
        norm_weight: Weight λ of the last term, at least 0. Published: 35.
        **cross_entropy: class_weight, ignore_index, label_smoothing and reduction as in `AngularLoss`.
    """

    def __init__(
        self,
        m: float = 0.45,
        s: float | Literal["auto"] | None = "auto",
        largest_m: float = 0.8,
        smallest_norm: float = 10.0,
        largest_norm: float = 110.0,
        norm_weight: float = 35.0,
        **cross_entropy: Unpack[CrossEntropyOptions],
    ) -> None:
        super().__init__(m, s, "full", **cross_entropy)
        self.largest_m = require_number("largest_m", largest_m)
        if self.m < 0:
            raise InvalidArgument("m", f"must be at least 0, got {m!r}.")
        if not self.m <= self.largest_m < math.pi:
            raise InvalidArgument("largest_m", f"must be at least m ({self.m:g}) and less than π, got {largest_m!r}.")
        self.smallest_norm = require_positive("smallest_norm", smallest_norm)
        self.largest_norm = require_positive("largest_norm", largest_norm)
        if self.largest_norm <= self.smallest_norm:
            raise InvalidArgument(
                "largest_norm", f"must be greater than smallest_norm ({self.smallest_norm:g}), got {largest_norm!r}."
            )
        self.norm_weight = require_number("norm_weight", norm_weight)
        if self.norm_weight < 0:
            raise InvalidArgument("norm_weight", f"must be at least 0, got {norm_weight!r}.")

    def with_margin(self, logits: AngularLogits, batch: AnyBatch, labels: Tensor) -> AngularLogits:
        """Return logits with the margin m(a) of each row."""
        slope = (self.largest_m - self.m) / (self.largest_norm - self.smallest_norm)

        def target(cosine: Tensor, feature_norm: Tensor) -> Tensor:
            norm = feature_norm.clamp(self.smallest_norm, self.largest_norm)
            return additive_angle(cosine, self.m + slope * (norm - self.smallest_norm))

        return logits._replace(target=target)

    def row_penalty(self, feature_norm: Tensor, num_classes: int) -> Tensor | None:
        """Return norm_weight·(1/a + a/largest_norm²) of each row, None if the weight is 0."""
        if self.norm_weight == 0:
            return None
        norm = feature_norm.clamp(self.smallest_norm, self.largest_norm)
        return self.norm_weight * (1 / norm + norm / self.largest_norm**2)

    def extra_repr(self) -> str:
        """Return the options."""
        norms = f"smallest_norm={self.smallest_norm:g}, largest_norm={self.largest_norm:g}"
        return f"{super().extra_repr()}, largest_m={self.largest_m:g}, {norms}, norm_weight={self.norm_weight:g}"
