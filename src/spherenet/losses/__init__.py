"""Losses on an `AngularOutput`. They own no class weights, which belong to the head."""

from spherenet.losses.additive_margins import ArcFaceLoss, CosFaceLoss
from spherenet.losses.base import AngularLoss
from spherenet.losses.ga_softmax import Annealing, ASoftmaxLoss, GASoftmaxLoss, obsolete_state
from spherenet.losses.registry import list_losses, make_loss
from spherenet.losses.softmax import SoftmaxLoss, SSoftmaxLoss, WSoftmaxLoss, default_scale

__all__ = [
    "ASoftmaxLoss",
    "AngularLoss",
    "Annealing",
    "ArcFaceLoss",
    "CosFaceLoss",
    "GASoftmaxLoss",
    "SSoftmaxLoss",
    "SoftmaxLoss",
    "WSoftmaxLoss",
    "default_scale",
    "list_losses",
    "make_loss",
    "obsolete_state",
]
