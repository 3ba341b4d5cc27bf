"""Losses on an `AngularOutput` and their registry, and losses on pairs of features.

They own no class weights, which belong to the head.
"""

from __future__ import annotations

from typing import Any

from spherenet._util.validation import require_one_of
from spherenet.errors import InvalidArgument, InvalidArgumentType
from spherenet.losses.additive_margins import ArcFaceLoss, CosFaceLoss, SubcenterArcFaceLoss
from spherenet.losses.arguments import default_scale, options_of, reject_unknown
from spherenet.losses.base import AngularLoss
from spherenet.losses.binary import SphereFace2Loss, UniFaceLoss
from spherenet.losses.contrastive import InfoNCELoss, PrototypicalLoss, SigLIPLoss, SupConLoss
from spherenet.losses.margins import Annealing, ASoftmaxLoss, GASoftmaxLoss, MarginLoss
from spherenet.losses.sample_margins import AdaFaceLoss, CurricularFaceLoss, ElasticFaceLoss, MagFaceLoss
from spherenet.losses.softmax import SoftmaxLoss, SSoftmaxLoss, WSoftmaxLoss
from spherenet.losses.uniformity import AlignmentUniformityLoss, alignment_loss, uniformity_loss

__all__ = [
    "ASoftmaxLoss",
    "AdaFaceLoss",
    "AlignmentUniformityLoss",
    "AngularLoss",
    "Annealing",
    "ArcFaceLoss",
    "CosFaceLoss",
    "CurricularFaceLoss",
    "ElasticFaceLoss",
    "GASoftmaxLoss",
    "InfoNCELoss",
    "MagFaceLoss",
    "MarginLoss",
    "PrototypicalLoss",
    "SSoftmaxLoss",
    "SigLIPLoss",
    "SoftmaxLoss",
    "SphereFace2Loss",
    "SubcenterArcFaceLoss",
    "SupConLoss",
    "UniFaceLoss",
    "WSoftmaxLoss",
    "alignment_loss",
    "default_scale",
    "list_losses",
    "loss_arguments",
    "make_loss",
    "uniformity_loss",
]

_LOSSES: dict[str, tuple[type[AngularLoss], dict[str, Any]]] = {
    "softmax": (SoftmaxLoss, {}),
    "w-linear": (WSoftmaxLoss, {"operator": "linear"}),
    "w-cosine": (WSoftmaxLoss, {"operator": "cosine"}),
    "w-sigmoid": (WSoftmaxLoss, {"operator": "sigmoid"}),
    "ga-linear": (GASoftmaxLoss, {"operator": "linear"}),
    "ga-cosine": (GASoftmaxLoss, {"operator": "cosine"}),
    "ga-sigmoid": (GASoftmaxLoss, {"operator": "sigmoid"}),
    "a": (ASoftmaxLoss, {}),
    "s-linear": (SSoftmaxLoss, {"operator": "linear"}),
    "s-cosine": (SSoftmaxLoss, {"operator": "cosine"}),
    "s-sigmoid": (SSoftmaxLoss, {"operator": "sigmoid"}),
    "cosface": (CosFaceLoss, {}),
    "arcface": (ArcFaceLoss, {}),
    "sphereface-r1": (ASoftmaxLoss, {"form": "r1"}),
    "sphereface-r2": (ASoftmaxLoss, {"form": "r2"}),
    "sphereface2": (SphereFace2Loss, {}),
    "adaface": (AdaFaceLoss, {}),
    "magface": (MagFaceLoss, {}),
    "curricularface": (CurricularFaceLoss, {}),
    "elasticface": (ElasticFaceLoss, {}),
    "subcenter-arcface": (SubcenterArcFaceLoss, {}),
    "uniface": (UniFaceLoss, {}),
}
"""Class of each loss, and the options that its name fixes."""


def list_losses() -> list[str]:
    """Return the names that `make_loss` takes."""
    return list(_LOSSES)


def loss_arguments(loss: str) -> list[str]:
    """Return the names of the options that `make_loss` takes for a loss."""
    loss_class, fixed = _LOSSES[require_one_of("loss", loss, _LOSSES)]
    named = {"angle", *fixed} if "operator" in fixed else set(fixed)
    return [name for name in options_of(loss_class) if name not in named]


def make_loss(loss: str | AngularLoss, **options: Any) -> AngularLoss:
    """Return the loss of a name.

    Args:
        loss: Name of a loss (see `list_losses`), or a loss object, which is returned as it is.
        **options: Keyword arguments of the loss's class, e.g. m, k, s, scale, annealing or label_smoothing. Not allowed
            with a loss object.

    Raises:
        TypeError: If the loss has no such option, or `loss` is neither a name nor a loss.
        ValueError: If the name is unknown, or an option is out of range.
    """
    if isinstance(loss, AngularLoss):
        if options:
            raise InvalidArgument("options", f"must be left out if loss is an object, got {', '.join(options)}.")
        return loss
    if not isinstance(loss, str):
        raise InvalidArgumentType(
            "loss", f"must be a name or an AngularLoss object, got {loss!r} of type {type(loss).__name__}."
        )
    reject_unknown(f"Loss {loss!r}", options, loss_arguments(loss))
    loss_class, fixed = _LOSSES[loss]
    return loss_class(**fixed, **options)
