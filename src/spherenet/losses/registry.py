"""Losses by name, as models, experiments and the command line refer to them."""

from __future__ import annotations

from typing import Any

from spherenet.losses.additive_margins import ArcFaceLoss, CosFaceLoss
from spherenet.losses.base import AngularLoss, options_of, reject_unknown
from spherenet.losses.ga_softmax import ASoftmaxLoss, GASoftmaxLoss
from spherenet.losses.softmax import SoftmaxLoss, SSoftmaxLoss, WSoftmaxLoss
from spherenet.validation import require_one_of

__all__ = ["list_losses", "make_loss"]

_LOSSES: dict[str, tuple[type[AngularLoss], dict[str, Any]]] = {
    "softmax": (SoftmaxLoss, {}),
    "w-linear": (WSoftmaxLoss, {"angle": "linear"}),
    "w-cosine": (WSoftmaxLoss, {"angle": "cosine"}),
    "w-sigmoid": (WSoftmaxLoss, {"angle": "sigmoid"}),
    "ga-linear": (GASoftmaxLoss, {"angle": "linear"}),
    "ga-cosine": (GASoftmaxLoss, {"angle": "cosine"}),
    "ga-sigmoid": (GASoftmaxLoss, {"angle": "sigmoid"}),
    "a": (ASoftmaxLoss, {}),
    "s-linear": (SSoftmaxLoss, {"angle": "linear"}),
    "s-cosine": (SSoftmaxLoss, {"angle": "cosine"}),
    "s-sigmoid": (SSoftmaxLoss, {"angle": "sigmoid"}),
    "cosface": (CosFaceLoss, {}),
    "arcface": (ArcFaceLoss, {}),
}
"""Class of each loss, and the options that its name fixes."""


def list_losses() -> list[str]:
    """Return the names that `make_loss` takes."""
    return list(_LOSSES)


def make_loss(loss: str | AngularLoss, **options: Any) -> AngularLoss:
    """Return the loss of a name.

    Args:
        loss: Name of a loss (see `list_losses`), or a loss object, which is returned as it is.
        **options: Keyword arguments of the loss's class, e.g. m, k, s, annealing or label_smoothing. Not allowed with a
            loss object.

    Raises:
        TypeError: If the loss has no such option, or `loss` is neither a name nor a loss.
        ValueError: If the name is unknown, or an option is out of range.
    """
    if isinstance(loss, AngularLoss):
        if options:
            raise ValueError(f"options must be left out if loss is an object, got {', '.join(options)}.")
        return loss
    if not isinstance(loss, str):
        raise TypeError(f"loss must be a name or an AngularLoss object, got {loss!r} of type {type(loss).__name__}.")
    loss_class, fixed = _LOSSES[require_one_of("loss", loss, _LOSSES)]
    reject_unknown(f"Loss {loss!r}", options, [name for name in options_of(loss_class) if name not in fixed])
    return loss_class(**fixed, **options)
