"""Probability distributions on hyperspheres, as `torch.distributions`.

- `HypersphericalUniform`: every direction is equally likely.
- `VonMisesFisher`: the density grows with exp(κ μ·x), as a softmax over cosines assumes.
- `PowerSpherical`: the density grows with (1 + μ·x)^κ; similar, with cheaper samples.

`torch.distributions.kl_divergence` knows the closed forms: both to and from the uniform distribution, from one von
Mises–Fisher distribution to another, and from a power spherical to a von Mises–Fisher distribution.
"""

from spherenet.distributions import divergences as _registers_divergences  # noqa: F401
from spherenet.distributions.power_spherical import PowerSpherical
from spherenet.distributions.uniform import HypersphericalUniform
from spherenet.distributions.von_mises_fisher import VonMisesFisher

__all__ = ["HypersphericalUniform", "PowerSpherical", "VonMisesFisher"]
