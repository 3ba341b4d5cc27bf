"""Losses on an `AngularOutput`; they hold no class weights, those live in the head."""

from spherenet.losses.annealing import Annealing
from spherenet.losses.arcface import ArcFaceLoss
from spherenet.losses.base import AngularLoss
from spherenet.losses.cosface import CosFaceLoss
from spherenet.losses.ga_softmax import ASoftmaxLoss, GASoftmaxLoss
from spherenet.losses.names import list_losses, make_loss
from spherenet.losses.s_softmax import SSoftmaxLoss, default_scale
from spherenet.losses.softmax import SoftmaxLoss
from spherenet.losses.w_softmax import WSoftmaxLoss

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
]
