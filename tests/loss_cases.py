"""Table of losses for parametrized tests, each with its formula from the oracle."""

from __future__ import annotations

import itertools
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
    AdaFaceLoss,
    AngularLoss,
    Annealing,
    ArcFaceLoss,
    ASoftmaxLoss,
    CosFaceLoss,
    ElasticFaceLoss,
    GASoftmaxLoss,
    MagFaceLoss,
    MarginLoss,
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
    """A loss as a user creates it, and its formula.

    Attributes:
        name: Name of the case.
        make: Function that creates the loss with options of the cross entropy.
        formula: Scores of other classes and of the target class, with their margins.
        score: Score of a class without labels; None for that of other classes.
        detached: Whether the gradient is not the derivative of the value.
    """

    name: str
    make: Callable[..., AngularLoss]
    formula: reference_losses.Loss
    score: reference_losses.Score | None = None
    detached: bool = False

    def __str__(self) -> str:
        return self.name


def _annealed(make_angle: Callable[[], AngleFunction], **options: object) -> AngularLoss:
    loss = GASoftmaxLoss.paper(angle=make_angle(), annealing=Annealing(20, 0.5, 2), **options)
    loss.set_step(3)
    return loss


def _with_lambda(value: float, make: Callable[..., MarginLoss], **options: object) -> MarginLoss:
    loss = make(**options)
    loss.lambda_ = value
    return loss


def _paper_cases() -> list[LossCase]:
    """The losses as the paper prints them: scale ‖x‖, full gradient of the margin."""
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
                    lambda make=make, m=m, **kw: GASoftmaxLoss.paper(angle=make(), m=m, annealing=None, **kw),
                    reference_losses.ga_softmax(g, m),
                )
            )
    for m in (1, 2, 3, 4):
        formula = reference_losses.ga_softmax(reference.g_cosine, m)
        cases.append(LossCase(f"a-{m}", partial(ASoftmaxLoss.paper, m=m, annealing=None), formula))
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


def _option_cases() -> list[LossCase]:
    """The options of multiplicative margins, combined: scale, gradient, form and λ."""
    cases = []
    forms = ("psi", "r1", "r2")
    combinations = [("linear", *rest) for rest in itertools.product(forms, ("norm", 7), ("full", "detached"))]
    combinations += [
        (name, form, scale, gradient)
        for name in ("cosine", "sigmoid-0.3", "learnable-0.5", "parabola")
        for form in forms
        for scale, gradient in ((7, "full"), ("norm", "detached"))
    ]
    for name, form, scale, gradient in combinations:
        angle, g = ANGLES[name]
        s, detached = (None, 7)[scale == 7], gradient == "detached"
        options = {"scale": scale, "margin_gradient": gradient, "form": form}
        cases.append(
            LossCase(
                f"{name}-{form}-{scale}-{gradient}",
                lambda angle=angle, options=options, **kw: GASoftmaxLoss(angle(), 1.7, **options, **kw),
                reference_losses.margin_softmax(g, 1.7, s, form, detached),
                reference_losses.margin_softmax(g, 1, s)[0],
                detached,
            )
        )
    for form in ("psi", "r1", "r2"):
        cases.append(
            LossCase(
                f"s-linear-{form}-lambda-2",
                partial(_with_lambda, 2.0, partial(SSoftmaxLoss, "linear", 5, m=3, margin_gradient="full", form=form)),
                reference_losses.margin_softmax(reference.g_linear, 3, 5, form, lambda_=2.0),
                reference_losses.s_softmax(reference.g_linear, 5)[0],
            )
        )
    score, target = reference_losses.arcface(0.5, 9)
    plain = reference_losses.s_softmax(reference.g_cosine, 9)[0]

    def detached_arcface(*arguments: Tensor) -> Tensor:
        return plain(*arguments) + (target(*arguments) - plain(*arguments)).detach()

    cases.append(
        LossCase(
            "arcface-detached",
            partial(ArcFaceLoss, 0.5, 9, margin_gradient="detached"),
            (score, detached_arcface),
            detached=True,
        )
    )
    return cases


def _adaface(**options: object) -> AngularLoss:
    """Return AdaFace in evaluation mode, with statistics for which some features have every quality."""
    loss = AdaFaceLoss(0.4, 9, 0.333, **options).eval()
    loss.norm_mean.fill_(2.0)
    loss.norm_std.fill_(0.25)
    return loss


def _elasticface(form: str, **options: object) -> AngularLoss:
    return ElasticFaceLoss(None, 9, form=form, **options).eval()


def _face_cases() -> list[LossCase]:
    """Margins of face recognition that depend on the norm of the feature, or are random in training mode."""
    magface = partial(MagFaceLoss, 0.45, 9, 0.8, 1.0, 3.0, 0.0)
    return [
        LossCase("adaface", _adaface, reference_losses.adaface(0.4, 9, 0.333, 2.0, 0.25), detached=True),
        LossCase("magface", magface, reference_losses.magface(0.45, 0.8, 9, 1.0, 3.0)),
        LossCase("elasticface", partial(_elasticface, "arc"), reference_losses.arcface(0.5, 9)),
        LossCase("elasticface-cos", partial(_elasticface, "cos"), reference_losses.cosface(0.35, 9)),
    ]


LOSSES = _paper_cases() + _option_cases() + _face_cases()
COMMON = [case for case in LOSSES if case.name in {
    "softmax", "w-cosine", "w-linear", "w-sigmoid-0.3", "ga-linear-4", "ga-sigmoid-0.3-4", "a-4", "annealed-linear",
    "s-cosine", "cosface", "arcface", "linear-psi-7-detached", "linear-psi-norm-detached", "cosine-r1-7-full",
    "cosine-r2-7-full", "sigmoid-0.3-r2-norm-detached", "adaface", "magface",
}]  # fmt: skip
"""One case per public loss and margin form, for tests that do not need every g and m."""


def problem(
    samples: int = 5, features: int = 4, classes: int = 6, bias: bool = True, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return random features, class weights and bias, all of which require gradients, and labels."""
    x = torch.randn(samples, features, dtype=dtype, requires_grad=True)
    w = torch.randn(classes, features, dtype=dtype, requires_grad=True)
    b = torch.randn(classes, dtype=dtype, requires_grad=True) if bias else None
    return x, w, b, torch.randint(classes, (samples,))
