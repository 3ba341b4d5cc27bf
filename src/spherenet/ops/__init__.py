"""Pure functions: angle functions g(θ), norms, and the slow reference of every operator."""
