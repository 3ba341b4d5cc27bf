"""Pure functions: angle functions g(θ), norms, and the slow reference of every operator."""

from spherenet.ops import angle_functions, angles, arguments, composite, geometry, norms, reference

__all__ = ["angle_functions", "angles", "arguments", "composite", "geometry", "norms", "reference"]
