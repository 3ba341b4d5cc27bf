"""Hessian spectra of networks by the Lanczos method, and a comparison of a small CNN with a SphereNet.

m products of a symmetric matrix H with vectors, started at a random vector, give a tridiagonal matrix T of m rows. Its
eigenvalues (Ritz values) θ approach the outer eigenvalues of H first. With the squared first components w of its
eigenvectors they form a quadrature of the whole spectrum: Σ w·f(θ) ≈ tr f(H)/p on average over starting vectors.

The Hessian of a network has many tiny eigenvalues and no distinguishable smallest non-zero one, so κ is not defined in
practice. The spread λ_max / mean|λ| replaces it here: 1 for a multiple of the identity, up to p for a single steep
direction.

`compare_networks` measures two things: the spectra of both networks at points of the same training, and how the Hessian
changes when the kernels of one layer are multiplied by c and those of the next by 1/c, which does not change the output
(Eq. 12 of docs/concepts.md). As for matrices there are three cases: the CNN, the SphereNet with raw kernels, and the
SphereNet with renormalized kernels; λ_max grows as c² in the first two and is constant in the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spherenet import backend
from spherenet.data import Progress
from spherenet.errors import InvalidArgument, TrainingError
from spherenet.layers import AngularHead
from spherenet.losses import SoftmaxLoss
from spherenet.models import Classifier, LayerFactory, PlainFeatures
from spherenet_paper.theory.conditioning import fitted_exponent
from spherenet_paper.theory.features import Digits, train

__all__ = [
    "HessianProduct",
    "MeasuredSpectrum",
    "NetworkComparison",
    "RescaledSpectrum",
    "Spectrum",
    "compare_networks",
    "lanczos",
    "loss_hessian",
    "rescaled",
    "small_network",
    "spectrum",
]

STEPS = 25
"""Products per starting vector; the error of λ_max is then well below one percent."""

EXHAUSTED = 1e-10
"""A next vector that is relatively shorter is rounding error: the reachable Krylov space is exhausted."""


@dataclass(frozen=True)
class HessianProduct:
    """H·v as a function of v, and the number of rows of H."""

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
        """Return the result for JSON."""
        return asdict(self)


def loss_hessian(model: nn.Module, images: Tensor, labels: Tensor) -> HessianProduct:
    """Return the Hessian of the loss `model(images, labels)` with respect to all trainable parameters.

    The graph of the gradient is built once and used for every product. The reference implementation is used, because
    second derivatives of the fused kernels are not faster.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with backend("reference"):
        loss, _ = model(images, labels)
        gradient = _flat(torch.autograd.grad(loss, parameters, create_graph=True))

    def times(vector: Tensor) -> Tensor:
        return _flat(torch.autograd.grad(gradient, parameters, vector, retain_graph=True, materialize_grads=True))

    return HessianProduct(gradient.numel(), times)


