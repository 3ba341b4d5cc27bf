"""Base class of the angular losses: logits from the output of a head, a margin, cross entropy.

A loss chooses the angle function g, two scales and a margin (`ops.angular.AngularLogits`); `losses/batch.py` computes
the cross entropy.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from spherenet._util.validation import OptionCheck, require_number, require_one_of
from spherenet.angles import AngleFunction
from spherenet.errors import InvalidArgument, InvalidArgumentType
from spherenet.kernels.classes.sharded import ShardedOutput
from spherenet.kernels.dispatch import without_modes
from spherenet.losses.arguments import (
    SIMILAR_OPTIONS,
    Scale,
    angle_of_loss,
    checked_class_weight,
    checked_scale,
    default_scale,
    named_scale,
    options_of,
)
from spherenet.losses.batch import AnyBatch, batch_of
from spherenet.ops.angular import AngularLogits, AngularOutput

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["AngularLoss", "NamedScale"]

MARGIN_GRADIENTS = ("full", "detached")


class AngularLoss(OptionCheck, nn.Module):
    """Cross entropy on the logits of an `AngularOutput`, base class of all losses.

    A subclass chooses the angle function and the scale, and may override `target_similarity`, which puts a margin on
    the label's class. If it overrides `forward`, it must accept `return_scores`, which `Classifier` passes. A loss owns
    no class weights: they belong to the `AngularHead`. Its value depends on its arguments and options only, not on
    earlier calls, except for losses with running averages.

    Logits and loss are computed in float32 or float64. If a head has very many classes, class indices are processed in
    blocks that never store all logits (`kernels/classes/blockwise.py`), with the same result.

    Args:
        operator: Angle function g, a name or an object, or None for the cosine itself, without clamping.
        scale: "norm" for ‖x‖, a fixed number > 0, or "auto" for `default_scale` of the number of classes.
        margin_gradient: "full" to differentiate the margin; "detached" for the value with the margin and the gradient
            without it (Eq. 16).
        class_weight: Weight of each class, shape [C], as in `torch.nn.functional.cross_entropy`.
        ignore_index: Label of rows that do not count.
        label_smoothing: Smoothing of the cross entropy, from 0 to 1. The margin applies to the label's class only.
        reduction: "mean", "sum" or "none".
        angle: Another name of `operator`.

    Raises:
        TypeError: If an option is unknown or of the wrong type.
        ValueError: If an option is out of range.
    """

    class_weight: Tensor | None
    angle: AngleFunction | None

    uses_weight_norm: ClassVar[bool] = False
    """Whether the loss depends on the norms of the class weights; only plain softmax does."""

    directions: int = 1
    """Number of directions per class that the head of a new model has."""

    _scale_argument: ClassVar[str] = "scale"
    """Name of the scale in error messages."""

    option_synonyms = SIMILAR_OPTIONS
    subclasses_pass_options_on = True

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Reject unknown options, and an operator with two names."""
        loss = super().__new__(cls, *arguments, **options)
        has_operator = "operator" in options or (arguments and options_of(cls)[0] == "operator")
        if has_operator and options.get("angle") is not None:
            raise InvalidArgumentType("angle", f"must be left out if operator is given, got {options['angle']!r}.")
        return loss

    def __init__(
        self,
        *,
        operator: str | AngleFunction | None = None,
        scale: Scale = "norm",
        margin_gradient: str = "full",
        class_weight: Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        angle: str | AngleFunction | None = None,
    ) -> None:
        super().__init__()
        operator = operator if angle is None else angle
        self.angle = None if operator is None else angle_of_loss(operator, None)
        self.scale = checked_scale(scale)
        self._similarity_at_45 = self._measure_similarity_at_45() if self.scale == "auto" else math.nan
        self.margin_gradient = require_one_of("margin_gradient", margin_gradient, MARGIN_GRADIENTS)
        # Not persistent: it is a setting that the constructor receives again.
        self.register_buffer("class_weight", checked_class_weight(class_weight), persistent=False)
        if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
            raise InvalidArgumentType("ignore_index", f"must be an integer, got {ignore_index!r}.")
        self.ignore_index = ignore_index
        self.label_smoothing = require_number("label_smoothing", label_smoothing)
        if not 0 <= self.label_smoothing <= 1:
            raise InvalidArgument("label_smoothing", f"must be from 0 to 1, got {label_smoothing!r}.")
        self.reduction = require_one_of("reduction", reduction, ("mean", "sum", "none"))

    def forward(
        self, output: AngularOutput | ShardedOutput, labels: Tensor, *, return_scores: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the loss of a batch.

        For a sharded head (`shard_head`) it is the loss of the batches of all processes together, the same in each of
        them, and the scores are replaced by the predicted classes [*] of this process's rows.

        If labels are probabilities q, margins apply in proportion to the probability of each class (Eq. 9):
        z_j = scale·class_scale_j·(q_j·t(θ_j) + (1 − q_j)·o(θ_j)) + b_j, with t = g or o = g if there is no margin.

        Args:
            output: Output of the head.
            labels: Class indices [*], or floating point probabilities [*, C].
            return_scores: Return (loss, scores) with the scores of `logits`. They are a by-product of the loss, except
                when it is computed in blocks of classes.

        Returns:
            A scalar, or [*] if reduction is "none".
        """
        batch = batch_of(self, output)
        labels = batch.labels(labels)
        loss, scores = batch.loss.value(batch, labels, return_scores)
        if (penalty := self.row_penalty(batch.feature_norm, batch.num_classes)) is not None:
            loss = loss + batch.reduce(penalty, labels)
        return loss if scores is None else (loss, scores)

    def logits(self, output: AngularOutput | ShardedOutput) -> Tensor:
        """Return the scores of an output without labels, and therefore without a margin.

        For a sharded head they are a DTensor of the rows of all processes, sharded by class.

        Shape:
            cosines [*, C] → [*, C].
        """
        batch = batch_of(self, output)
        return batch.scores(self.class_logits(batch.num_classes))

    def value(self, batch: AnyBatch, labels: Tensor, return_scores: bool) -> tuple[Tensor, Tensor | None]:
        """Return the reduced cross entropy of a batch, and its scores if requested."""
        logits = self.with_margin(self.class_logits(batch.num_classes), batch, labels)
        return batch.cross_entropy(logits, labels, return_scores)

    def class_logits(self, num_classes: int) -> AngularLogits:
        """Return the logits without a margin."""
        return AngularLogits(self.angle, self.scale_for(num_classes), self.uses_weight_norm)

    def with_margin(self, logits: AngularLogits, batch: AnyBatch, labels: Tensor) -> AngularLogits:
        """Return logits with the margin of this loss, which may depend on the batch.

        With `margin_gradient` "detached", the gradient is that of g (Eq. 16).
        """
        if self.margin_on == "none":
            return logits
        similarity = self.target_similarity if self.margin_on == "target" else self.other_similarity

        def with_margin(cosine: Tensor, feature_norm: Tensor) -> Tensor:
            value = similarity(cosine)
            if self.margin_gradient == "full":
                return value
            plain = self.similarity(cosine)
            return plain + (value - plain).detach()

        if self.margin_on == "target":
            return logits._replace(target=with_margin)
        return logits._replace(others=with_margin)

    @property
    def margin_on(self) -> Literal["none", "target", "others"]:
        """Classes whose logits have a margin: none, the label's class, or all other classes."""
        return "none" if type(self).target_similarity is AngularLoss.target_similarity else "target"

    def similarity(self, cosine: Tensor) -> Tensor:
        """Return g(θ) from cos θ."""
        return cosine if self.angle is None else self.angle(cosine)

    def target_similarity(self, cosine: Tensor) -> Tensor:
        """Return t(θ), the similarity of the label's class with its margin, from cos θ."""
        return self.similarity(cosine)

    def other_similarity(self, cosine: Tensor) -> Tensor:
        """Return o(θ), the similarity of the other classes with their margin, from cos θ."""
        return self.similarity(cosine)

    def scale_for(self, num_classes: int) -> float | None:
        """Return the fixed scale that is used for a number of classes, or None if ‖x‖ scales the logits."""
        if self.scale == "auto":
            return default_scale(num_classes, self._similarity_at_45)
        return None if self.scale == "norm" else self.scale

    def row_penalty(self, feature_norm: Tensor, num_classes: int) -> Tensor | None:
        """Return a penalty of each row [N] that is added to its loss; None if there is none."""
        return None

    def extra_repr(self) -> str:
        """Return the options that differ from their defaults."""
        parts = [] if self.class_weight is None else [f"class_weight=[{len(self.class_weight)}]"]
        defaults = {"ignore_index": -100, "label_smoothing": 0.0, "reduction": "mean"}
        parts += [f"{name}={getattr(self, name)!r}" for name, value in defaults.items() if getattr(self, name) != value]
        return ", ".join(parts)

    def _measure_similarity_at_45(self) -> float:
        """Return g(π/4) as a number, the mean over classes if they differ."""
        k = None if self.angle is None else self.angle.k
        device = k.device if isinstance(k, Tensor) else torch.device("cpu")
        with torch.no_grad(), without_modes():
            cosine = torch.full((1,), math.sqrt(0.5), dtype=torch.float64, device=device)
            value = float(self.similarity(cosine).mean().item())
        if not value > 0:
            raise InvalidArgument(
                self._scale_argument,
                f"must be given for an angle function that is not positive at 45°, got {value!r} there.",
            )
        return value


class NamedScale(AngularLoss):
    """A loss whose scale is an argument s. Assigning s has the same effect as constructing the loss with it."""

    _scale_argument = "s"

    @property
    def s(self) -> float | Literal["auto"]:
        """The scale, or "auto" for one that fits the number of classes."""
        return cast("float | Literal['auto']", self.scale)

    @s.setter
    def s(self, s: float | Literal["auto"] | None) -> None:
        self.scale = named_scale(s)
        if self.scale == "auto":
            self._similarity_at_45 = self._measure_similarity_at_45()
