"""Optimizers that live on the sphere, parameter groups and norm keeping."""

from spherenet.optim.groups import MixedOptimizer, param_groups
from spherenet.optim.hyperball import Hyperball
from spherenet.optim.muon import Muon, orthogonalize
from spherenet.optim.norms import KeptNorms, keep_norms

__all__ = ["Hyperball", "KeptNorms", "MixedOptimizer", "Muon", "keep_norms", "orthogonalize", "param_groups"]
