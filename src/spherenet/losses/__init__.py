"""Losses on an `AngularOutput`. They own no class weights, which belong to the head."""

from spherenet.losses.additive_margins import ArcFaceLoss, CosFaceLoss, SphereFace2Loss
from spherenet.losses.base import AngularLoss, default_scale
from spherenet.losses.margins import (
    Annealing,
    ASoftmaxLoss,
    GASoftmaxLoss,
    MarginLoss,
    obsolete_state,
)
from spherenet.losses.registry import list_losses, make_loss, options_of_earlier_versions
from spherenet.losses.softmax import SoftmaxLoss, SSoftmaxLoss, WSoftmaxLoss

__all__ = [
    "ASoftmaxLoss",
    "AngularLoss",
    "Annealing",
    "ArcFaceLoss",
    "CosFaceLoss",
    "GASoftmaxLoss",
    "MarginLoss",
    "SSoftmaxLoss",
    "SoftmaxLoss",
    "SphereFace2Loss",
    "WSoftmaxLoss",
    "default_scale",
    "list_losses",
    "make_loss",
    "obsolete_state",
    "options_of_earlier_versions",
]
