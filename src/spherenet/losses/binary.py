"""Losses that decide each class by itself, without a softmax: SphereFace2 and UniFace."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spherenet._util.validation import require_number, require_positive
from spherenet.angles import AngleFunction
from spherenet.errors import InvalidArgument
from spherenet.losses.base import AngularLoss
from spherenet.losses.batch import AnyBatch
from spherenet.ops.angular import AngularLogits, AngularOutput

__all__ = ["SphereFace2Loss", "UniFaceLoss"]


class _PowerAngle(AngleFunction):
    """g(θ) = 2·((1 + cos θ)/2)^t − 1, which spreads the similarities of SphereFace2."""

    name = "power"

    def __init__(self, t: float) -> None:
        super().__init__()
        self.t = t

    def forward(self, cosine: Tensor) -> Tensor:
        return 2 * ((cosine.clamp(-1, 1) + 1) / 2).pow(self.t) - 1

    def extra_repr(self) -> str:
        return f"t={self.t:g}"


class SphereFace2Loss(AngularLoss):
    """SphereFace2 (Eq. 18; Wen et al., ICLR 2022): one binary classification per class, no softmax.

        L = λ/s·log(1 + e^{−z_y}) + (1 − λ)/s·Σ_{j≠y} log(1 + e^{z_j})
        z_y = s·(g(θ_y) − m) + b,   z_j = s·(g(θ_j) + m) + b,   g(θ) = 2·((1 + cos θ)/2)^t − 1

    The bias b is `initial_bias`, the published start value, at which positive and negative gradients balance at
    θ = 90°. In the paper b is then trained. A loss owns no parameters, so give the head a bias
    (`AngularHead(..., bias=True)`) to train it: b = initial_bias + b_j with one b_j per class, which starts at 0.

    Scores are s·g(θ_j) + b without a margin; their sigmoid is the probability of each class. If labels are
    probabilities q, class j contributes q_j of the positive term and 1 − q_j of the negative one at the margin
    (1 − 2q_j)·m.

    Args:
        m: Margin, at least 0 and less than 2. Published: 0.4.
        s: Scale > 0, r in the paper. Published: 30 and 40.
        t: Exponent of the similarity adjustment, at least 1. Published: 3.
        positive_weight: Weight λ of the positive term, greater than 0 and less than 1. Published: 0.7.
        margin_gradient: "detached" for the value of the formula and the gradient of g = cos θ, as the code released by
            the authors, or "full" for the gradient of the formula (Eq. 16).
        ignore_index: Label of rows that do not count.
        reduction: "mean", "sum" or "none".

    Raises:
        TypeError: If an option is unknown or of the wrong type.
        ValueError: If an option is out of range.
    """

    angle: AngleFunction

    def __init__(
        self,
        m: float = 0.4,
        s: float = 40.0,
        t: float = 3.0,
        positive_weight: float = 0.7,
        *,
        margin_gradient: str = "detached",
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None:
        if require_number("t", t) < 1:
            raise InvalidArgument("t", f"must be at least 1, got {t!r}.")
        super().__init__(
            operator=_PowerAngle(float(t)),
            scale=require_positive("s", s),
            margin_gradient=margin_gradient,
            ignore_index=ignore_index,
            reduction=reduction,
        )
        if not 0 <= require_number("m", m) < 2:
            raise InvalidArgument("m", f"must be at least 0 and less than 2, got {m!r}.")
        if not 0 < require_number("positive_weight", positive_weight) < 1:
            raise InvalidArgument(
                "positive_weight", f"must be greater than 0 and less than 1, got {positive_weight!r}."
            )
        self.m, self.t, self.positive_weight = float(m), float(t), float(positive_weight)

    @property
    def s(self) -> float:
        """The scale."""
        return cast("float", self.scale)

    @s.setter
    def s(self, s: float) -> None:
        self.scale = require_positive("s", s)

    def initial_bias(self, num_classes: int) -> float:
        """Return the b at which the gradients of positive and negative terms balance if all angles are 90°.

        Args:
            num_classes: Number of classes C.
        """
        ratio = self.positive_weight / ((1 - self.positive_weight) * (num_classes - 1))
        middle = 2 * math.pow(0.5, self.t) - 1
        negative = self.s * (middle + self.m)
        # The positive root u = e^b of e^{positive}·u² + (1 − ratio)·u − ratio·e^{−negative} = 0, without cancellation.
        root = math.hypot(1 - ratio, 2 * math.sqrt(ratio) * math.exp(-self.s * self.m))
        if ratio <= 1:
            return math.log(2 * ratio / (1 - ratio + root)) - negative
        positive = self.s * (middle - self.m)
        return math.log((root + ratio - 1) / 2) - positive

    def class_logits(self, num_classes: int) -> AngularLogits:
        """Return s·g(θ) + b, without a margin."""
        return super().class_logits(num_classes)._replace(offset=self.initial_bias(num_classes))

    def value(self, batch: AnyBatch, labels: Tensor, return_scores: bool) -> tuple[Tensor, Tensor | None]:
        """Return the reduced loss of a batch, and its scores if requested."""
        initial_bias = self.initial_bias(batch.num_classes)

        def terms(angles: AngularOutput, positive: Tensor) -> Tensor:
            cosine, bias = angles.cosine, angles.bias
            similarity = self.similarity(cosine)
            if self.margin_gradient == "detached":
                similarity = cosine + (similarity - cosine).detach()
            logits = self.s * (similarity + self.m * (1 - 2 * positive))
            logits = logits + (initial_bias if bias is None else initial_bias + bias)
            losses = self.positive_weight * positive * F.softplus(-logits)
            losses = losses + (1 - self.positive_weight) * (1 - positive) * F.softplus(logits)
            return losses / self.s

        return batch.sum_over_classes(terms, self.class_logits(batch.num_classes), labels, return_scores)

    def extra_repr(self) -> str:
        """Return the options of the formula and those that differ from their defaults."""
        formula = f"m={self.m:g}, s={self.s:g}, t={self.t:g}, positive_weight={self.positive_weight:g}"
        return ", ".join(filter(None, (formula, f"margin_gradient={self.margin_gradient!r}", super().extra_repr())))


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
