"""Terms and numbers over the kernels of a model's sphere layers: orthogonality, energy, diagnostics."""

from spherenet.regularizers.diagnostics import k_values, kernel_angles, layer_diagnostics
from spherenet.regularizers.energy import hyperspherical_energy
from spherenet.regularizers.kernel_norms import KernelNorms
from spherenet.regularizers.orthogonality import orthogonality, orthogonality_minimum
from spherenet.regularizers.sphere_layers import sphere_layers

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
