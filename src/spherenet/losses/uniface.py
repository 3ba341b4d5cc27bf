"""UniFace: one threshold that separates all positive similarities from all negative ones."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spherenet._util.validation import require_number, require_positive
from spherenet.errors import InvalidArgument
from spherenet.losses.base import AngularLoss
from spherenet.losses.batch import AnyBatch
from spherenet.ops.angular import AngularLogits, AngularOutput

__all__ = ["UniFaceLoss"]


class UniFaceLoss(AngularLoss):
    """UniFace (Eq. 26; Zhou et al., ICCV 2023): unified cross entropy with a margin, no softmax.

        L = log(1 + e^{b − s·(cos θ_y − m)}) + λ·Σ_{j≠y} log(1 + e^{s·cos θ_j − b})

    The threshold b is the same for all classes and samples: a face matches if s·cos θ > b, as verification needs it. It
    is trained, and the only parameter that a loss owns: b = log(10·C) + `shift`, where log(10·C) is the published start
    for C classes. Give `loss.parameters()` to the optimizer; a model of `create_model` contains them.

    Scores are s·cos θ_j − b; their sigmoid is the probability of a match. If labels are probabilities q, class j
    contributes q_j of the positive term and 1 − q_j of the negative one at the margin q_j·m. To use a random part of
    the negative classes, shard the head with a `sample_rate` (`shard_head`).

    Args:
        m: Margin, at least 0 and less than 2. Published: 0.4.
        s: Scale > 0. Published: 64.
        negative_weight: Weight λ of the negative terms, > 0. Published: 1, and 0.7 for the balanced loss.
        ignore_index: Label of rows that do not count.
        reduction: "mean", "sum" or "none".
    """

    def __init__(
        self,
        m: float = 0.4,
        s: float = 64.0,
        negative_weight: float = 1.0,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__(
            operator="cosine", scale=require_positive("s", s), ignore_index=ignore_index, reduction=reduction
        )
        if not 0 <= require_number("m", m) < 2:
            raise InvalidArgument("m", f"must be at least 0 and less than 2, got {m!r}.")
        self.m = float(m)
        self.negative_weight = require_positive("negative_weight", negative_weight)
        self.shift = nn.Parameter(torch.zeros(()))

    @property
    def s(self) -> float:
        """The scale."""
        return cast("float", self.scale)

    def reset_parameters(self) -> None:
        """Set the threshold to its start."""
        nn.init.zeros_(self.shift)

    def threshold(self, num_classes: int) -> Tensor:
        """Return the threshold b for a number of classes."""
        return math.log(10 * num_classes) + self.shift

    def class_logits(self, num_classes: int) -> AngularLogits:
        """Return s·cos θ − b, without a margin."""
        return super().class_logits(num_classes)._replace(offset=-self.threshold(num_classes))

    def value(self, batch: AnyBatch, labels: Tensor, return_scores: bool) -> tuple[Tensor, Tensor | None]:
        """Return the reduced loss of a batch, and its scores if requested."""
        num_classes = batch.num_classes

        def terms(angles: AngularOutput, positive: Tensor) -> Tensor:
            logits = self.s * (self.similarity(angles.cosine) - self.m * positive)
            logits = logits - self.threshold(num_classes).to(logits.dtype)
            logits = logits if angles.bias is None else logits + angles.bias
            return positive * F.softplus(-logits) + self.negative_weight * (1 - positive) * F.softplus(logits)

        return batch.sum_over_classes(terms, self.class_logits(num_classes), labels, return_scores)

    def extra_repr(self) -> str:
        """Return the options."""
        formula = f"m={self.m:g}, s={self.s:g}, negative_weight={self.negative_weight:g}"
        return ", ".join(filter(None, (formula, super().extra_repr())))
