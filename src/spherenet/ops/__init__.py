"""Mathematics behind the layers and losses: norms, geometry, margins and the plain differentiable formulas."""
