"""Scale of the logits of losses with unit features, from the number of classes."""

from __future__ import annotations

import math

__all__ = ["default_scale"]

CONFIDENCE = 0.999
"""Probability that a feature at 45° from its class must be able to reach."""

SMALLEST_SCALE, LARGEST_SCALE = 10.0, 70.0
"""Range in which S-Softmax trains according to the paper."""


def default_scale(num_classes: int, similarity_at_45: float = math.sqrt(0.5)) -> float:
    """Return the scale s of S-Softmax (Eq. 8) for a number of classes.

        s = log(p·(C − 1)/(1 − p)) / g(π/4) with p = 0.999, limited to [10, 70]

    Logits lie in [−s, s], so s bounds the probability of a class and must grow with the number of classes. A feature
    at 45° from its class and at 90° from the others has the probability
    p = e^{s·g(π/4)} / (e^{s·g(π/4)} + C − 1), which gives the formula. With a smaller s the loss still moves features
    that are already well placed; with a much larger one the gradient vanishes as soon as a class leads. Values for
    g = cosine: 12.9 for 10 classes, 19.5 for 1,000 and 26.0 for 100,000. For g = linear: 18.2, 27.6 and 36.8.

    Args:
        num_classes: Number of classes C.
        similarity_at_45: g(π/4) of the angle function.
    """
    scale = math.log(CONFIDENCE / (1 - CONFIDENCE) * (num_classes - 1)) / similarity_at_45
    return min(LARGEST_SCALE, max(SMALLEST_SCALE, scale))
