"""The slow and obvious form of every loss: one sample and one class at a time (docs/concepts.md, Eq. 5 to 9).

This is the oracle behind every fast path in the tests. It is differentiable (away from θ = 0 and π, where
acos has no derivative), runs in any floating dtype and is meant for float64. Nothing else may use it.

A logit is described by two functions of one class j of one sample: `score` of its angle, and `target_score`,
which stands in its place for the label. Both take (θ_j, ‖x‖, ‖w_j‖).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from oracle.sphere_conv import g_cosine, theta

__all__ = [
    "annealed",
    "arcface",
    "cosface",
    "cross_entropy",
    "feature_penalties",
    "ga_softmax",
    "margin_softmax",
    "psi",
    "s_softmax",
    "sample_losses",
    "softmax",
    "sphereface2_losses",
    "w_softmax",
]

AngleOf = Callable[[Tensor], Tensor]
Score = Callable[[Tensor, Tensor, Tensor], Tensor]
Loss = tuple[Score, Score]


def psi(theta_: Tensor, m: float, g: AngleOf) -> Tensor:
    """ψ_m(θ) = g(mθ − jπ) − j·(g(0) − g(π)), j = ⌊mθ/π⌋, of one angle."""
    j = math.floor(m * theta_.item() / math.pi)
    zero = torch.zeros_like(theta_)
    return g(m * theta_ - j * math.pi) - j * (g(zero) - g(zero + math.pi))


def annealed(iteration: int, start: float, decay: float, floor: float) -> float:
    """λ = max(floor, start/(1 + decay·t))."""
    return max(floor, start / (1 + decay * iteration))


def softmax() -> Loss:
    """‖w‖‖x‖cos θ, no margin."""

    def score(theta_: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return w * x * torch.cos(theta_)

    return score, score


def w_softmax(g: AngleOf) -> Loss:
    """‖x‖·g(θ), no margin."""

    def score(theta_: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return x * g(theta_)

    return score, score


def ga_softmax(g: AngleOf, m: float, lambda_: float = 0.0) -> Loss:
    """‖x‖·g(θ); for the target ‖x‖·(λ·g(θ) + ψ_m(θ))/(1 + λ)."""

    def score(theta_: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return x * g(theta_)

    def target_score(theta_: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return x * (lambda_ * g(theta_) + psi(theta_, m, g)) / (1 + lambda_)

    return score, target_score


def s_softmax(g: AngleOf, s: float) -> Loss:
    """s·g(θ), no margin."""

    def score(theta_: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return s * g(theta_)

    return score, score


def cosface(m: float, s: float) -> Loss:
    """s·cos θ; for the target s·(cos θ − m)."""

    def target_score(theta_: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return s * (torch.cos(theta_) - m)

    return s_softmax(g_cosine, s)[0], target_score


def arcface(m: float, s: float) -> Loss:
    """s·cos θ; for the target s·cos(θ + m), beyond θ + m = π s·(−2 − cos(θ + m))."""

    def target_score(theta_: Tensor, x: Tensor, w: Tensor) -> Tensor:
        wide = theta_.item() + m > math.pi
        return s * (-2 - torch.cos(theta_ + m) if wide else torch.cos(theta_ + m))

    return s_softmax(g_cosine, s)[0], target_score


def cross_entropy(logits: Sequence[Tensor], q: Sequence[float], class_weight: Sequence[float]) -> Tensor:
    """−Σ_j weight_j · q_j · log(e^{z_j} / Σ_l e^{z_l}) of one sample."""
    total = torch.stack([torch.exp(z) for z in logits]).sum()
    terms = [-v * share * torch.log(torch.exp(z) / total) for z, share, v in zip(logits, q, class_weight, strict=True)]
    return torch.stack(terms).sum()


def sample_losses(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    loss: Loss,
    eps: float,
    class_weight: Sequence[float] | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The loss of each sample, by a loop over samples and one over classes.

    features: [N, in]. weight: [C, in]. labels: class indices [N], where the margin is on the label's class,
    or probabilities q [N, C], where each class takes q_j of its target score and 1 − q_j of its score.
    Label smoothing enters the cross entropy alone.
    """
    score, target_score = loss
    classes = len(weight)
    hard = not torch.is_floating_point(labels)
    losses = []
    for index, x in enumerate(features):
        share = [float(j == labels[index]) if hard else labels[index, j].item() for j in range(classes)]
        logits = []
        for j, w in enumerate(weight):
            norms = torch.sqrt((x * x).sum() + eps), torch.sqrt((w * w).sum() + eps)
            angle = theta(w, x, eps)
            z = share[j] * target_score(angle, *norms) + (1 - share[j]) * score(angle, *norms)
            logits.append(z if bias is None else z + bias[j])
        smoothed = [(1 - label_smoothing) * q + label_smoothing / classes for q in share]
        losses.append(cross_entropy(logits, smoothed, [1.0] * classes if class_weight is None else class_weight))
    return torch.stack(losses)


def margin_softmax(
    g: AngleOf,
    m: float,
    scale: float | None = None,
    form: str = "psi",
    detached: bool = False,
    lambda_: float = 0.0,
) -> Loss:
    """Scores of other classes and of the target class with a multiplicative margin; `scale` None stands for ‖x‖.

    The first score has a margin too if the form is "r2". `detached` takes the gradient of g.
    """

    def with_margin(theta_: Tensor) -> Tensor:
        if form == "psi":
            return psi(theta_, m, g)
        if form == "r1":
            return g(m * theta_) if m * theta_.item() < math.pi else g(torch.full_like(theta_, math.pi))
        return g(theta_ / m)

    def similarity(theta_: Tensor, has_margin: bool) -> Tensor:
        plain = g(theta_)
        if not has_margin:
            return plain
        value = (lambda_ * plain + with_margin(theta_)) / (1 + lambda_)
        return plain + (value - plain).detach() if detached else value

    def other_score(theta_: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return (x if scale is None else scale) * similarity(theta_, form == "r2")

    def target_score(theta_: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return (x if scale is None else scale) * similarity(theta_, form != "r2")

    return other_score, target_score


def feature_penalties(features: Tensor, target: float, form: str, eps: float) -> Tensor:
    """(‖x‖ − target)² or |‖x‖ − target| of each sample."""
    differences = [torch.sqrt((x * x).sum() + eps) - target for x in features]
    return torch.stack([d * d if form == "squared" else abs(d) for d in differences])


def sphereface2_losses(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    m: float,
    s: float,
    t: float,
    positive_weight: float,
    initial_bias: float,
    eps: float,
    detached: bool = False,
) -> Tensor:
    """SphereFace2 of each sample: one logistic loss per class, by a loop over samples and one over classes.

    labels: class indices [N], or probabilities [N, C] that weight the positive and the negative term of each class.
    """
    hard = not torch.is_floating_point(labels)
    losses = []
    for index, x in enumerate(features):
        total = torch.zeros((), dtype=x.dtype)
        for j, w in enumerate(weight):
            q = float(j == labels[index]) if hard else labels[index, j].item()
            c = torch.cos(theta(w, x, eps))
            g = 2 * ((c + 1) / 2) ** t - 1
            g = c + (g - c).detach() if detached else g
            z = s * (g - m * (2 * q - 1)) + initial_bias + (0 if bias is None else bias[j])
            total = total + positive_weight / s * q * torch.log(1 + torch.exp(-z))
            total = total + (1 - positive_weight) / s * (1 - q) * torch.log(1 + torch.exp(z))
        losses.append(total)
    return torch.stack(losses)
