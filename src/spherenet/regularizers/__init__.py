"""Penalties on the kernels of a model (orthogonality, hyperspherical energy) and their diagnostics."""

from spherenet.regularizers.diagnostics import KernelNorms, k_values, kernel_angles, layer_diagnostics
from spherenet.regularizers.energy import hyperspherical_energy
from spherenet.regularizers.kernels import orthogonality, orthogonality_minimum, sphere_layers

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
