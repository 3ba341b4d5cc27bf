"""Spectra of Hessians too large to write down, from products with vectors alone: Lanczos's method.

m products with a symmetric matrix H, started at a random vector, give a tridiagonal matrix T of m rows. Its eigenvalues
(Ritz values) θ approach the outer eigenvalues of H first; with the squares w of the first components of its
eigenvectors they are a quadrature of the whole spectrum, Σ w·f(θ) ≈ tr f(H)/p on average over starting vectors.

What to compare networks by: a network's Hessian has no smallest non-zero eigenvalue that could be told from its many
tiny ones, so κ does not exist in practice. Its stand-in here is the spread λ_max / mean|λ|: 1 for a multiple of the
identity, up to p for a single steep direction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spherenet import functional

__all__ = ["HessianProduct", "Spectrum", "lanczos", "loss_hessian", "spectrum"]

STEPS = 25
"""Products a probe: λ_max is then right to well under a percent."""

EXHAUSTED = 1e-10
"""A next vector this short against H itself is rounding: the space that H can reach from the start is used up."""


@dataclass(frozen=True)
class HessianProduct:
    """H·v as a function of v, for H of so many rows."""

    rows: int
    times: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Spectrum:
    """Largest and smallest eigenvalue, mean of |λ| with the standard error of its estimate, and λ_max/mean|λ|."""

    parameters: int
    largest: float
    smallest: float
    mean_magnitude: float
    mean_error: float
    spread: float

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON takes."""
        return asdict(self)


def loss_hessian(model: nn.Module, images: Tensor, labels: Tensor) -> HessianProduct:
    """The Hessian of `model(images, labels)`'s loss by all trained parameters, as products with flat vectors.

    One graph of the gradient is built and walked for every product. The reference is used in place of the fused
    kernels, whose second derivatives are no faster.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with functional.backend("reference"):
        loss, _ = model(images, labels)
        gradient = _flat(torch.autograd.grad(loss, parameters, create_graph=True))

    def times(vector: Tensor) -> Tensor:
        return _flat(torch.autograd.grad(gradient, parameters, vector, retain_graph=True, materialize_grads=True))

    return HessianProduct(gradient.numel(), times)


def lanczos(hessian: HessianProduct, steps: int, start: Tensor) -> tuple[Tensor, Tensor]:
    """Ritz values, smallest first, and their quadrature weights, which sum to 1.

    start: a vector [p], not zero. Every new vector is made orthogonal to all before it, twice: without that, rounding
    lets converged values come back as copies. Ends early where the reachable space is used up.
    """
    basis = [start / start.norm()]
    diagonal: list[Tensor] = []
    beside: list[Tensor] = []
    for _ in range(min(steps, hessian.rows)):
        product = hessian.times(basis[-1])
        diagonal.append(product @ basis[-1])
        known = torch.stack(basis)
        length = product.norm()
        for _ in range(2):
            product = product - known.mT @ (known @ product)
        if product.norm() <= EXHAUSTED * length:
            break
        beside.append(product.norm())
        basis.append(product / product.norm())
    tridiagonal = torch.diag(torch.stack(diagonal))
    if len(diagonal) > 1:
        off = torch.stack(beside[: len(diagonal) - 1])
        tridiagonal = tridiagonal + torch.diag(off, 1) + torch.diag(off, -1)
    values, vectors = torch.linalg.eigh(tridiagonal)
    return values, vectors[0].square()


def spectrum(hessian: HessianProduct, *, steps: int = STEPS, probes: int, seed: int = 0) -> Spectrum:
    """Estimate the spectrum from `probes` random starts in float64; the same numbers for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    largest, smallest, means = -torch.inf, torch.inf, []
    for _ in range(probes):
        start = torch.randn(hessian.rows, generator=generator, dtype=torch.float64)
        values, weights = lanczos(hessian, steps, start)
        largest, smallest = max(largest, float(values[-1])), min(smallest, float(values[0]))
        means.append(float((weights * values.abs()).sum()))
    mean = sum(means) / probes
    error = (sum((each - mean) ** 2 for each in means) / max(1, probes - 1) / probes) ** 0.5
    # A network whose every unit is dead has a Hessian of zeros: nothing is spread.
    return Spectrum(hessian.rows, largest, smallest, mean, error, largest / mean if mean > 0 else 0.0)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