def lanczos(hessian: HessianProduct, steps: int, start: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Ritz values, smallest first, and their quadrature weights, which sum to 1.

    Every new vector is orthogonalized twice against all previous ones; otherwise rounding produces copies of converged
    values. The iteration ends early when the Krylov space is exhausted.

    Args:
        hessian: Matrix.
        steps: Number of products.
        start: Starting vector [p], not zero.
    """
    basis = [start / start.norm()]
    diagonal: list[Tensor] = []
    off_diagonal: list[Tensor] = []
    for _ in range(min(steps, hessian.rows)):
        product = hessian.times(basis[-1])
        diagonal.append(product @ basis[-1])
        previous = torch.stack(basis)
        length = product.norm()
        for _ in range(2):
            product = product - previous.mT @ (previous @ product)
        if product.norm() <= EXHAUSTED * length:
            break
        off_diagonal.append(product.norm())
        basis.append(product / product.norm())
    tridiagonal = torch.diag(torch.stack(diagonal))
    if len(diagonal) > 1:
        off = torch.stack(off_diagonal[: len(diagonal) - 1])
        tridiagonal = tridiagonal + torch.diag(off, 1) + torch.diag(off, -1)
    values, vectors = torch.linalg.eigh(tridiagonal)
    return values, vectors[0].square()


def spectrum(hessian: HessianProduct, *, steps: int = STEPS, probes: int, seed: int = 0) -> Spectrum:
    """Estimate the spectrum from `probes` random starting vectors in float64."""
    generator = torch.Generator().manual_seed(seed)
    largest, smallest, means = -torch.inf, torch.inf, []
    for _ in range(probes):
        start = torch.randn(hessian.rows, generator=generator, dtype=torch.float64)
        values, weights = lanczos(hessian, steps, start)
        largest, smallest = max(largest, float(values[-1])), min(smallest, float(values[0]))
        means.append(float((weights * values.abs()).sum()))
    mean = sum(means) / probes
    error = (sum((each - mean) ** 2 for each in means) / max(1, probes - 1) / probes) ** 0.5
    # If all units of a network are dead, its Hessian is zero.
    return Spectrum(hessian.rows, largest, smallest, mean, error, largest / mean if mean > 0 else 0.0)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


WIDTHS, FEATURES = (4, 6, 8), 16
MEASURED_DIGITS = 64
PROBES = 4
POINTS = 4
SCALES = (1.0, 2.0, 4.0, 8.0, 16.0)
FIT_FROM = 4.0
"""Below this scale, the steepest directions belong to other layers than the one with shrinking kernels."""
CNN, SPHERENET = "CNN", "SphereNet"


@dataclass(frozen=True)
class MeasuredSpectrum:
    """The spectrum of the loss of a network at an iteration of its training."""

    network: str
    step: int
    loss: float
    spectrum: Spectrum


@dataclass(frozen=True)
class RescaledSpectrum:
    """λ_max at (c·W_1, W_2/c) for every c, and the fitted exponent."""

    case: str
    c: tuple[float, ...]
    largest: tuple[float, ...]
    exponent: float
    expected: float


@dataclass(frozen=True)
class NetworkComparison:
    """The result of `compare_networks`."""

    operator: str
    batch_norm: bool
    measured: list[MeasuredSpectrum]
    rescaled: list[RescaledSpectrum]

    def as_dict(self) -> dict[str, Any]:
        """Return the result for JSON."""
        return asdict(self)


def small_network(operator: str | None, side: int, *, batch_norm: bool, seed: int) -> Classifier:
    """Return a cnn-3 with about a thousand parameters in float64; operator None gives the CNN."""
    torch.manual_seed(seed)
    layers = LayerFactory(operator=operator, batch_norm=batch_norm)
    features = PlainFeatures(layers, WIDTHS, 1, (side, side), depth=3, out_features=FEATURES)
    return Classifier(features, AngularHead(FEATURES, 10), SoftmaxLoss(), {}).double()


def compare_networks(
    operator: str = "cosine",
    *,
    steps: int,
    batch_norm: bool = False,
    seed: int = 0,
    progress: Progress = lambda done, total: None,
) -> NetworkComparison:
    """Train a CNN and a SphereNet on digits and measure spectra of the loss of 64 test digits.

    Spectra are measured at four points, the first one before training.

    Args:
        operator: Operator of the SphereNet.
        steps: Training iterations.
        batch_norm: Whether both networks have BatchNorm.
        seed: Seed of networks, batches and starting vectors.
        progress: Function called with (done, total).

    Raises:
        ValueError: steps < 1.
        TrainingError: The loss is not finite, or all units of a network are dead.
    """
    if steps < 1:
        raise InvalidArgument("steps", f"must be at least 1, got {steps}.")
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
    measured: list[MeasuredSpectrum] = []
    for name, model in networks.items():
        losses = train(model, digits, steps, seed)
        for before, point in zip([0, *points], points, strict=False):
            for _ in range(point - before):
                next(losses)
            loss = model(*measured_on)[0].item()
            measured.append(
                MeasuredSpectrum(
                    name, point, loss, spectrum(loss_hessian(model, *measured_on), probes=PROBES, seed=seed)
                )
            )
            tick()
    cases = [
        (CNN, networks[CNN], False, 2.0),
        (f"{SPHERENET}, raw", networks[SPHERENET], False, 2.0),
        (f"{SPHERENET}, renormalized", networks[SPHERENET], True, 0.0),
    ]
    rescaled_spectra = []
    for case, model, renormalize, expected in cases:
        largest = []
        for c in SCALES:
            moved = loss_hessian(rescaled(model, c, renormalize=renormalize), *measured_on)
            largest.append(spectrum(moved, probes=1, seed=seed).largest)
            tick()
        if min(largest) <= 0:
            raise TrainingError(f"{case}: the loss has no curvature because all units are dead; try another seed.")
        exponent = fitted_exponent(SCALES, largest, FIT_FROM)
        rescaled_spectra.append(RescaledSpectrum(case, SCALES, tuple(largest), exponent, expected))
    return NetworkComparison(operator, batch_norm, measured, rescaled_spectra)


def rescaled(model: Classifier, c: float, *, renormalize: bool) -> Classifier:
    """Return a copy with the kernels of the first convolution times c and of the second times 1/c.

    The outputs are the same. With `renormalize`, every kernel of both is then scaled to unit length, as the paper's
    proof assumes.
    """
    moved = deepcopy(model)
    first, second = _first_two_convolutions(moved)
    with torch.no_grad():
        for layer, scale in ((first, c), (second, 1 / c)):
            layer.weight.mul_(scale)
            if renormalize:
                layer.weight.div_(_kernel_norms(layer.weight))
    return moved


def _first_two_convolutions(model: nn.Module) -> Sequence[nn.Conv2d]:
    return [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)][:2]


def _kernel_norms(weight: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(weight, dim=(1, 2, 3), keepdim=True)
    return norms
