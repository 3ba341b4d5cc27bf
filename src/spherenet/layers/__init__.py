"""Sphere layers as modules: convolutions, linear and recurrent layers, attention, and the head of a classifier."""

from spherenet.layers.attention import SphereMultiheadAttention
from spherenet.layers.base import SphereLayer
from spherenet.layers.conv import (
    LazySphereConv1d,
    LazySphereConv2d,
    LazySphereConv3d,
    LazySphereLinear,
    SphereConv1d,
    SphereConv2d,
    SphereConv3d,
    SphereLinear,
)
from spherenet.layers.fast_conv import FastConv2d
from spherenet.layers.head import AngularHead, FixedHead, etf_directions
from spherenet.layers.magnitude_preserving import MPConv2d, MPLinear, mp_cat, mp_silu, mp_sum
from spherenet.layers.options import SphereOptions
from spherenet.layers.recurrent import SphereGRU, SphereGRUCell, SphereLSTM, SphereLSTMCell
from spherenet.layers.sharded_head import ShardedHead, shard_head
from spherenet.layers.transposed import SphereConvTranspose1d, SphereConvTranspose2d, SphereConvTranspose3d

__all__ = [
    "AngularHead",
    "FastConv2d",
    "FixedHead",
    "LazySphereConv1d",
    "LazySphereConv2d",
    "LazySphereConv3d",
    "LazySphereLinear",
    "MPConv2d",
    "MPLinear",
    "ShardedHead",
    "SphereConv1d",
    "SphereConv2d",
    "SphereConv3d",
    "SphereConvTranspose1d",
    "SphereConvTranspose2d",
    "SphereConvTranspose3d",
    "SphereGRU",
    "SphereGRUCell",
    "SphereLSTM",
    "SphereLSTMCell",
    "SphereLayer",
    "SphereLinear",
    "SphereMultiheadAttention",
    "SphereOptions",
    "etf_directions",
    "mp_cat",
    "mp_silu",
    "mp_sum",
    "shard_head",
]
