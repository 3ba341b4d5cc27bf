"""Checks of the arguments of losses: options of the constructors, angle functions, scales and class weights."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, TypeAlias, TypedDict

from torch import Tensor, nn

from spherenet.angles import ANGLES, DEFAULT_K, AngleFunction, make_angle
from spherenet.validation import reject_unknown_options, require_floating, require_one_of, require_positive

if TYPE_CHECKING:
    from spherenet.losses.margins import Annealing

__all__ = [
    "CrossEntropyOptions",
    "MarginOptions",
    "Scale",
    "angle_of_loss",
    "checked_class_weight",
    "checked_scale",
    "options_of",
    "reject_unknown",
]

LOSS_ANGLES = tuple(name for name, angle_class in ANGLES.items() if not angle_class.is_learned)

SIMILAR_OPTIONS = {"margin": ("m",), "scale": ("s",), "s": ("scale",), "r": ("s",), "margin_form": ("form",)}
"""Other names of options, which an error message translates."""

Scale: TypeAlias = float | Literal["norm"] | None
"""Scale S of the logits (Eq. 16): a number, "norm" for ‖x‖, or None for a number that fits the number of classes."""


class CrossEntropyOptions(TypedDict, total=False):
    """Keyword arguments of every softmax loss; `AngularLoss` documents them."""

    class_weight: Tensor | None
    ignore_index: int
    label_smoothing: float
    reduction: str


class MarginOptions(CrossEntropyOptions, total=False):
    """Keyword arguments of the multiplicative margins; `GASoftmaxLoss` documents them."""

    scale: Scale
    margin_gradient: str
    form: str
    annealing: Annealing | None
    feature_penalty: float
    feature_norm: float | None
    penalty_form: str


OPTIONS_BY_NAME = {"cross_entropy": CrossEntropyOptions, "margin_options": MarginOptions}
"""Options that a constructor takes with `**name`."""


def angle_of_loss(angle: str | AngleFunction, k: float) -> AngleFunction:
    """Return the angle function for the arguments `angle` and `k` of a loss; only the sigmoid has a k."""
    if isinstance(angle, str) and angle in ANGLES and ANGLES[angle].is_learned:
        raise ValueError(
            f"angle must be one of {', '.join(map(repr, LOSS_ANGLES))} or an AngleFunction object, got {angle!r}: "
            f"a loss owns no weights; pass a {ANGLES[angle].__name__} and give its parameters to the optimizer."
        )
    if isinstance(angle, str):
        require_one_of("angle", angle, LOSS_ANGLES)
    elif not isinstance(angle, AngleFunction):
        raise TypeError(
            f"angle must be one of {', '.join(map(repr, LOSS_ANGLES))} or an AngleFunction object, got {angle!r}."
        )
    if isinstance(angle, str) and ANGLES[angle].takes_k:
        return make_angle(angle, k)
    # The default k of the signature is ignored; any other value is a mistake.
    if k != DEFAULT_K:
        raise ValueError(f'k must be left out unless angle is "sigmoid", got k={k!r} with angle {angle!r}.')
    return make_angle(angle)


def checked_scale(value: object) -> Scale:
    """Return the argument `scale` of a loss."""
    if value is None:
        return None
    if value == "norm":
        return "norm"
    if isinstance(value, str):
        raise ValueError(f'scale must be "norm", a number greater than 0 or None, got {value!r}.')
    return require_positive("scale", value)


def options_of(loss: type[nn.Module]) -> list[str]:
    """Return the names of the constructor arguments of a loss, those that it passes on to its base class included."""
    names: list[str] = []
    for cls in loss.__mro__:
        if "__init__" not in vars(cls):
            continue
        parameters = inspect.signature(vars(cls)["__init__"]).parameters.values()
        names += [p.name for p in parameters if p.name != "self" and p.kind is not inspect.Parameter.VAR_KEYWORD]
        rest = next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD), None)
        if rest in OPTIONS_BY_NAME:
            names += OPTIONS_BY_NAME[rest].__annotations__
        if rest is None or rest in OPTIONS_BY_NAME:
            break
    return list(dict.fromkeys(names))


def reject_unknown(owner: str, options: Iterable[str], allowed: Iterable[str]) -> None:
    """Raise TypeError if an option of a loss is not allowed, with the most similar allowed name."""
    reject_unknown_options(owner, options, allowed, SIMILAR_OPTIONS)


def checked_class_weight(class_weight: object) -> Tensor | None:
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
