"""Thin modules over `spherenet.functional`."""

from spherenet.layers.base import SphereLayer
from spherenet.layers.conv import (
    LazySphereConv1d,
    LazySphereConv2d,
    LazySphereConv3d,
    SphereConv1d,
    SphereConv2d,
    SphereConv3d,
)
from spherenet.layers.head import AngularHead
from spherenet.layers.linear import LazySphereLinear, SphereLinear
from spherenet.layers.recurrent import SphereGRU, SphereGRUCell, SphereLSTM, SphereLSTMCell

__all__ = [
    "AngularHead",
    "LazySphereConv1d",
    "LazySphereConv2d",
    "LazySphereConv3d",
    "LazySphereLinear",
    "SphereConv1d",
    "SphereConv2d",
    "SphereConv3d",
    "SphereGRU",
    "SphereGRUCell",
    "SphereLSTM",
    "SphereLSTMCell",
    "SphereLayer",
    "SphereLinear",
]
