"""Spectra of Hessians too large to write down, from products with vectors alone: Lanczos's method.

m products with a symmetric matrix H, started at a random vector, give a tridiagonal matrix T of m rows. Its eigenvalues
(Ritz values) θ approach the outer eigenvalues of H first; with the squares w of the first components of its
eigenvectors they are a quadrature of the whole spectrum, Σ w·f(θ) ≈ tr f(H)/p on average over starting vectors.

What to compare networks by: a network's Hessian has no smallest non-zero eigenvalue that could be told from its many
tiny ones, so κ does not exist in practice. Its stand-in here is the spread λ_max / mean|λ|: 1 for a multiple of the
identity, up to p for a single steep direction.

The lemmas on real layers: Hessian spectra of a small CNN and its SphereNet twin, during training and rescaled.

Two questions. Is a SphereNet's loss better conditioned along its way? (`Measured`, at points of the same training of
both.) And does the move of the lemmas, kernels of one layer by c and of the next by 1/c, which changes no output,
change the Hessian? (`Rescaled`.) As for matrices there are three cases: the CNN, the SphereNet with the raw kernels,
and the SphereNet with its kernels brought back to their length; both first grow as c², the last does not move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spherenet import functional
from spherenet.data.splits import Progress
from spherenet.errors import TrainingError
from spherenet.layers import AngularHead
from spherenet.losses import SoftmaxLoss
from spherenet.models import Classifier
from spherenet.models.layer_factory import LayerFactory
from spherenet.models.networks import PlainFeatures
from spherenet.theory.conditioning import fitted_exponent
from spherenet.theory.features import Digits, train

__all__ = [
    "HessianProduct",
    "Measured",
    "Rescaled",
    "Spectrum",
    "TwinReport",
    "compare_twins",
    "lanczos",
    "loss_hessian",
    "rescaled",
    "small_network",
    "spectrum",
]

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


WIDTHS, FEATURES = (4, 6, 8), 16
MEASURED_DIGITS = 64
PROBES = 4
POINTS = 4
SCALES = (1.0, 2.0, 4.0, 8.0, 16.0)
FIT_FROM = 4.0
"""Below, the steepest directions are those of other layers than the one whose kernels shrink."""
CNN, SPHERENET = "CNN", "SphereNet"


@dataclass(frozen=True)
class Measured:
    """The spectrum of a network's loss at an iteration of its training."""

    network: str
    step: int
    loss: float
    spectrum: Spectrum


@dataclass(frozen=True)
class Rescaled:
    """λ_max at (c·W_1, W_2/c) for every c, and the exponent fitted to it."""

    case: str
    c: tuple[float, ...]
    largest: tuple[float, ...]
    exponent: float
    expected: float


@dataclass(frozen=True)
class TwinReport:
    """What `compare_twins` found."""

    operator: str
    batch_norm: bool
    measured: list[Measured]
    rescaled: list[Rescaled]

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON takes."""
        return asdict(self)


def small_network(operator: str | None, side: int, *, batch_norm: bool, seed: int) -> Classifier:
    """A cnn-3 of about a thousand parameters in float64; operator None for the CNN twin."""
    torch.manual_seed(seed)
    layers = LayerFactory(operator=operator, batch_norm=batch_norm)
    features = PlainFeatures(layers, WIDTHS, 1, (side, side), depth=3, out_features=FEATURES)
    return Classifier(features, AngularHead(FEATURES, 10), SoftmaxLoss(), {}).double()


def compare_twins(
    operator: str = "cosine",
    *,
    steps: int,
    batch_norm: bool = False,
    seed: int = 0,
    progress: Progress = lambda done, total: None,
) -> TwinReport:
    """Train both twins on digits and take spectra of the loss of the same 64 test digits on the way and at the end.

    Spectra are taken at four points, the first before training. ValueError for fewer than one step; TrainingError
    where training fails.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}.")
    digits = Digits(torch.float64, shrink=2)
    measured_on = digits.test(MEASURED_DIGITS)
    points = sorted({round(steps * index / (POINTS - 1)) for index in range(POINTS)})
    total = 2 * len(points) + 3 * len(SCALES)
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    progress(0, total)
    networks = {
        CNN: small_network(None, digits.side, batch_norm=batch_norm, seed=seed),
        SPHERENET: small_network(operator, digits.side, batch_norm=batch_norm, seed=seed),
    }
    measured: list[Measured] = []
    for name, model in networks.items():
        losses = train(model, digits, steps, seed)
        for before, point in zip([0, *points], points, strict=False):
            for _ in range(point - before):
                next(losses)
            loss = model(*measured_on)[0].item()
            measured.append(
                Measured(name, point, loss, spectrum(loss_hessian(model, *measured_on), probes=PROBES, seed=seed))
            )
            tick()
    cases = [
        (CNN, networks[CNN], False, 2.0),
        (f"{SPHERENET}, raw", networks[SPHERENET], False, 2.0),
        (f"{SPHERENET}, renormalised", networks[SPHERENET], True, 0.0),
    ]
    found = []
    for case, model, renormalise, expected in cases:
        largest = []
        for c in SCALES:
            moved = loss_hessian(rescaled(model, c, renormalise=renormalise), *measured_on)
            largest.append(spectrum(moved, probes=1, seed=seed).largest)
            tick()
        if min(largest) <= 0:
            raise TrainingError(f"{case}: the loss has no curvature left, all units are dead; try another seed.")
        found.append(Rescaled(case, SCALES, tuple(largest), fitted_exponent(SCALES, largest, FIT_FROM), expected))
    return TwinReport(operator, batch_norm, measured, found)


def rescaled(model: Classifier, c: float, *, renormalise: bool) -> Classifier:
    """A copy with the kernels of the first convolution times c, of the second by 1/c; its outputs are the same.

    renormalise: afterwards every kernel of both is brought to unit length, as the paper's proof assumes.
    """
    moved = deepcopy(model)
    first, second = _first_two_convolutions(moved)
    with torch.no_grad():
        for layer, scale in ((first, c), (second, 1 / c)):
            layer.weight.mul_(scale)
            if renormalise:
                layer.weight.div_(_kernel_norms(layer.weight))
    return moved


def _first_two_convolutions(model: nn.Module) -> Sequence[nn.Conv2d]:
    return [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)][:2]


def _kernel_norms(weight: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(weight, dim=(1, 2, 3), keepdim=True)
    return norms
