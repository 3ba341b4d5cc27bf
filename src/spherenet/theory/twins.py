"""The lemmas on real layers: Hessian spectra of a small CNN and its SphereNet twin, during training and rescaled.

Two questions. Is a SphereNet's loss better conditioned along its way? (`Measured`, at points of the same training of
both.) And does the move of the lemmas, kernels of one layer by c and of the next by 1/c, which changes no output,
change the Hessian? (`Rescaled`.) As for matrices there are three cases: the CNN, the SphereNet with the raw kernels,
and the SphereNet with its kernels brought back to their length; both first grow as c², the last does not move.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spherenet.data.split import Progress
from spherenet.errors import TrainingError
from spherenet.layers import AngularHead
from spherenet.losses import SoftmaxLoss
from spherenet.models import Classifier
from spherenet.models.convolutions import Convolutions
from spherenet.models.plain import PlainFeatures
from spherenet.theory.conditioning import fitted_exponent
from spherenet.theory.digits import Digits, train
from spherenet.theory.spectra import Spectrum, loss_hessian, spectrum

__all__ = ["Measured", "Rescaled", "TwinReport", "compare_twins", "rescaled", "small_network"]

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
    convolutions = Convolutions(operator=operator, batch_norm=batch_norm)
    features = PlainFeatures(convolutions, 3, WIDTHS, 1, (side, side), FEATURES)
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
