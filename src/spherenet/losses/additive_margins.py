"""Losses with additive margins: CosFace, ArcFace and SphereFace2."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from spherenet._util.validation import require_number, require_positive
from spherenet.angles import AngleFunction, CosineAngle
from spherenet.kernels.classes.sharded import ShardedOutput
from spherenet.losses.arguments import checked_labels
from spherenet.losses.base import AngularLoss, NamedScale
from spherenet.ops.angular import AngularOutput, Columns, additive_angle, additive_cosine

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from spherenet.losses.arguments import CrossEntropyOptions

__all__ = ["ArcFaceLoss", "CosFaceLoss", "SphereFace2Loss"]

MANY_CLASSES, SCALE_OF_MANY_CLASSES = 1_000, 64.0
"""Number of classes from which CosFace and ArcFace use the published scale."""


class _FaceLoss(NamedScale):
    """S-Softmax with g = cosine and an additive margin on the target class."""

    def __init__(
        self, m: float, s: float | None, margin_gradient: str, **cross_entropy: Unpack[CrossEntropyOptions]
    ) -> None:
        scale = None if s is None else require_positive("s", s)
        super().__init__(angle=CosineAngle(), scale=scale, margin_gradient=margin_gradient, **cross_entropy)
        self.m = require_number("m", m)

    def scale_for(self, num_classes: int) -> float | None:
        """Return s; if it is None, 64 from 1,000 classes on, and `default_scale` for fewer."""
        if self.s is None and num_classes >= MANY_CLASSES:
            return SCALE_OF_MANY_CLASSES
        return super().scale_for(num_classes)

    def extra_repr(self) -> str:
        """Return the margin, the scale and the options that differ from their defaults."""
        return ", ".join(filter(None, (f"m={self.m:g}, s={self.s}", super().extra_repr())))


class CosFaceLoss(_FaceLoss):
    """Large-margin cosine loss: z_j = s·cos θ_j + b_j, and s·(cos θ_y − m) + b_y for the target class y.

    The margin is constant, so that its gradient is that of m = 0.

    Args:
        m: Margin, at least 0 (S-Softmax) and less than 2, the range of the cosine. The published value is 0.35.
        s: Scale > 0, or None for the published 64 from 1,000 classes on and `default_scale` for fewer classes, for
            which 64 is too large.
        **cross_entropy: class_weight, ignore_index, label_smoothing and reduction as in `AngularLoss`.
    """

    def __init__(self, m: float = 0.35, s: float | None = None, **cross_entropy: Unpack[CrossEntropyOptions]) -> None:
        super().__init__(m, s, "full", **cross_entropy)
        if not 0 <= self.m < 2:
            raise ValueError(f"m must be at least 0 and less than 2, got {m!r}.")

    def target_similarity(self, cosine: Tensor) -> Tensor:
        """Return cos θ − m."""
        return additive_cosine(cosine, self.m)


class ArcFaceLoss(_FaceLoss):
    """Additive angular margin loss: z_j = s·cos θ_j + b_j, and s·cos(θ_y + m) + b_y for the target class y.

    If θ_y + m > π, cos(θ_y + m) would increase again. There the target's logit is s·(−2 − cos(θ_y + m)), which
    continues value and slope and keeps decreasing, like ψ in Eq. 6. (The published code uses cos θ_y − m·sin m there,
    which is discontinuous.)

    Args:
        m: Margin in radians, at least 0 (S-Softmax) and less than π. The published value is 0.5.
        s: Scale > 0, or None for the published 64 from 1,000 classes on and `default_scale` for fewer classes, for
            which 64 is too large.
        margin_gradient: "full" as published, or "detached" for the gradient of m = 0 (Eq. 16).
        **cross_entropy: class_weight, ignore_index, label_smoothing and reduction as in `AngularLoss`.
    """

    def __init__(
        self,
        m: float = 0.5,
        s: float | None = None,
        *,
        margin_gradient: str = "full",
        **cross_entropy: Unpack[CrossEntropyOptions],
    ) -> None:
        super().__init__(m, s, margin_gradient, **cross_entropy)
        if not 0 <= self.m < math.pi:
            raise ValueError(f"m must be at least 0 and less than π, got {m!r}.")

    def target_similarity(self, cosine: Tensor) -> Tensor:
        """Return cos(θ + m), continued beyond π."""
        return additive_angle(cosine, self.m)


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
            raise ValueError(f"t must be at least 1, got {t!r}.")
        super().__init__(
            angle=_PowerAngle(float(t)),
            scale=require_positive("s", s),
            margin_gradient=margin_gradient,
            ignore_index=ignore_index,
            reduction=reduction,
        )
        if not 0 <= require_number("m", m) < 2:
            raise ValueError(f"m must be at least 0 and less than 2, got {m!r}.")
        if not 0 < require_number("positive_weight", positive_weight) < 1:
            raise ValueError(f"positive_weight must be greater than 0 and less than 1, got {positive_weight!r}.")
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

    def logits(self, output: AngularOutput | ShardedOutput) -> Tensor:
        """Return s·g(θ) + b without a margin; see `AngularLoss.logits`."""
        return super().logits(output) + self.initial_bias(
            output.shard.num_classes if isinstance(output, ShardedOutput) else output.cosine.shape[-1]
        )

    uses_softmax = False

    def forward(
        self, output: AngularOutput | ShardedOutput, labels: Tensor, *, return_scores: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the loss of a batch; see `AngularLoss.forward`."""
        if isinstance(output, ShardedOutput):
            return super().forward(output, labels, return_scores=return_scores)
        cosine, _, _, bias = self._terms(output)
        labels = checked_labels(labels, output.cosine.shape, cosine.device, self.ignore_index)
        if torch.is_floating_point(labels):
            positive, ignored = labels.to(cosine.dtype).reshape(cosine.shape), None
        else:
            ignored = (labels == self.ignore_index).reshape(-1)
            columns = labels.reshape(-1, 1).masked_fill(ignored.unsqueeze(1), 0)
            positive = torch.zeros_like(cosine).scatter(1, columns, 1.0)
        losses = self._class_losses(cosine, bias, positive, cosine.shape[1])[0].sum(1) / self.s
        count: Tensor | int = len(losses)
        if ignored is not None:
            losses, count = losses.masked_fill(ignored, 0), (~ignored).sum()
        if self.reduction == "none":
            loss = losses.reshape(output.cosine.shape[:-1])
        else:
            loss = losses.sum() if self.reduction == "sum" else losses.sum() / count
        return (loss, self.logits(output)) if return_scores else loss

    def class_values(self, angles: AngularOutput, columns: Columns, all_classes: int) -> tuple[Tensor, Tensor]:
        """Return the terms of the loss and the scores for some of the classes of a sharded head."""
        cosine, _, _, bias = self._terms(angles, all_classes)
        positive = torch.zeros_like(cosine)
        if columns.owned is not None:
            positive = positive.scatter(1, columns.column, columns.owned.to(cosine.dtype))
        losses, scores = self._class_losses(cosine, bias, positive, all_classes)
        return losses / self.s, scores

    def _class_losses(
        self, cosine: Tensor, bias: Tensor | None, positive: Tensor, num_classes: int
    ) -> tuple[Tensor, Tensor]:
        """Return s times the term of each class [N, C], and the scores, for probabilities of the labels [N, C]."""
        similarity = self.similarity(cosine)
        if self.margin_gradient == "detached":
            similarity = cosine + (similarity - cosine).detach()
        offset: Tensor | float = self.initial_bias(num_classes)
        offset = offset if bias is None else offset + bias
        logits = self.s * (similarity + self.m * (1 - 2 * positive)) + offset
        losses = self.positive_weight * positive * F.softplus(-logits)
        losses = losses + (1 - self.positive_weight) * (1 - positive) * F.softplus(logits)
        return losses, self.s * similarity + offset

    def extra_repr(self) -> str:
        """Return the options of the formula and those that differ from their defaults."""
        formula = f"m={self.m:g}, s={self.s:g}, t={self.t:g}, positive_weight={self.positive_weight:g}"
        return ", ".join(filter(None, (formula, f"margin_gradient={self.margin_gradient!r}", super().extra_repr())))
