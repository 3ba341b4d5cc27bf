"""Base class of the angular losses: logits from an `AngularOutput`, a margin, cross entropy.

A loss consists of an angle function g, a margin and two scales:

    z_ij = scale_i · class_scale_j · g(θ_ij) + b_j    without a margin, for every class j
    z_iy = scale_i · class_scale_y · t(θ_iy) + b_y    with a margin on the label y
    z_ij = scale_i · class_scale_j · o(θ_ij) + b_j    with a margin on the other classes j ≠ y

b is the bias of the head, which has none by default.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spherenet._util.validation import (
    require_floating,
    require_number,
    require_one_of,
    require_positive,
    show_constructor,
)
from spherenet.angles import AngleFunction
from spherenet.kernels.classes.blockwise import angular_cross_entropy, has_kernel, with_label_column
from spherenet.kernels.classes.sharded import ShardedOutput
from spherenet.kernels.dispatch import blockwise
from spherenet.losses.arguments import (
    Scale,
    checked_class_weight,
    checked_labels,
    checked_scale,
    options_of,
    reject_unknown,
)
from spherenet.losses.scales import default_scale
from spherenet.losses.sharded import distributed_logits, loss_on_shards
from spherenet.ops.angular import AngularOutput, Columns, angular_logits, logit_at, with_target
from spherenet.ops.norms import working_dtype

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["AngularLoss", "NamedScale"]

MARGIN_GRADIENTS = ("full", "detached")

_Terms: TypeAlias = tuple[Tensor, Tensor | float, Tensor | None, Tensor | None]
"""Cosines [N, C], scale of each row [N] or a number, scale of each class [C], bias [C]."""


class AngularLoss(nn.Module):
    """Cross entropy on the logits of an `AngularOutput`, base class of all losses.

    A subclass chooses the angle function and the scale, and may override `target_similarity`, which puts a margin on
    the label's class. If it overrides `forward`, it must accept `return_scores`, which `Classifier` passes. A loss owns
    no class weights: they belong to the `AngularHead`. Its value depends on its arguments and options only, not on
    earlier calls.

    Logits and loss are computed in float32 or float64. If a head has very many classes, class indices are processed in
    blocks that never store all logits (`kernels/classes/blockwise.py`), with the same result.

    Args:
        angle: Angle function g, or None for the cosine itself, without clamping.
        scale: "norm" for ‖x‖, a fixed number > 0, or None for `default_scale` of the number of classes.
        margin_gradient: "full" to differentiate the margin; "detached" for the value with the margin and the gradient
            without it (Eq. 16).
        class_weight: Weight of each class, shape [C], as in `torch.nn.functional.cross_entropy`.
        ignore_index: Label of rows that do not count.
        label_smoothing: Smoothing of the cross entropy, from 0 to 1. The margin applies to the label's class only.
        reduction: "mean", "sum" or "none".

    Raises:
        TypeError: If an option is unknown or of the wrong type.
        ValueError: If an option is out of range.
    """

    class_weight: Tensor | None
    angle: AngleFunction | None

    uses_weight_norm: ClassVar[bool] = False
    """Whether the loss depends on the norms of the class weights; only plain softmax does."""

    _scale_argument: ClassVar[str] = "scale"
    """Name of the scale in error messages."""

    _may_have_margin: ClassVar[bool] = False

    uses_softmax: ClassVar[bool] = True
    """Whether the loss is a cross entropy of a softmax; otherwise it is a sum over classes."""

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Reject unknown options here, because only this method knows the class that the user called."""
        reject_unknown(cls.__name__, options, options_of(cls))
        return super().__new__(cls)

    def __init__(
        self,
        *,
        angle: AngleFunction | None = None,
        scale: Scale = "norm",
        margin_gradient: str = "full",
        class_weight: Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        self.angle = angle
        self.scale = checked_scale(scale)
        self._similarity_at_45 = self._measure_similarity_at_45() if scale is None else math.nan
        self.margin_gradient = require_one_of("margin_gradient", margin_gradient, MARGIN_GRADIENTS)
        # Not persistent: it is a setting that the constructor receives again.
        self.register_buffer("class_weight", checked_class_weight(class_weight), persistent=False)
        if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
            raise TypeError(f"ignore_index must be an integer, got {ignore_index!r}.")
        self.ignore_index = ignore_index
        self.label_smoothing = require_number("label_smoothing", label_smoothing)
        if not 0 <= self.label_smoothing <= 1:
            raise ValueError(f"label_smoothing must be from 0 to 1, got {label_smoothing!r}.")
        self.reduction = require_one_of("reduction", reduction, ("mean", "sum", "none"))

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        show_constructor(cls)
        cls._may_have_margin = cls.target_similarity is not AngularLoss.target_similarity

    @property
    def margin_on(self) -> Literal["none", "target", "others"]:
        """Classes whose logits have a margin: none, the label's class, or all other classes."""
        return "target" if self._may_have_margin else "none"

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
        if self.scale is None:
            return default_scale(num_classes, self._similarity_at_45)
        return None if self.scale == "norm" else self.scale

    def logits(self, output: AngularOutput | ShardedOutput) -> Tensor:
        """Return the scores of an output without labels, and therefore without a margin.

        For a sharded head they are a DTensor of the rows of all processes, sharded by class.

        Shape:
            cosines [*, C] → [*, C].
        """
        if isinstance(output, ShardedOutput):
            return distributed_logits(self, output)
        return angular_logits(*self._terms(output), self.angle).reshape(output.cosine.shape)

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
        if isinstance(output, ShardedOutput):
            return loss_on_shards(self, output, labels, return_scores)
        terms = self._terms(output)
        cosine = terms[0]
        labels = checked_labels(labels, output.cosine.shape, cosine.device, self.ignore_index)
        soft = torch.is_floating_point(labels)
        labels = labels.to(cosine.dtype).reshape(cosine.shape) if soft else labels.reshape(-1)
        tensors = [tensor for tensor in (*terms, labels) if isinstance(tensor, Tensor)]
        margin_on = self.margin_on if self._may_have_margin else "none"
        in_blocks = (
            not soft
            and blockwise(cosine.numel(), *tensors)
            and has_kernel(self.angle)
            and margin_on != "others"  # the kernel has one g for all classes but the label's
        )
        scores = None if in_blocks and not return_scores else angular_logits(*terms, self.angle)
        if in_blocks:
            loss = self._in_blocks(terms, labels)
        else:
            assert scores is not None
            loss = F.cross_entropy(
                scores if margin_on == "none" else self._with_margin(scores, terms, self._targets(labels)),
                labels,
                None if self.class_weight is None else self.class_weight.to(cosine.dtype),
                ignore_index=self.ignore_index,
                reduction=self.reduction,
                label_smoothing=self.label_smoothing,
            )
        if self.reduction == "none":
            loss = loss.reshape(output.cosine.shape[:-1])
        if scores is None or not return_scores:
            return loss
        # Not a view if it is not necessary: FSDP warns about views.
        return loss, scores if scores.shape == output.cosine.shape else scores.reshape(output.cosine.shape)

    def extra_repr(self) -> str:
        """Return the options that differ from their defaults."""
        parts = [] if self.class_weight is None else [f"class_weight=[{len(self.class_weight)}]"]
        defaults = {"ignore_index": -100, "label_smoothing": 0.0, "reduction": "mean"}
        parts += [f"{name}={getattr(self, name)!r}" for name, value in defaults.items() if getattr(self, name) != value]
        return ", ".join(parts)

    def _terms(self, output: AngularOutput, all_classes: int | None = None) -> _Terms:
        """Check an output and return the terms of the logits, flattened, in float32 or float64.

        If the output has some of the classes only, `all_classes` is the number of all.
        """
        if not isinstance(output, AngularOutput):
            raise TypeError(f"output must be an AngularOutput of an AngularHead, got {type(output).__name__}.")
        cosine, feature_norm, weight_norm, bias = output
        if not isinstance(cosine, Tensor) or not cosine.is_floating_point():
            require_floating("output.cosine", cosine)
        if cosine.dim() < 1 or (all_classes or cosine.shape[-1]) < 2:
            raise ValueError(
                f"output.cosine must have at least 2 classes in its last dimension, got {list(cosine.shape)}."
            )
        rows, classes = cosine.shape[:-1], cosine.shape[-1:]
        expected = {
            "feature_norm": (feature_norm, rows),
            "weight_norm": (weight_norm, classes),
            "bias": (bias, classes),
        }
        for name, (tensor, shape) in expected.items():
            if tensor is not None and tensor.shape != shape:
                raise ValueError(
                    f"output.{name} must have shape {list(shape)} for cosines of shape {list(cosine.shape)}, "
                    f"got {list(tensor.shape)}."
                )
        num_classes = all_classes or cosine.shape[-1]
        if self.class_weight is not None and len(self.class_weight) != num_classes:
            raise ValueError(f"class_weight must have {num_classes} entries, got {len(self.class_weight)}.")
        dtype = working_dtype(cosine.dtype)
        # Not -1, which is ambiguous for a shard without classes.
        cosine = cosine.to(dtype).reshape(math.prod(rows), cosine.shape[-1])
        bias = None if bias is None else bias.to(dtype)
        if not self.uses_weight_norm and self.scale != "norm":
            return cosine, cast(float, self.scale_for(num_classes)), None, bias
        feature_norm = feature_norm.to(dtype).reshape(-1)
        if not self.uses_weight_norm:
            return cosine, feature_norm, None, bias
        weight_norm = weight_norm.to(dtype)
        # The product of two norms can overflow, and the softmax of infinite logits is NaN.
        if weight_norm.numel():
            largest_norm = torch.finfo(dtype).max ** 0.8 / weight_norm.detach().amax().clamp_min(1)
            feature_norm = torch.minimum(feature_norm, largest_norm)
        return cosine, feature_norm, weight_norm, bias

    def _margin(self, similarity: Callable[[Tensor], Tensor], cosine: Tensor) -> Tensor:
        """Return a similarity with a margin, with the gradient of g if `margin_gradient` is "detached" (Eq. 16)."""
        with_margin = similarity(cosine)
        if self.margin_gradient == "full":
            return with_margin
        plain = self.similarity(cosine)
        return plain + (with_margin - plain).detach()

    def class_values(self, angles: AngularOutput, columns: Columns, all_classes: int) -> tuple[Tensor, Tensor]:
        """Return logits with their margins, and scores without them, for some of the classes of a sharded head.

        Args:
            angles: Angles of these classes.
            columns: Label of each row among them.
            all_classes: Number of all classes.
        """
        terms = self._terms(angles, all_classes)
        scores = angular_logits(*terms, self.angle)
        return (scores if self.margin_on == "none" else self._with_margin(scores, terms, columns)), scores

    def row_penalty(self, feature_norm: Tensor, num_classes: int) -> Tensor | None:
        """Return a penalty of each row that is added to the loss of a sharded head, None if there is none."""
        return None

    def _targets(self, labels: Tensor) -> Tensor | Columns:
        """Return probabilities as they are, and class indices as columns."""
        return labels if torch.is_floating_point(labels) else Columns(self._columns(labels))

    def _with_margin(self, scores: Tensor, terms: _Terms, labels: Tensor | Columns) -> Tensor:
        """Return the logits with their margins, from scores [N, C] without them."""
        cosine, scale, class_scale, bias = terms
        if self.margin_on == "others":
            others = angular_logits(self._margin(self.other_similarity, cosine), scale, class_scale, bias, None)
            if isinstance(labels, Tensor):
                return labels * scores + (1 - labels) * others
            return with_target(others, labels, scores.gather(1, labels.column))
        if isinstance(labels, Tensor):
            targets = angular_logits(self._margin(self.target_similarity, cosine), scale, class_scale, bias, None)
            return labels * targets + (1 - labels) * scores
        columns = labels.column
        if self.angle is None or self.angle.is_same_for_all_filters:
            target = self._margin(self.target_similarity, cosine.gather(1, columns))
        else:
            target = self._margin(self.target_similarity, cosine).gather(1, columns)
        return with_target(scores, labels, logit_at(columns, target, scale, class_scale, bias))

    def _in_blocks(self, terms: _Terms, labels: Tensor) -> Tensor:
        """Return the loss of class indices without storing the logits."""
        cosine, scale, class_scale, bias = terms
        num_classes = cosine.shape[1]
        columns = self._columns(labels)
        cosine, label_cosine = with_label_column(cosine, columns)
        has_margin = self.margin_on == "target"
        target = self._margin(self.target_similarity, label_cosine) if has_margin else self.similarity(label_cosine)
        weight = cosine.new_ones(num_classes) if self.class_weight is None else self.class_weight.to(cosine.dtype)
        of_label, of_all = angular_cross_entropy(
            cosine,
            scale,
            class_scale,
            bias,
            logit_at(columns, target, scale, class_scale, bias).squeeze(1),
            columns.squeeze(1),
            self.angle,
            weight if self.label_smoothing > 0 else None,
        )
        weight_of_label = weight.gather(0, columns.squeeze(1))
        losses = weight_of_label * of_label
        if of_all is not None:
            losses = (1 - self.label_smoothing) * losses + self.label_smoothing / num_classes * of_all
        ignored = labels == self.ignore_index
        losses = losses.masked_fill(ignored, 0)
        if self.reduction == "none":
            return losses
        total = losses.sum()
        return total if self.reduction == "sum" else total / weight_of_label.masked_fill(ignored, 0).sum()

    def _columns(self, labels: Tensor) -> Tensor:
        """Return the labels as [N, 1] for indexing; ignored rows get class 0, and the cross entropy drops them."""
        return labels.masked_fill(labels == self.ignore_index, 0).unsqueeze(1)

    def _measure_similarity_at_45(self) -> float:
        """Return g(π/4) as a number, the mean over classes if they differ."""
        k = None if self.angle is None else self.angle.k
        device = k.device if isinstance(k, Tensor) else torch.device("cpu")
        with torch.no_grad():
            cosine = torch.full((1,), math.sqrt(0.5), dtype=torch.float64, device=device)
            value = float(self.similarity(cosine).mean().item())
        if not value > 0:
            raise ValueError(
                f"{self._scale_argument} must be given for an angle function that is not positive at 45°, "
                f"got {value!r} there."
            )
        return value


class NamedScale(AngularLoss):
    """A loss whose scale is an argument s. Assigning s has the same effect as constructing the loss with it."""

    _scale_argument = "s"

    @property
    def s(self) -> float | None:
        """The scale, or None for one that fits the number of classes."""
        return cast("float | None", self.scale)

    @s.setter
    def s(self, s: float | None) -> None:
        self.scale = None if s is None else require_positive("s", s)
        if s is None:
            self._similarity_at_45 = self._measure_similarity_at_45()
