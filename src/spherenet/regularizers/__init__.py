"""Penalties on the kernels of sphere layers (orthogonality, hyperspherical energy) and their diagnostics."""

from spherenet.regularizers.diagnostics import KernelNorms, k_values, kernel_angles, layer_diagnostics
from spherenet.regularizers.kernels import sphere_layers
from spherenet.regularizers.penalties import hyperspherical_energy, orthogonality, orthogonality_minimum

__all__ = [
    "KernelNorms",
    "hyperspherical_energy",
    "k_values",
    "kernel_angles",
    "layer_diagnostics",
    "orthogonality",
    "orthogonality_minimum",
    "sphere_layers",
]
