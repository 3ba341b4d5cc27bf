"""Metrics of embeddings: verification of pairs (same class or not), and retrieval of images of the same class."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from spherenet._util.validation import require_integer, require_number
from spherenet.errors import InvalidArgument, InvalidArgumentType
from spherenet.metrics.arrays import as_labels, as_matrix, as_tensor, in_blocks, unit_rows

__all__ = [
    "RocCurve",
    "VerificationAccuracy",
    "equal_error_rate",
    "mean_average_precision_at_r",
    "pair_similarities",
    "recall_at_k",
    "roc_auc",
    "roc_curve",
    "true_positive_rate_at",
    "verification_accuracy",
]


class RocCurve(NamedTuple):
    """Points of a receiver operating characteristic, from the strictest threshold to the most permissive one.

    Attributes:
        false_positive_rate: Fraction of the different pairs with a score of at least the threshold, float64 [P].
        true_positive_rate: Fraction of the same pairs with a score of at least the threshold, float64 [P].
        thresholds: The distinct scores, descending, after an infinite threshold that accepts no pair; float64 [P].
    """

    false_positive_rate: Tensor
    true_positive_rate: Tensor
    thresholds: Tensor


class VerificationAccuracy(NamedTuple):
    """Accuracy of a cross-validation over pairs.

    Attributes:
        mean: Mean accuracy of the folds.
        standard_error: Standard error of the mean: the standard deviation of the folds, divided by √folds.
        accuracies: Accuracy of each fold, at the threshold of the other folds.
        thresholds: Threshold of each fold.
    """

    mean: float
    standard_error: float
    accuracies: list[float]
    thresholds: list[float]


def pair_similarities(first: Any, second: Any) -> Tensor:
    """Return the cosine of each pair of embeddings, 0 for an embedding of norm 0.

    Args:
        first: Embeddings [N, D].
        second: Embeddings [N, D].

    Returns:
        Cosines [N].

    Raises:
        TypeError: An argument is not a matrix of numbers.
        ValueError: The shapes differ, or a value is not finite.
    """
    first, second = as_matrix("first", first), as_matrix("second", second)
    if first.shape != second.shape:
        raise InvalidArgument("second", f"must have the shape {list(first.shape)} of first, got {list(second.shape)}.")
    return (unit_rows(first) * unit_rows(second)).sum(1)


def roc_curve(scores: Any, same: Any) -> RocCurve:
    """Return the receiver operating characteristic of scored pairs.

    Args:
        scores: Similarity of each pair [N].
        same: Whether each pair is of the same class [N].

    Raises:
        TypeError: An argument is not a vector.
        ValueError: A score is not finite, the lengths differ, or there is only one kind of pair.
    """
    values, accepted_same, accepted_different = _accepted(*_pairs(scores, same))
    infinity = torch.tensor([math.inf], dtype=torch.float64)
    zero = torch.zeros(1, dtype=torch.float64)
    return RocCurve(
        torch.cat([zero, accepted_different / accepted_different[-1]]),
        torch.cat([zero, accepted_same / accepted_same[-1]]),
        torch.cat([infinity, values]),
    )


def roc_auc(scores: Any, same: Any) -> float:
    """Return the area under the ROC curve: the probability that a same pair scores higher than a different one.

    Arguments and errors as in `roc_curve`. Equal scores count half.
    """
    curve = roc_curve(scores, same)
    return float(torch.trapezoid(curve.true_positive_rate, curve.false_positive_rate))


def true_positive_rate_at(scores: Any, same: Any, false_positive_rate: float) -> float:
    """Return the largest true positive rate at a false positive rate of at most the given one (TPR@FPR).

    With n different pairs, rates below 1/n allow no false positive.

    Args:
        scores: Similarity of each pair [N].
        same: Whether each pair is of the same class [N].
        false_positive_rate: Largest false positive rate, from 0 to 1.

    Raises:
        TypeError, ValueError: As in `roc_curve`, or the rate is not from 0 to 1.
    """
    if not 0 <= require_number("false_positive_rate", false_positive_rate) <= 1:
        raise InvalidArgument("false_positive_rate", f"must be from 0 to 1, got {false_positive_rate!r}.")
    curve = roc_curve(scores, same)
    # Rates are quotients of integers: 3/10 must not exceed 0.3 by rounding.
    allowed = curve.false_positive_rate <= false_positive_rate * (1 + 1e-12)
    return float(curve.true_positive_rate[allowed].max())


def equal_error_rate(scores: Any, same: Any) -> float:
    """Return the rate at which false positives and false negatives are equally frequent (EER).

    Between two points of the ROC curve the rates are interpolated linearly. Arguments and errors as in `roc_curve`.
    """
    curve = roc_curve(scores, same)
    difference = curve.false_positive_rate - (1 - curve.true_positive_rate)  # increases from −1 to 1
    after = int((difference >= 0).nonzero()[0])
    before = after - 1
    fraction = -difference[before] / (difference[after] - difference[before])
    return float(torch.lerp(curve.false_positive_rate[before], curve.false_positive_rate[after], fraction))


def verification_accuracy(scores: Any, same: Any, folds: int = 10) -> VerificationAccuracy:
    """Return the accuracy of "same" and "different" decisions, with thresholds from cross-validation.

    For each fold, the threshold with the best accuracy on the other folds is used, as in the protocol of Labeled Faces
    in the Wild (Huang et al., 2007). Same and different pairs are each divided in the order given, into folds of equal
    size up to one pair; for the file of that data set these are its ten published folds. Among equally good thresholds
    the highest is used; it lies in the middle between two scores.

    Args:
        scores: Similarity of each pair [N].
        same: Whether each pair is of the same class [N].
        folds: Number of folds, at least 2.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: As in `roc_curve`, or there are fewer pairs of one kind than folds.
    """
    values, is_same = _pairs(scores, same)
    require_integer("folds", folds, minimum=2)
    rarer = min(int(is_same.sum()), int((~is_same).sum()))
    if folds > rarer:
        raise InvalidArgument(
            "folds", f"must be at most {rarer}, the number of pairs of the rarer kind (same or different), got {folds}."
        )
    fold_of_pair = torch.empty(len(values), dtype=torch.int64)
    for members in (is_same.nonzero().flatten(), (~is_same).nonzero().flatten()):
        fold_of_pair[members] = torch.arange(len(members)) * folds // len(members)
    accuracies, thresholds = [], []
    for fold in range(folds):
        held_out = fold_of_pair == fold
        threshold = _best_threshold(values[~held_out], is_same[~held_out])
        correct = (values[held_out] >= threshold) == is_same[held_out]
        accuracies.append(float(correct.double().mean()))
        thresholds.append(threshold)
    per_fold = torch.tensor(accuracies, dtype=torch.float64)
    return VerificationAccuracy(
        float(per_fold.mean()), float(per_fold.std() / math.sqrt(folds)), accuracies, thresholds
    )


def _best_threshold(scores: Tensor, same: Tensor) -> float:
    """Return the highest of the thresholds with the best accuracy."""
    values, accepted_same, accepted_different = _accepted(scores, same)
    # Entry i: all pairs with one of the i highest distinct scores are accepted.
    correct = F.pad(accepted_same - accepted_different, (1, 0))
    best = int(correct.argmax())  # the first of equal ones
    if best == 0:
        return math.inf
    if best == len(values):
        return float(values[-1])
    return float((values[best - 1] + values[best]) / 2)


def _accepted(scores: Tensor, same: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distinct scores, descending, and the numbers of same and different pairs with at least that score."""
    values, position = torch.unique(-scores, return_inverse=True)
    counts = [torch.bincount(position[members], minlength=len(values)) for members in (same, ~same)]
    accepted_same, accepted_different = (count.cumsum(0).double() for count in counts)
    return -values, accepted_same, accepted_different


