"""Checks of the arguments of losses: options of constructors, angle functions, scales, weights and labels."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, TypedDict

import torch
from torch import Tensor, nn

from spherenet._util.validation import reject_unknown_options, require_floating, require_one_of, require_positive
from spherenet.angles import ANGLES, AngleFunction, make_angle
from spherenet.errors import InvalidArgument, InvalidArgumentType
from spherenet.kernels.dispatch import can_read_values

if TYPE_CHECKING:
    from spherenet.losses.margins import Annealing

__all__ = [
    "CrossEntropyOptions",
    "MarginOptions",
    "Scale",
    "ShapeOptions",
    "angle_of_loss",
    "checked_class_weight",
    "checked_labels",
    "checked_scale",
    "default_scale",
    "named_scale",
    "options_of",
    "reject_unknown",
]

LOSS_ANGLES = tuple(name for name, angle_class in ANGLES.items() if not angle_class.is_learned)

SIMILAR_OPTIONS = {"margin": ("m",), "scale": ("s",), "s": ("scale",), "r": ("s",), "margin_form": ("form",)}
"""Other names of options, which an error message translates."""

Scale: TypeAlias = float | Literal["norm", "auto"] | None
"""Scale S of the logits (Eq. 16): a number, "norm" for ‖x‖, or "auto" (None) for one that fits the classes."""


class CrossEntropyOptions(TypedDict, total=False):
    """Keyword arguments of every softmax loss; `AngularLoss` documents them."""

    class_weight: Tensor | None
    ignore_index: int
    label_smoothing: float
    reduction: str


class ShapeOptions(CrossEntropyOptions, total=False):
    """Keyword arguments of losses with a multiplicative margin; `GASoftmaxLoss` documents them."""

    margin_gradient: str
    form: str
    annealing: Annealing | None


class MarginOptions(ShapeOptions, total=False):
    """Keyword arguments of losses with a multiplicative margin and any scale; `GASoftmaxLoss` documents them."""

    scale: Scale
    feature_penalty: float
    feature_norm: float | Literal["auto"] | None
    penalty_form: str


SUM_TOLERANCE = 0.02
"""Largest deviation of a sum of probabilities from 1: bfloat16 has three digits."""


def angle_of_loss(
    operator: str | AngleFunction, k: float | None, angle: str | AngleFunction | None = None
) -> AngleFunction:
    """Return the angle function for the arguments `operator`, `k` and `angle`, an alias of `operator`, of a loss."""
    operator = operator if angle is None else angle
    if isinstance(operator, str) and operator in ANGLES and ANGLES[operator].is_learned:
        raise InvalidArgument(
            "operator",
            f"must be one of {', '.join(map(repr, LOSS_ANGLES))} or an AngleFunction object, "
            f"got {operator!r}: a loss owns no weights; pass a {ANGLES[operator].__name__} and give its parameters to "
            "the optimizer.",
        )
    if isinstance(operator, str):
        require_one_of("operator", operator, LOSS_ANGLES)
    elif not isinstance(operator, AngleFunction):
        raise InvalidArgumentType(
            "operator",
            f"must be one of {', '.join(map(repr, LOSS_ANGLES))} or an AngleFunction object, got {operator!r}.",
        )
    return make_angle(operator, k)


def checked_scale(value: object) -> float | Literal["norm", "auto"]:
    """Return the argument `scale` of a loss; None is the same as "auto"."""
    if value is None or value == "auto":
        return "auto"
    if value == "norm":
        return "norm"
    if isinstance(value, str):
        raise InvalidArgument("scale", f'must be "norm", "auto" or a number greater than 0, got {value!r}.')
    return require_positive("scale", value)


def named_scale(s: float | Literal["auto"] | None) -> float | Literal["auto"]:
    """Return the argument `s` of a loss; None is the same as "auto"."""
    return "auto" if s is None or s == "auto" else require_positive("s", s)


CONFIDENCE = 0.999
"""Probability that a feature at 45° from its class must be able to reach."""

SMALLEST_SCALE, LARGEST_SCALE = 10.0, 70.0
"""Range in which S-Softmax trains according to the paper."""


def default_scale(num_classes: int, similarity_at_45: float = math.sqrt(0.5)) -> float:
    """Return the scale s of S-Softmax (Eq. 8) for a number of classes.

        s = log(p·(C − 1)/(1 − p)) / g(π/4) with p = 0.999, limited to [10, 70]

    Logits lie in [−s, s], so s bounds the probability of a class and must grow with the number of classes. A feature
    at 45° from its class and at 90° from the others has the probability
    p = e^{s·g(π/4)} / (e^{s·g(π/4)} + C − 1), which gives the formula. With a smaller s the loss still moves features
    that are already well placed; with a much larger one the gradient vanishes as soon as a class leads. Values for
    g = cosine: 12.9 for 10 classes, 19.5 for 1,000 and 26.0 for 100,000. For g = linear: 18.2, 27.6 and 36.8.

    Args:
        num_classes: Number of classes C.
        similarity_at_45: g(π/4) of the angle function.
    """
    scale = math.log(CONFIDENCE / (1 - CONFIDENCE) * (num_classes - 1)) / similarity_at_45
    return min(LARGEST_SCALE, max(SMALLEST_SCALE, scale))


def options_of(loss: type[nn.Module]) -> list[str]:
    """Return the names of the constructor arguments of a loss, those that it passes on to its base class included."""
    return [name for name, p in inspect.signature(loss).parameters.items() if p.kind is not p.VAR_KEYWORD]


def reject_unknown(owner: str, options: Iterable[str], allowed: Iterable[str]) -> None:
    """Raise TypeError if an option of a loss is not allowed, with the most similar allowed name."""
    reject_unknown_options(owner, options, allowed, SIMILAR_OPTIONS)


def checked_class_weight(class_weight: object) -> Tensor | None:
    """Return class weights if they are None or a floating point tensor [C] of finite numbers ≥ 0."""
    if class_weight is None:
        return None
    if not isinstance(class_weight, Tensor):
        raise InvalidArgumentType("class_weight", f"must be None or a tensor, got {type(class_weight).__name__}.")
    require_floating("class_weight", class_weight)
    if class_weight.dim() != 1:
        raise InvalidArgument("class_weight", f"must have shape [num_classes], got {list(class_weight.shape)}.")
    wrong = class_weight[~(class_weight.isfinite() & (class_weight >= 0))]
    if len(wrong):
        raise InvalidArgument("class_weight", f"must be finite and at least 0, got {wrong[0].item()!r}.")
    return class_weight


def checked_labels(labels: Tensor, shape: Sequence[int], device: torch.device, ignore_index: int) -> Tensor:
    """Return labels for logits of a shape [*, C]: int64 class indices [*], or floating point probabilities [*, C].

    Values are checked on the CPU only, and not during tracing: elsewhere every step would wait for the device. There,
    torch's indexing kernels assert that an index is in range.
    """
    if not isinstance(labels, Tensor):
        raise InvalidArgumentType("labels", f"must be a tensor, got {type(labels).__name__}.")
    if labels.device != device:
        raise InvalidArgument("labels", f"must be on the device of the output, {device}, got {labels.device}.")
    rows, num_classes = list(shape[:-1]), shape[-1]
    check_values = can_read_values(labels)
    if torch.is_floating_point(labels):
        if list(labels.shape) != list(shape):
            raise InvalidArgument(
                "labels",
                f"must be class indices (int64) of shape {rows} or floating point probabilities of shape "
                f"{list(shape)}, got {labels.dtype} of shape {list(labels.shape)}.",
            )
        if ignore_index >= 0:
            raise InvalidArgument("ignore_index", f"must be left out if labels are probabilities, got {ignore_index}.")
        if check_values:
            values = labels.detach()
            wrong = values[~((values >= 0) & (values <= 1))]
            if len(wrong):
                raise InvalidArgument("labels", f"must be probabilities from 0 to 1, got {wrong[0].item()!r}.")
            sums = values.sum(-1, dtype=torch.float64).flatten()
            wrong = sums[(sums - 1).abs() > SUM_TOLERANCE]
            if len(wrong):
                raise InvalidArgument(
                    "labels", f"must be probabilities that sum to 1 over the classes, got a sum of {wrong[0]:g}."
                )
        return labels
    if labels.dtype == torch.bool or labels.is_complex():
        raise InvalidArgumentType(
            "labels", f"must be class indices (int64) or floating point probabilities, got {labels.dtype}."
        )
    if list(labels.shape) != rows:
        raise InvalidArgument(
            "labels", f"must have shape {rows}, one class index per feature, got shape {list(labels.shape)}."
        )
    labels = labels.long()  # uint8 compares 156 as equal to -100
    if check_values:
        wrong = labels[((labels < 0) | (labels >= num_classes)) & (labels != ignore_index)]
        if len(wrong):
            raise InvalidArgument(
                "labels",
                f"must be from 0 to {num_classes - 1} or ignore_index ({ignore_index}), got {wrong[0].item()}.",
            )
    return labels
