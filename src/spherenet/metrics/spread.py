"""How features are spread over the sphere: alignment, uniformity and neural collapse.

Features and labels may be tensors, numpy arrays or lists. Results are computed in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spherenet._util.validation import require_positive
from spherenet.errors import InvalidArgument
from spherenet.metrics.arrays import as_labels, as_matrix, in_blocks, unit_rows

__all__ = ["NeuralCollapse", "alignment", "neural_collapse", "uniformity"]


def alignment(first: Any, second: Any, power: float = 2.0) -> float:
    """Return the mean over pairs of ‖x̂ − ŷ‖^power (Wang and Isola, ICML 2020): 0 if partners have the same direction.

    Args:
        first: Embeddings [N, D].
        second: Embeddings of the same samples in another view, or of partners of the same class [N, D].
        power: Exponent > 0.

    Raises:
        TypeError, ValueError: As in `pair_similarities`, or the power is not greater than 0.
    """
    x, y = as_matrix("first", first), as_matrix("second", second)
    if x.shape != y.shape:
        raise InvalidArgument("second", f"must have the shape {list(x.shape)} of first, got {list(y.shape)}.")
    difference = unit_rows(x.double()) - unit_rows(y.double())
    return float(difference.square().sum(1).pow(require_positive("power", power) / 2).mean())


def uniformity(embeddings: Any, t: float = 2.0) -> float:
    """Return log mean over i ≠ j of exp(−t·‖x̂_i − x̂_j‖²) (Wang and Isola, ICML 2020).

    It is 0 if all embeddings have the same direction, and smaller the more evenly they are spread over the sphere.

    Args:
        embeddings: Embeddings [N, D] of at least two images.
        t: Sharpness > 0 of the kernel.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: There are fewer than two embeddings, a value is not finite, or t is not greater than 0.
    """
    t = require_positive("t", t)
    units = unit_rows(as_matrix("embeddings", embeddings).double())
    count = len(units)
    if count < 2:
        raise InvalidArgument("embeddings", f"must have at least two rows, got {count}.")
    log_sums = []
    for rows in in_blocks(torch.arange(count), count):
        exponents = -2 * t * (1 - units[rows] @ units.T)
        exponents[torch.arange(len(rows)), rows] = -math.inf
        log_sums.append(exponents.logsumexp(1))
    return float(torch.cat(log_sums).logsumexp(0)) - math.log(count * (count - 1))


@dataclass(frozen=True)
class NeuralCollapse:
    """How close features are to neural collapse (Papyan et al., PNAS 2020). All angles are in radians.

    Means of classes are relative to the mean of the class means. All values but the angle between classes are 0 at
    collapse.

    Attributes:
        within_class_angle: Mean angle between a feature and the mean of its class, both relative to the global mean.
        between_class_angle: Mean angle between the means of two classes; acos(−1/(C − 1)) at collapse.
        smallest_between_class_angle: Smallest angle between the means of two classes.
        simplex_distance: Root mean square difference between the cosines of class means and those of a simplex,
            −1/(C − 1).
        norm_variation: Standard deviation of the norms of the class means, divided by their mean.
        weight_angle: Mean angle between the weight of a class and its mean; None without weights.
    """

    within_class_angle: float
    between_class_angle: float
    smallest_between_class_angle: float
    simplex_distance: float
    norm_variation: float
    weight_angle: float | None


def neural_collapse(features: Any, labels: Any, weight: Any = None) -> NeuralCollapse:
    """Return angles within and between classes, and the distance of class means from a simplex.

    Args:
        features: Features [N, D].
        labels: Their classes: N numbers or strings, of at least two classes.
        weight: Class weights [C, D] in the order of the sorted labels, or None. Their mean is subtracted.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: Shapes do not fit, a value is not finite, there is only one class, or a class mean equals the
            global mean, so that it has no direction.
    """
    x = as_matrix("features", features).double()
    classes, indices = np.unique(as_labels("labels", labels, len(x)), return_inverse=True)
    if len(classes) < 2:
        raise InvalidArgument("labels", f"must have at least two classes, got {len(classes)}.")
    index = torch.from_numpy(indices)
    sums = x.new_zeros(len(classes), x.shape[1]).index_add(0, index, x)
    means = sums / torch.bincount(index).unsqueeze(1)
    center = means.mean(0)
    means = means - center
    norms = means.norm(dim=1)
    if bool((norms <= 1e-12 * x.norm(dim=1).max()).any()):
        raise InvalidArgument("features", "must have class means that differ from the global mean, got an equal one.")
    directions = unit_rows(means)
    first, second = torch.triu_indices(len(classes), len(classes), offset=1)
    cosines = (directions @ directions.T)[first, second]
    between = _angles(directions[first], directions[second])
    weight_angle = None
    if weight is not None:
        w = as_matrix("weight", weight).double()
        if w.shape != means.shape:
            raise InvalidArgument("weight", f"must have the shape {list(means.shape)}, got {list(w.shape)}.")
        weight_angle = float(_angles(unit_rows(w - w.mean(0)), directions).mean())
    return NeuralCollapse(
        within_class_angle=float(_angles(unit_rows(x - center), directions[index]).mean()),
        between_class_angle=float(between.mean()),
        smallest_between_class_angle=float(between.min()),
        simplex_distance=float((cosines + 1 / (len(classes) - 1)).square().mean().sqrt()),
        norm_variation=float(norms.std(correction=0) / norms.mean()),
        weight_angle=weight_angle,
    )


def _angles(first: Tensor, second: Tensor) -> Tensor:
    """Return the angle between unit vectors, row by row, also accurately near 0 and π; π/2 for a zero row."""
    angles = 2 * torch.atan2((first - second).norm(dim=1), (first + second).norm(dim=1))
    return angles.masked_fill(~(first.any(1) & second.any(1)), math.pi / 2)