def recall_at_k(embeddings: Any, labels: Any, k: int = 1, *, gallery: Any = None, gallery_labels: Any = None) -> float:
    """Return the fraction of images with an image of their class among the k most similar ones (by cosine).

    Each image is a query. Images whose class has no other image are not counted. With k = 1 this is the precision at 1.

    Args:
        embeddings: Embeddings of the queries [N, D].
        labels: Their classes: N numbers or strings.
        k: Number of neighbors.
        gallery: Embeddings that are searched [M, D]; None searches the queries themselves, each without itself.
        gallery_labels: Classes of the gallery.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: Shapes do not fit, a value is not finite, k is less than 1 or more than the number of images that
            are searched, or no class has two images.
    """
    search = _Search(embeddings, labels, gallery, gallery_labels)
    require_integer("k", k, minimum=1)
    if k > search.searched:
        raise InvalidArgument(
            "k", f"must be at most {search.searched}, the number of images that are searched, got {k}."
        )
    hits = torch.cat([matches[:, :k].any(1) for matches, _ in search.neighbors(k)])
    return float(hits.double().mean())


def mean_average_precision_at_r(
    embeddings: Any, labels: Any, *, gallery: Any = None, gallery_labels: Any = None
) -> float:
    """Return the mean average precision at R (mAP@R; Musgrave et al., 2020).

    For a query with R images of its class, the average precision at R is the sum of the precisions at those of the R
    most similar images that are of its class, divided by R. Images whose class has no other image are not counted.

    Arguments and errors as in `recall_at_k`.
    """
    search = _Search(embeddings, labels, gallery, gallery_labels)
    averages = []
    for matches, relevant in search.neighbors(None):
        rank = torch.arange(1, matches.shape[1] + 1)
        hits = matches.double() * (rank <= relevant.unsqueeze(1))
        averages.append((hits * hits.cumsum(1) / rank).sum(1) / relevant)
    return float(torch.cat(averages).mean())


