"""CurricularFace: classes that beat the target count more as training proceeds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from spherenet._util.validation import require_number
from spherenet.errors import InvalidArgument, InvalidArgumentType
from spherenet.losses.adaptive import AdaptiveLoss
from spherenet.losses.batch import AnyBatch
from spherenet.ops.angular import AngularLogits, additive_angle

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from spherenet.losses.arguments import CrossEntropyOptions

__all__ = ["CurricularFaceLoss"]


class CurricularFaceLoss(AdaptiveLoss):
    """CurricularFace (Eq. 23; Huang et al., CVPR 2020): easy samples first, hard ones later.

        z_y = s·cos(θ_y + m)
        z_j = s·cos θ_j                  if cos θ_j ≤ cos(θ_y + m)
        z_j = s·cos θ_j·(t + cos θ_j)    otherwise: class j is hard for this sample

    t is the running average of cos θ_y over the batches: about 0 at the start, when hard classes count less, and near 1
    at the end, when they count more. It is a buffer (`progress`) that changes in training mode only; all
    processes use the average of their batches together and must call the loss. Beyond θ_y + m = π the cosine is
    continued as in `ArcFaceLoss`. Labels must be class indices: which classes are hard depends on the label.

    Args:
        m: Margin in radians, at least 0 and less than π. Published: 0.5.
        s: Scale > 0, or "auto" (the same as None) as in `ArcFaceLoss`. Published: 64.
        momentum: Weight of a batch in t, greater than 0 and at most 1. Published: 0.01.
        **cross_entropy: class_weight, ignore_index, label_smoothing and reduction as in `AngularLoss`.
    """

    progress: Tensor

    def __init__(
        self,
        m: float = 0.5,
        s: float | Literal["auto"] | None = "auto",
        momentum: float = 0.01,
        **cross_entropy: Unpack[CrossEntropyOptions],
    ) -> None:
        super().__init__(m, s, "full", **cross_entropy)
        if not 0 <= self.m < math.pi:
            raise InvalidArgument("m", f"must be at least 0 and less than π, got {m!r}.")
        self.momentum = require_number("momentum", momentum)
        if not 0 < self.momentum <= 1:
            raise InvalidArgument("momentum", f"must be greater than 0 and at most 1, got {momentum!r}.")
        self._running("progress")

    def reset_parameters(self) -> None:
        """Set t to 0."""
        self.progress.zero_()

    def with_margin(self, logits: AngularLogits, batch: AnyBatch, labels: Tensor) -> AngularLogits:
        """Return logits with the margins of a batch; in training mode t changes first."""
        if torch.is_floating_point(labels):
            raise InvalidArgumentType(
                "labels", f"must be class indices (int64) for CurricularFaceLoss, got {labels.dtype}."
            )
        label_cosine = batch.label_cosine(labels).clamp(-1, 1)
        if self.training:
            count, total = batch.total(torch.stack([torch.ones_like(label_cosine), label_cosine]), labels)
            self._update("progress", total / count, self.momentum, count)
        progress = self.progress.to(label_cosine.dtype).clone()  # backward of a sharded head reads it again
        threshold = additive_angle(label_cosine, self.m).unsqueeze(1)

        def target(cosine: Tensor, feature_norm: Tensor) -> Tensor:
            return additive_angle(cosine, self.m)

        def others(cosine: Tensor, feature_norm: Tensor) -> Tensor:
            similarity = self.similarity(cosine)
            return torch.where(similarity > threshold, similarity * (progress + similarity), similarity)

        return logits._replace(target=target, others=others)

    def extra_repr(self) -> str:
        """Return the options."""
        return f"{super().extra_repr()}, momentum={self.momentum:g}"
