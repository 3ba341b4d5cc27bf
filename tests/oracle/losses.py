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
    "adaface",
    "annealed",
    "arcface",
    "cosface",
    "cross_entropy",
    "curricularface_losses",
    "elasticface_losses",
    "feature_penalties",
    "ga_softmax",
    "magface",
    "magface_penalties",
    "margin_softmax",
    "psi",
    "s_softmax",
    "sample_losses",
    "softmax",
    "sphereface2_losses",
    "subcenter_arcface_losses",
    "uniface_losses",
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


def adaface(m: float, s: float, h: float, mean: float, std: float) -> Loss:
    """s·cos θ; for the target s·(cos(θ − m·q) − m·(1 + q)), q = clip(h·(‖x‖ − mean)/std, −1, 1) without a gradient."""

    def target_score(theta_: Tensor, x: Tensor, w: Tensor) -> Tensor:
        q = min(1.0, max(-1.0, h * (min(100.0, max(1e-3, x.item())) - mean) / (std + 1e-3)))
        return s * (torch.cos(max(theta_ - m * q, torch.zeros_like(theta_))) - m * (1 + q))

    return s_softmax(g_cosine, s)[0], target_score


def magface(m: float, largest_m: float, s: float, smallest_norm: float, largest_norm: float) -> Loss:
    """s·cos θ; for the target s·cos(θ + m(a)), with m(a) linear in a = ‖x‖ between two norms."""

    def target_score(theta_: Tensor, x: Tensor, w: Tensor) -> Tensor:
        share = (x - smallest_norm) / (largest_norm - smallest_norm)
        share = torch.zeros_like(x) if share < 0 else torch.ones_like(x) if share > 1 else share
        phi = theta_ + m + (largest_m - m) * share
        return s * (-2 - torch.cos(phi) if phi.item() > math.pi else torch.cos(phi))

    return s_softmax(g_cosine, s)[0], target_score


def magface_penalties(features: Tensor, weight: float, smallest_norm: float, largest_norm: float, eps: float) -> Tensor:
    """weight·(1/a + a/largest²) of each sample, a = ‖x‖ between two norms."""
    penalties = []
    for x in features:
        a = torch.sqrt((x * x).sum() + eps)
        a = torch.full_like(a, smallest_norm) if a < smallest_norm else a
        a = torch.full_like(a, largest_norm) if a > largest_norm else a
        penalties.append(weight * (1 / a + a / largest_norm**2))
    return torch.stack(penalties)


def curricularface_losses(
    features: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, m: float, s: float, t: float, eps: float
) -> Tensor:
    """s·cos(θ_y + m) for the target; for others s·cos θ_j, times t + cos θ_j if cos θ_j > cos(θ_y + m)."""
    losses = []
    for x, y in zip(features, labels.tolist(), strict=True):
        angles = [theta(w, x, eps) for w in weight]
        wide = angles[y].item() + m > math.pi
        target = -2 - torch.cos(angles[y] + m) if wide else torch.cos(angles[y] + m)
        logits = []
        for j, angle in enumerate(angles):
            c = torch.cos(angle)
            z = target if j == y else c * (t + c) if c > target else c
            logits.append(s * z + (0 if bias is None else bias[j]))
        losses.append(cross_entropy(logits, [float(j == y) for j in range(len(weight))], [1.0] * len(weight)))
    return torch.stack(losses)


def elasticface_losses(
    features: Tensor, weight: Tensor, labels: Tensor, margins: Sequence[float], s: float, form: str, eps: float
) -> Tensor:
    """ArcFace or CosFace with another margin for each sample."""
    losses = []
    for x, y, m in zip(features, labels, margins, strict=True):
        loss = arcface(m, s) if form == "arc" else cosface(m, s)
        losses.append(sample_losses(x[None], weight, None, y[None], loss, eps)[0])
    return torch.stack(losses)


def subcenter_arcface_losses(
    features: Tensor, weight: Tensor, labels: Tensor, m: float, s: float, eps: float
) -> Tensor:
    """ArcFace whose angle of a class is the smallest one to its directions; weight: [C, directions, in]."""
    losses = []
    for x, y in zip(features, labels.tolist(), strict=True):
        angles = [min((theta(w, x, eps) for w in directions), key=lambda a: a.item()) for directions in weight]
        score, target_score = arcface(m, s)
        one = torch.ones_like(angles[0])
        logits = [(target_score if j == y else score)(angle, one, one) for j, angle in enumerate(angles)]
        losses.append(cross_entropy(logits, [float(j == y) for j in range(len(weight))], [1.0] * len(weight)))
    return torch.stack(losses)


def uniface_losses(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    m: float,
    s: float,
    negative_weight: float,
    threshold: Tensor,
    eps: float,
) -> Tensor:
    """log(1 + e^{b − s(cos θ_y − m)}) + λ·Σ_{j≠y} log(1 + e^{s·cos θ_j − b}) of each sample."""
    hard = not torch.is_floating_point(labels)
    losses = []
    for index, x in enumerate(features):
        total = torch.zeros((), dtype=x.dtype)
        for j, w in enumerate(weight):
            q = float(j == labels[index]) if hard else labels[index, j].item()
            z = s * (torch.cos(theta(w, x, eps)) - q * m) - threshold + (0 if bias is None else bias[j])
            total = total + q * torch.log(1 + torch.exp(-z)) + negative_weight * (1 - q) * torch.log(1 + torch.exp(z))
        losses.append(total)
    return torch.stack(losses)
