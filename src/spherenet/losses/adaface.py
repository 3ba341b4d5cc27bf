"""AdaFace: a margin that depends on the quality of the sample, read off the norm of its feature."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from spherenet._util.validation import require_number, require_positive
from spherenet.errors import InvalidArgument
from spherenet.losses.adaptive import AdaptiveLoss
from spherenet.losses.batch import AnyBatch
from spherenet.ops.angular import AngularLogits, additive_angle

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from spherenet.losses.arguments import CrossEntropyOptions

__all__ = ["AdaFaceLoss"]

SMALLEST_NORM, LARGEST_NORM = 1e-3, 100.0
"""Range to which norms are limited, as in the released code."""

INITIAL_MEAN, INITIAL_STD = 20.0, 100.0
"""Statistics of the norms before the first batch, as in the released code."""


class AdaFaceLoss(AdaptiveLoss):
    """AdaFace (Eq. 21; Kim et al., CVPR 2022): an angular margin for poor samples, an additive one for good ones.

        q = clip(h·(‖x‖ − μ)/σ, −1, 1)          quality of the sample, without a gradient
        z_y = s·(cos(θ_y − m·q) − m·(1 + q)),   z_j = s·cos θ_j

    q = −1 is ArcFace with the margin m, q = 0 is CosFace, q = 1 is ArcFace with −m and CosFace with 2m. μ and σ are
    running averages of the mean and the standard deviation of ‖x‖ over the batches, with ‖x‖ limited to
    [0.001, 100]. They are buffers (`norm_mean`, `norm_std`) that change in training mode only; all processes use the
    statistics of their batches together and must call the loss. θ_y − m·q < 0 counts as 0; beyond π the cosine is
    continued as in `ArcFaceLoss`.

    Args:
        m: Margin, at least 0 and less than 1. Published: 0.4.
        s: Scale > 0, or "auto" (the same as None) as in `ArcFaceLoss`. Published: 64.
        h: Concentration of the quality, > 0. Published: 0.333.
        momentum: Weight of a batch in μ and σ, greater than 0 and at most 1. Published: 0.01.
        **cross_entropy: class_weight, ignore_index, label_smoothing and reduction as in `AngularLoss`.
    """

    norm_mean: Tensor
    norm_std: Tensor

    def __init__(
        self,
        m: float = 0.4,
        s: float | Literal["auto"] | None = "auto",
        h: float = 0.333,
        momentum: float = 0.01,
        **cross_entropy: Unpack[CrossEntropyOptions],
    ) -> None:
        super().__init__(m, s, "full", **cross_entropy)
        if not 0 <= self.m < 1:
            raise InvalidArgument("m", f"must be at least 0 and less than 1, got {m!r}.")
        self.h = require_positive("h", h)
        self.momentum = require_number("momentum", momentum)
        if not 0 < self.momentum <= 1:
            raise InvalidArgument("momentum", f"must be greater than 0 and at most 1, got {momentum!r}.")
        self._running("norm_mean")
        self._running("norm_std")
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the statistics of the norms to their initial values."""
        self.norm_mean.fill_(INITIAL_MEAN)
        self.norm_std.fill_(INITIAL_STD)

    def with_margin(self, logits: AngularLogits, batch: AnyBatch, labels: Tensor) -> AngularLogits:
        """Return logits with the margins of a batch; in training mode the statistics of the norms change first."""
        norm = batch.feature_norm.detach().clamp(SMALLEST_NORM, LARGEST_NORM)
        if self.training:
            count, total = batch.total(torch.stack([torch.ones_like(norm), norm]), labels)
            mean = total / count
            variance = batch.total((norm - mean).square(), labels) / (count - 1).clamp_min(1)
            self._update("norm_mean", mean, self.momentum, count)
            self._update("norm_std", variance.sqrt(), self.momentum, count - 1)
        mean, std = self.norm_mean.to(norm.dtype), self.norm_std.to(norm.dtype)
        quality = (self.h * (norm - mean) / (std + 1e-3)).clamp(-1, 1).unsqueeze(1)

        def target(cosine: Tensor, feature_norm: Tensor) -> Tensor:
            return additive_angle(cosine, -self.m * quality) - self.m * (1 + quality)

        return logits._replace(target=target)

    def extra_repr(self) -> str:
        """Return the options."""
        return f"{super().extra_repr()}, h={self.h:g}, momentum={self.momentum:g}"
