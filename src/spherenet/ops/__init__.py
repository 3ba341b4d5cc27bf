"""Pure functions: angle functions g(θ), norms, and the slow reference of every operator."""

from spherenet.ops import (
    angle_functions,
    angles,
    angular_output,
    arguments,
    composite,
    geometry,
    margins,
    norms,
    reference,
    reference_losses,
)

__all__ = ["angle_functions", "angles", "angular_output", "arguments", "composite", "geometry", "margins", "norms",
           "reference", "reference_losses"]  # fmt: skip
