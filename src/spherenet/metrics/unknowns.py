"""Scores that tell images of known classes from others: a larger score means "more likely known".

Logits, cosines and features may be tensors, numpy arrays or lists; results are tensors on the CPU.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from spherenet._util.validation import require_integer, require_number
from spherenet.errors import InvalidArgument
from spherenet.metrics.arrays import as_matrix, in_blocks, unit_rows

__all__ = ["energy_score", "knn_cosine_score", "max_cosine_score", "max_softmax_score"]


def max_cosine_score(cosines: Any) -> Tensor:
    """Return the largest cosine to a class of each image, as `AngularHead` computes them.

    Args:
        cosines: Cosines between features and class weights [N, classes].

    Raises:
        TypeError: The cosines are not a matrix of numbers.
        ValueError: A cosine is not finite, or not between −1 and 1 up to rounding.
    """
    checked = as_matrix("cosines", cosines)
    largest = float(checked.abs().max())
    if largest > 1.01:  # cosines of half precision exceed 1 by less
        raise InvalidArgument("cosines", f"must be between -1 and 1, got an absolute value of {largest:g}.")
    return checked.amax(1)


def max_softmax_score(logits: Any) -> Tensor:
    """Return the largest softmax probability of each image (Hendrycks and Gimpel, 2017).

    Args:
        logits: Logits [N, classes].

    Raises:
        TypeError: The logits are not a matrix of numbers.
        ValueError: A logit is not finite.
    """
    return as_matrix("logits", logits).softmax(1).amax(1)


def energy_score(logits: Any, temperature: float = 1.0) -> Tensor:
    """Return T log Σ_j exp(logit_j / T) of each image: minus the free energy (Liu et al., 2020).

    Args:
        logits: Logits [N, classes].
        temperature: T > 0.

    Raises:
        TypeError: The logits are not a matrix of numbers, or the temperature is not a number.
        ValueError: A logit is not finite, or the temperature is not positive and finite.
    """
    checked = as_matrix("logits", logits)
    require_number("temperature", temperature)
    if not 0 < temperature < math.inf:
        raise InvalidArgument("temperature", f"must be positive and finite, got {temperature}.")
    # The largest logit first, so that small temperatures overflow nothing.
    largest = checked.amax(1, keepdim=True)
    return largest.squeeze(1) + temperature * ((checked - largest) / temperature).logsumexp(1)


def knn_cosine_score(train_features: Any, features: Any, k: int = 50) -> Tensor:
    """Return the cosine of each image to its k-th most similar training image (Sun et al., 2022).

    The cosine with a feature of zeros is 0. Similarities are computed in blocks of 64 MiB.

    Args:
        train_features: Features of the training images [M, D].
        features: Features of the images [N, D].
        k: Rank of the neighbor, from 1 to M.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: Shapes do not fit, a value is not finite, or k is not between 1 and M.
    """
    known = unit_rows(as_matrix("train_features", train_features))
    queries = unit_rows(as_matrix("features", features)).to(known.dtype)
    require_integer("k", k, minimum=1)
    if queries.shape[1] != known.shape[1]:
        raise InvalidArgument(
            "features", f"must have {known.shape[1]} columns as train_features, got {queries.shape[1]}."
        )
    if k > len(known):
        raise InvalidArgument("k", f"must be at most {len(known)}, the number of training images, got {k}.")
    return torch.cat([(block @ known.T).topk(k).values[:, -1] for block in in_blocks(queries, len(known))])