class _Search:
    """Queries and the images that are searched for them."""

    def __init__(self, embeddings: Any, labels: Any, gallery: Any, gallery_labels: Any) -> None:
        self.queries = unit_rows(as_matrix("embeddings", embeddings))
        self.labels = as_labels("labels", labels, len(self.queries))
        self.own_gallery = gallery is None
        if self.own_gallery != (gallery_labels is None):
            raise InvalidArgument("gallery_labels", "must be given exactly if gallery is given.")
        if gallery is None:
            self.gallery, gallery_array = self.queries, self.labels
        else:
            self.gallery = unit_rows(as_matrix("gallery", gallery)).to(self.queries.dtype)
            gallery_array = as_labels("gallery_labels", gallery_labels, len(self.gallery))
            if self.gallery.shape[1] != self.queries.shape[1]:
                raise InvalidArgument(
                    "gallery", f"must have {self.queries.shape[1]} columns as embeddings, got {self.gallery.shape[1]}."
                )
        codes = np.unique(np.concatenate([self.labels, gallery_array]), return_inverse=True)[1]
        self.codes, self.gallery_codes = torch.split(torch.from_numpy(codes), [len(self.queries), len(self.gallery)])
        per_class = torch.bincount(self.gallery_codes, minlength=int(codes.max()) + 1)
        self.relevant = per_class[self.codes] - int(self.own_gallery)
        self.searched = len(self.gallery) - int(self.own_gallery)
        if not bool((self.relevant > 0).any()):
            raise InvalidArgument("labels", "must have an image of the same class for at least one image, got none.")

    def neighbors(self, count: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, for blocks of queries, whether each neighbor is of the query's class, and the number of such images.

        Args:
            count: Number of neighbors; None for the largest number of images of one class.
        """
        counted = (self.relevant > 0).nonzero().flatten()
        for block in in_blocks(counted, len(self.gallery)):
            similarities = self.queries[block] @ self.gallery.T
            if self.own_gallery:
                similarities[torch.arange(len(block)), block] = -math.inf
            relevant = self.relevant[block]
            nearest = similarities.topk(int(relevant.max()) if count is None else count).indices
            yield self.gallery_codes[nearest] == self.codes[block].unsqueeze(1), relevant


def _pairs(scores: Any, same: Any) -> tuple[Tensor, Tensor]:
    """Return checked scores as float64 and labels as bool, on the CPU."""
    values, is_same = as_tensor("scores", scores), as_tensor("same", same)
    for name, tensor in (("scores", values), ("same", is_same)):
        if tensor.dim() != 1:
            raise InvalidArgumentType(name, f"must be a vector, one value per pair, got shape {list(tensor.shape)}.")
    if len(values) != len(is_same):
        raise InvalidArgument("same", f"must have one value per score ({len(values)}), got {len(is_same)}.")
    values = values.double()
    if not bool(values.isfinite().all()):
        raise InvalidArgument("scores", f"must be finite, got {float(values[~values.isfinite()][0])}.")
    if not bool(((is_same == 0) | (is_same == 1)).all()):
        raise InvalidArgument("same", "must hold only true and false, or 1 and 0.")
    is_same = is_same.bool()
    count = int(is_same.sum())
    if count in (0, len(is_same)):
        kind = "different" if count == 0 else "same"
        raise InvalidArgument("same", f"must have pairs of both kinds, got {len(is_same)} pairs, all {kind}.")
    return values, is_same
