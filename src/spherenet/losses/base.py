"""Base class of the angular losses: logits from an `AngularOutput`, a margin on the target class, cross entropy.

A loss consists of an angle function g, a target similarity t and two scales:

    z_ij = scale_i · class_scale_j · g(θ_ij) + b_j    for every class j
    z_iy = scale_i · class_scale_y · t(θ_iy) + b_y    for the label y; t = g without a margin

b is the bias of the head, which has none by default.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spherenet.angles import DEFAULT_K, AngleFunction, make_angle
from spherenet.kernels.blockwise import angular_cross_entropy, has_kernel, plain_logits, with_label_column
from spherenet.kernels.dispatch import blockwise, can_look_at_values
from spherenet.ops.margins import AngularOutput, same_for_all_classes
from spherenet.ops.norms import working_dtype
from spherenet.validation import require_floating, require_number, require_one_of

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["AngularLoss", "CrossEntropyOptions", "angle_of_loss", "options_of", "reject_unknown"]

LOSS_ANGLES = ("linear", "cosine", "sigmoid")

ALIASES = {"margin": "m", "scale": "s"}
"""Names of options in other libraries, which an error message translates."""

SUM_TOLERANCE = 0.02
"""Largest deviation of a sum of probabilities from 1: bfloat16 has three digits."""

_Terms: TypeAlias = tuple[Tensor, Tensor | float, Tensor | None, Tensor | None]
"""Cosines [N, C], scale of each row [N] or a number, scale of each class [C], bias [C]."""


class CrossEntropyOptions(TypedDict, total=False):
    """Keyword arguments of every loss; `AngularLoss` documents them."""

    class_weight: Tensor | None
    ignore_index: int
    label_smoothing: float
    reduction: str


class AngularLoss(nn.Module):
    """Cross entropy on the logits of an `AngularOutput`, base class of all losses.

    A subclass chooses the angle function and may override `scales` and `target_similarity`. If it overrides `forward`,
    it must accept `return_scores`, which `Classifier` passes. A loss owns no class weights: they belong to the
    `AngularHead`.

    Logits and loss are computed in float32 or float64. If a head has very many classes, class indices are processed in
    blocks that never store all logits (`kernels/blockwise.py`), with the same result.

    Args:
        angle: Angle function g, or None for the cosine itself, without clamping.
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

    target_similarity: Callable[[Tensor], Tensor] | None = None
    """Method that returns t(θ) of the target class from cos θ; None for a loss without a margin."""

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Reject unknown options here, because only this method knows the class that the user called."""
        reject_unknown(cls.__name__, options, options_of(cls))
        return super().__new__(cls)

    def __init__(
        self,
        *,
        angle: AngleFunction | None = None,
        class_weight: Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        self.angle = angle
        # Not persistent: it is a setting that the constructor receives again.
        self.register_buffer("class_weight", _checked_class_weight(class_weight), persistent=False)
        if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
            raise TypeError(f"ignore_index must be an integer, got {ignore_index!r}.")
        self.ignore_index = ignore_index
        self.label_smoothing = require_number("label_smoothing", label_smoothing)
        if not 0 <= self.label_smoothing <= 1:
            raise ValueError(f"label_smoothing must be from 0 to 1, got {label_smoothing!r}.")
        self.reduction = require_one_of("reduction", reduction, ("mean", "sum", "none"))

    @property
    def uses_weight_norm(self) -> bool:
        """Whether the loss depends on the norms of the class weights; only plain softmax does."""
        return False

    def scales(self, output: AngularOutput) -> tuple[Tensor | float, Tensor | None]:
        """Return the scale of each row, [N] or a number, and of each class, [C] or None for 1.

        Args:
            output: Flattened output of the head, cosines [N, C].
        """
        return output.feature_norm, None

    def logits(self, output: AngularOutput) -> Tensor:
        """Return the scores of an output without labels, and therefore without a margin.

        Shape:
            cosines [*, C] → [*, C].
        """
        return plain_logits(*self._terms(output), self.angle).reshape(output.cosine.shape)

    def forward(
        self, output: AngularOutput, labels: Tensor, *, return_scores: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the loss of a batch.

        If labels are probabilities q, the margin applies to every class in proportion to its probability (Eq. 5):
        z_j = scale·class_scale_j·(q_j·t(θ_j) + (1 − q_j)·g(θ_j)) + b_j.

        Args:
            output: Output of the head.
            labels: Class indices [*], or floating point probabilities [*, C].
            return_scores: Return (loss, scores) with the scores of `logits`. They are a by-product of the loss, except
                when it is computed in blocks of classes.

        Returns:
            A scalar, or [*] if reduction is "none".
        """
        terms = self._terms(output)
        cosine = terms[0]
        labels = _checked_labels(labels, output.cosine, self.ignore_index)
        soft = torch.is_floating_point(labels)
        labels = labels.to(cosine.dtype).reshape(cosine.shape) if soft else labels.reshape(-1)
        tensors = [tensor for tensor in (*terms, labels) if isinstance(tensor, Tensor)]
        in_blocks = not soft and blockwise(cosine.numel(), *tensors) and has_kernel(self.angle)
        scores = None if in_blocks and not return_scores else plain_logits(*terms, self.angle)
        if in_blocks:
            loss = self._in_blocks(terms, labels)
        else:
            assert scores is not None
            loss = F.cross_entropy(
                scores if self.target_similarity is None else self._with_margin(scores, terms, labels),
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
        return loss, scores.reshape(output.cosine.shape)

    def extra_repr(self) -> str:
        """Return the options that differ from their defaults."""
        parts = [] if self.class_weight is None else [f"class_weight=[{len(self.class_weight)}]"]
        defaults = {"ignore_index": -100, "label_smoothing": 0.0, "reduction": "mean"}
        parts += [f"{name}={getattr(self, name)!r}" for name, value in defaults.items() if getattr(self, name) != value]
        return ", ".join(parts)

    def _terms(self, output: AngularOutput) -> _Terms:
        """Check an output and return the terms of the logits, flattened, in float32 or float64."""
        if not isinstance(output, AngularOutput):
            raise TypeError(f"output must be an AngularOutput of an AngularHead, got {type(output).__name__}.")
        cosine, feature_norm, weight_norm, bias = output
        require_floating("output.cosine", cosine)
        if cosine.dim() < 1 or cosine.shape[-1] < 2:
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
        if self.class_weight is not None and len(self.class_weight) != cosine.shape[-1]:
            raise ValueError(f"class_weight must have {cosine.shape[-1]} entries, got {len(self.class_weight)}.")
        dtype = working_dtype(cosine.dtype)
        flat = AngularOutput(
            cosine.to(dtype).reshape(-1, cosine.shape[-1]),
            feature_norm.to(dtype).reshape(-1),
            weight_norm.to(dtype),
            None if bias is None else bias.to(dtype),
        )
        return flat.cosine, *self.scales(flat), flat.bias

    def _with_margin(self, scores: Tensor, terms: _Terms, labels: Tensor) -> Tensor:
        """Return the logits with the margin on the target classes, from scores [N, C] without it."""
        assert self.target_similarity is not None
        cosine, scale, class_scale, bias = terms
        if torch.is_floating_point(labels):
            with_margin = plain_logits(self.target_similarity(cosine), scale, class_scale, bias, None)
            return labels * with_margin + (1 - labels) * scores
        columns = self._columns(labels)
        if self.angle is None or same_for_all_classes(self.angle):
            target = self.target_similarity(cosine.gather(1, columns))
        else:
            target = self.target_similarity(cosine).gather(1, columns)
        return scores.scatter(1, columns, _logit_at(columns, target, scale, class_scale, bias))

    def _in_blocks(self, terms: _Terms, labels: Tensor) -> Tensor:
        """Return the loss of class indices without storing the logits."""
        cosine, scale, class_scale, bias = terms
        num_classes = cosine.shape[1]
        columns = self._columns(labels)
        cosine, label_cosine = with_label_column(cosine, columns)
        if self.target_similarity is not None:
            target = self.target_similarity(label_cosine)
        else:
            target = label_cosine if self.angle is None else self.angle(label_cosine)
        weight = cosine.new_ones(num_classes) if self.class_weight is None else self.class_weight.to(cosine.dtype)
        of_label, of_all = angular_cross_entropy(
            cosine,
            scale,
            class_scale,
            bias,
            _logit_at(columns, target, scale, class_scale, bias).squeeze(1),
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


def _logit_at(
    columns: Tensor, similarity: Tensor, scale: Tensor | float, class_scale: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Return the logit [N, 1] of one class per row from its similarity [N, 1]."""
    if class_scale is not None:
        similarity = similarity * class_scale[columns]
    logit = similarity * (scale.unsqueeze(1) if isinstance(scale, Tensor) else scale)
    return logit if bias is None else logit + bias[columns]


def angle_of_loss(angle: str | AngleFunction, k: float) -> AngleFunction:
    """Return the angle function for the arguments `angle` and `k` of a loss; only the sigmoid has a k."""
    if angle == "learnable":
        raise ValueError(
            'angle must be "linear", "cosine", "sigmoid" or an AngleFunction object, got "learnable": '
            "a loss owns no weights; pass a LearnableSigmoidAngle and give its parameters to the optimizer."
        )
    if isinstance(angle, str):
        require_one_of("angle", angle, LOSS_ANGLES)
    elif not isinstance(angle, AngleFunction):
        raise TypeError(
            f"angle must be one of {', '.join(map(repr, LOSS_ANGLES))} or an AngleFunction object, got {angle!r}."
        )
    if angle == "sigmoid":
        return make_angle(angle, k)
    # The default k of the signature is ignored; any other value is a mistake.
    if k != DEFAULT_K:
        raise ValueError(f'k must be left out unless angle is "sigmoid", got k={k!r} with angle {angle!r}.')
    return make_angle(angle)


def options_of(loss: type[AngularLoss]) -> list[str]:
    """Return the names of the constructor arguments of a loss, those that it passes on to its base class included."""
    names: list[str] = []
    for cls in loss.__mro__:
        if "__init__" not in vars(cls):
            continue
        parameters = inspect.signature(vars(cls)["__init__"]).parameters.values()
        names += [p.name for p in parameters if p.name != "self" and p.kind is not inspect.Parameter.VAR_KEYWORD]
        rest = [p.name for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD]
        if rest == ["cross_entropy"]:
            names += CrossEntropyOptions.__annotations__
        if rest in ([], ["cross_entropy"]):
            break
    return list(dict.fromkeys(names))


def reject_unknown(owner: str, options: Mapping[str, object], allowed: Iterable[str]) -> None:
    """Raise TypeError if an option is not allowed, with the most similar allowed name."""
    choices = list(allowed)
    for name in options:
        if name not in choices:
            similar = [c for c in choices if c == ALIASES.get(name)] or get_close_matches(name, choices, n=1)
            hint = f"; did you mean {similar[0]!r}?" if similar else "."
            raise TypeError(f"{owner} has no option {name!r}{hint} Allowed: {', '.join(choices)}.")


def _checked_labels(labels: Tensor, cosine: Tensor, ignore_index: int) -> Tensor:
    """Return labels for cosines [*, C]: int64 class indices [*], or floating point probabilities [*, C].

    Values are checked on the CPU only, and not during tracing: elsewhere every step would wait for the device. There,
    torch's indexing kernels assert that an index is in range.
    """
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels must be a tensor, got {type(labels).__name__}.")
    if labels.device != cosine.device:
        raise ValueError(f"labels must be on the device of the output, {cosine.device}, got {labels.device}.")
    rows, num_classes = list(cosine.shape[:-1]), cosine.shape[-1]
    if torch.is_floating_point(labels):
        if labels.shape != cosine.shape:
            raise ValueError(
                f"labels must be class indices (int64) of shape {rows} or floating point probabilities of shape "
                f"{list(cosine.shape)}, got {labels.dtype} of shape {list(labels.shape)}."
            )
        if ignore_index >= 0:
            raise ValueError(f"ignore_index must be left out if labels are probabilities, got {ignore_index}.")
        if can_look_at_values(labels):
            values = labels.detach()
            wrong = values[~((values >= 0) & (values <= 1))]
            if len(wrong):
                raise ValueError(f"labels must be probabilities from 0 to 1, got {wrong[0].item()!r}.")
            sums = values.sum(-1, dtype=torch.float64).flatten()
            wrong = sums[(sums - 1).abs() > SUM_TOLERANCE]
            if len(wrong):
                raise ValueError(
                    f"labels must be probabilities that sum to 1 over the classes, got a sum of {wrong[0]:g}."
                )
        return labels
    if labels.dtype == torch.bool or labels.is_complex():
        raise TypeError(f"labels must be class indices (int64) or floating point probabilities, got {labels.dtype}.")
    if list(labels.shape) != rows:
        raise ValueError(f"labels must have shape {rows}, one class index per feature, got shape {list(labels.shape)}.")
    if can_look_at_values(labels):
        wrong = labels[((labels < 0) | (labels >= num_classes)) & (labels != ignore_index)]
        if len(wrong):
            raise ValueError(
                f"labels must be from 0 to {num_classes - 1} or ignore_index ({ignore_index}), got {wrong[0].item()}."
            )
    return labels.long()


def _checked_class_weight(class_weight: object) -> Tensor | None:
    """Return class weights if they are None or a floating point tensor [C] of finite numbers ≥ 0."""
    if class_weight is None:
        return None
    if not isinstance(class_weight, Tensor):
        raise TypeError(f"class_weight must be None or a tensor, got {type(class_weight).__name__}.")
    require_floating("class_weight", class_weight)
    if class_weight.dim() != 1:
        raise ValueError(f"class_weight must have shape [num_classes], got {list(class_weight.shape)}.")
    wrong = class_weight[~(class_weight.isfinite() & (class_weight >= 0))]
    if len(wrong):
        raise ValueError(f"class_weight must be finite and at least 0, got {wrong[0].item()!r}.")
    return class_weight
