"""Losses by name, as models, recipes and the command line write them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from spherenet.losses.arcface import ArcFaceLoss
from spherenet.losses.base import AngularLoss, CrossEntropyOptions
from spherenet.losses.cosface import CosFaceLoss
from spherenet.losses.ga_softmax import ASoftmaxLoss, GASoftmaxLoss
from spherenet.losses.s_softmax import SSoftmaxLoss
from spherenet.losses.softmax import SoftmaxLoss
from spherenet.losses.w_softmax import WSoftmaxLoss
from spherenet.ops.arguments import require_one_of

__all__ = ["list_losses", "make_loss"]

_ANGLES = ("linear", "cosine", "sigmoid")
_LOSSES: dict[str, Callable[..., AngularLoss]] = {
    "softmax": SoftmaxLoss,
    **{f"w-{angle}": partial(WSoftmaxLoss, angle) for angle in _ANGLES},
    **{f"ga-{angle}": partial(GASoftmaxLoss, angle) for angle in _ANGLES},
    "a": ASoftmaxLoss,
    **{f"s-{angle}": partial(SSoftmaxLoss, angle) for angle in _ANGLES},
    "cosface": CosFaceLoss,
    "arcface": ArcFaceLoss,
}


def list_losses() -> list[str]:
    """The names that `make_loss` takes."""
    return list(_LOSSES)


def make_loss(loss: str | AngularLoss, **options: Any) -> AngularLoss:
    """Return the loss of a name, made with `options`; an object is returned as it is and takes none.

    Options are the keyword arguments of the loss's class: m, k, s, annealing, label_smoothing, …
    Raises ValueError or TypeError for an unknown name or option.
    """
    if isinstance(loss, AngularLoss):
        if options:
            raise ValueError(f"options must be left out where loss is an object, got {', '.join(options)}.")
        return loss
    if not isinstance(loss, str):
        raise TypeError(f"loss must be a name or an AngularLoss object, got {loss!r} of type {type(loss).__name__}.")
    constructor = _LOSSES[require_one_of("loss", loss, _LOSSES)]
    named = [name for name in inspect.signature(constructor).parameters if name not in ("angle", "cross_entropy")]
    allowed = [*named, *CrossEntropyOptions.__annotations__]
    for option in options:
        if option not in allowed:
            raise TypeError(f"{option!r} is no option of the loss {loss!r}; allowed: {', '.join(allowed)}.")
    return constructor(**options)
