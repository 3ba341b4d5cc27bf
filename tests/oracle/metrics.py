"""Verification and retrieval metrics from their definitions, one pair or one image at a time."""

import itertools
import math


def rates(scores, same, threshold):
    """Return (false positive rate, true positive rate) of the decision score ≥ threshold."""
    positive = [score >= threshold for score in scores]
    false = sum(p and not s for p, s in zip(positive, same, strict=True))
    true = sum(p and s for p, s in zip(positive, same, strict=True))
    return false / (len(same) - sum(same)), true / sum(same)


def area(scores, same):
    """Return the fraction of (same, different) pairs in which the same pair scores higher; ties count half."""
    won = [
        (a > b) + (a == b) / 2
        for a, is_same in zip(scores, same, strict=True) if is_same
        for b, is_other in zip(scores, same, strict=True) if not is_other
    ]  # fmt: skip
    return sum(won) / len(won)


def true_positive_rate_at(scores, same, limit):
    points = [rates(scores, same, threshold) for threshold in [math.inf, *scores]]
    return max(true for false, true in points if false <= limit)


def equal_error_rate(scores, same):
    """Return where the polygon of the ROC points crosses the line FPR = 1 − TPR, by bisection."""
    points = sorted({rates(scores, same, threshold) for threshold in [math.inf, *scores]})
    for (false, true), (next_false, next_true) in itertools.pairwise(points):
        low, high = 0.0, 1.0
        for _ in range(100):
            middle = (low + high) / 2
            x = false + middle * (next_false - false)
            y = true + middle * (next_true - true)
            low, high = (middle, high) if x < 1 - y else (low, middle)
        if x >= 1 - y - 1e-12 and abs(x - (1 - y)) < 1e-9:
            return x
    raise AssertionError("the curve must cross the line")


def fold_accuracies(scores, same, folds):
    """Return the accuracy of each fold with a threshold that is searched among all midpoints of the other folds."""
    kinds = [[i for i, is_same in enumerate(same) if is_same == kind] for kind in (True, False)]
    fold = {i: rank * folds // len(kind) for kind in kinds for rank, i in enumerate(kind)}
    accuracies = []
    for held_out in range(folds):
        rest = [i for i in fold if fold[i] != held_out]
        levels = sorted({scores[i] for i in rest}, reverse=True)
        candidates = [math.inf, *((a + b) / 2 for a, b in itertools.pairwise(levels)), levels[-1]]
        best = max(candidates, key=lambda t: (sum((scores[i] >= t) == same[i] for i in rest), t))
        tested = [i for i in fold if fold[i] == held_out]
        accuracies.append(sum((scores[i] >= best) == same[i] for i in tested) / len(tested))
    return accuracies


def cosine(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))


def ranked_matches(queries, labels, gallery, gallery_labels, *, skip_self):
    """Yield, per query with an image of its class, whether the images are of its class, most similar first."""
    for index, (query, label) in enumerate(zip(queries, labels, strict=True)):
        others = [i for i in range(len(gallery)) if not (skip_self and i == index)]
        others.sort(key=lambda i: -cosine(query, gallery[i]))
        matches = [gallery_labels[i] == label for i in others]
        if any(matches):
            yield matches


def recall_at_k(ranked, k):
    hits = [any(matches[:k]) for matches in ranked]
    return sum(hits) / len(hits)


def mean_average_precision_at_r(ranked):
    averages = []
    for matches in ranked:
        relevant = sum(matches)
        precisions = [sum(matches[: i + 1]) / (i + 1) for i in range(relevant) if matches[i]]
        averages.append(sum(precisions) / relevant)
    return sum(averages) / len(averages)
