"""Table of losses for parametrized tests, each with its formula from the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from oracle import losses as reference_losses
from oracle import sphere_conv as reference
from spherenet.angles import AngleFunction, CustomAngle, LinearAngle, make_angle
from spherenet.losses import (
    AngularLoss,
    Annealing,
    ArcFaceLoss,
    ASoftmaxLoss,
    CosFaceLoss,
    GASoftmaxLoss,
    SoftmaxLoss,
    SSoftmaxLoss,
    WSoftmaxLoss,
)


def g_parabola(theta: Tensor) -> Tensor:
    """A user-defined g: decreasing, with g(0) − g(π) = 3."""
    return 1 - 3 * (theta / math.pi) ** 2


class Halved(AngleFunction):
    """A user-defined g as a class: half of the linear one."""

    def forward(self, cosine: Tensor) -> Tensor:
        return LinearAngle()(cosine) / 2


def g_halved(theta: Tensor) -> Tensor:
    return reference.g_linear(theta) / 2


ANGLES: dict[str, tuple[Callable[[], AngleFunction], Callable[[Tensor], Tensor]]] = {
    "linear": (partial(make_angle, "linear"), reference.g_linear),
    "cosine": (partial(make_angle, "cosine"), reference.g_cosine),
    "sigmoid-0.1": (partial(make_angle, "sigmoid", 0.1), partial(reference.g_sigmoid, k=0.1)),
    "sigmoid-0.3": (partial(make_angle, "sigmoid", 0.3), partial(reference.g_sigmoid, k=0.3)),
    "sigmoid-0.7": (partial(make_angle, "sigmoid", 0.7), partial(reference.g_sigmoid, k=0.7)),
    "learnable-0.5": (partial(make_angle, "learnable", 0.5, dtype=torch.float64), partial(reference.g_sigmoid, k=0.5)),
    "parabola": (partial(CustomAngle, g_parabola), g_parabola),
    "halved": (Halved, g_halved),
}
MARGINS = (1, 1.5, 2, 3, 4, 4.7)


@dataclass(frozen=True)
class LossCase:
    """A loss as a user creates it, and its formula."""

    name: str
    make: Callable[..., AngularLoss]
    formula: reference_losses.Loss

    def __str__(self) -> str:
        return self.name


def _annealed(make_angle: Callable[[], AngleFunction], **options: object) -> AngularLoss:
    loss = GASoftmaxLoss(make_angle(), 4, annealing=Annealing(20, 0.5, 2), **options)
    loss.set_step(3)
    return loss


def _cases() -> list[LossCase]:
    cases = [LossCase("softmax", SoftmaxLoss, reference_losses.softmax())]
    for name, (make, g) in ANGLES.items():
        cases += [
            LossCase(f"w-{name}", lambda make=make, **kw: WSoftmaxLoss(make(), **kw), reference_losses.w_softmax(g)),
            LossCase(
                f"s-{name}", lambda make=make, **kw: SSoftmaxLoss(make(), 7, **kw), reference_losses.s_softmax(g, 7)
            ),
        ]
        for m in (1.5, 4):
            cases.append(
                LossCase(
                    f"ga-{name}-{m}",
                    lambda make=make, m=m, **kw: GASoftmaxLoss(make(), m, annealing=None, **kw),
                    reference_losses.ga_softmax(g, m),
                )
            )
    for m in (1, 2, 3, 4):
        formula = reference_losses.ga_softmax(reference.g_cosine, m)
        cases.append(LossCase(f"a-{m}", partial(ASoftmaxLoss, m, annealing=None), formula))
    for name in ("linear", "cosine", "sigmoid-0.3"):
        angle, g = ANGLES[name]
        formula = reference_losses.ga_softmax(g, 4, reference_losses.annealed(3, 20, 0.5, 2))
        cases.append(LossCase(f"annealed-{name}", partial(_annealed, angle), formula))
    cases += [
        LossCase("cosface", partial(CosFaceLoss, 0.35, 9), reference_losses.cosface(0.35, 9)),
        LossCase("arcface", partial(ArcFaceLoss, 0.5, 9), reference_losses.arcface(0.5, 9)),
        # With this margin most targets have θ + m > π.
        LossCase("arcface-wide", partial(ArcFaceLoss, 2.0, 9), reference_losses.arcface(2.0, 9)),
    ]
    return cases


LOSSES = _cases()
COMMON = [case for case in LOSSES if case.name in {
    "softmax", "w-cosine", "w-linear", "w-sigmoid-0.3", "ga-linear-4", "ga-sigmoid-0.3-4", "a-4", "annealed-linear",
    "s-cosine", "cosface", "arcface",
}]  # fmt: skip
"""One case per public loss, for tests that do not need every g and m."""


def problem(
    samples: int = 5, features: int = 4, classes: int = 6, bias: bool = True, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return random features, class weights and bias, all of which require gradients, and labels."""
    x = torch.randn(samples, features, dtype=dtype, requires_grad=True)
    w = torch.randn(classes, features, dtype=dtype, requires_grad=True)
    b = torch.randn(classes, dtype=dtype, requires_grad=True) if bias else None
    return x, w, b, torch.randint(classes, (samples,))
