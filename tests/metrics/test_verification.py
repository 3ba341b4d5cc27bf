"""Verification and retrieval metrics against their definitions, scikit-learn and pytorch-metric-learning."""

import math

import numpy as np
import pytest
import torch

import spherenet as sn
from oracle import metrics as oracle
from spherenet import metrics
from spherenet.metrics import arrays


def made_pairs(seed, count=60, levels=None):
    """Return scores and labels that overlap; `levels` rounds the scores, so that many are equal."""
    generator = torch.Generator().manual_seed(seed)
    same = torch.rand(count, generator=generator) < 0.4
    same[:2] = torch.tensor([True, False])
    scores = torch.randn(count, generator=generator, dtype=torch.float64) + same
    return (scores * levels).round() / levels if levels else scores, same


CASES = [(0, None), (1, None), (2, 2), (3, 1)]


@pytest.mark.parametrize(("seed", "levels"), CASES)
def test_roc_equals_the_definition_and_scikit_learn(seed, levels):
    from sklearn.metrics import roc_auc_score
    from sklearn.metrics import roc_curve as second_opinion

    scores, same = made_pairs(seed, levels=levels)
    curve = sn.roc_curve(scores, same)
    for false, true, threshold in zip(*(column.tolist() for column in curve), strict=True):
        assert (false, true) == pytest.approx(oracle.rates(scores.tolist(), same.tolist(), threshold))
    false, true, thresholds = second_opinion(same, scores, drop_intermediate=False)
    np.testing.assert_allclose(curve.false_positive_rate, false)
    np.testing.assert_allclose(curve.true_positive_rate, true)
    np.testing.assert_allclose(curve.thresholds, thresholds)
    area = metrics.roc_auc(scores, same)
    assert area == pytest.approx(oracle.area(scores.tolist(), same.tolist()))
    assert area == pytest.approx(roc_auc_score(same, scores))


@pytest.mark.parametrize(("seed", "levels"), CASES)
def test_rates_equal_the_definition(seed, levels):
    scores, same = made_pairs(seed, levels=levels)
    for limit in (0, 0.01, 0.1, 0.3, 1):
        expected = oracle.true_positive_rate_at(scores.tolist(), same.tolist(), limit)
        assert sn.true_positive_rate_at(scores, same, limit) == pytest.approx(expected)
    expected = oracle.equal_error_rate(scores.tolist(), same.tolist())
    assert sn.equal_error_rate(scores, same) == pytest.approx(expected, abs=1e-9)


def test_rate_at_an_exact_quotient_is_included():
    scores = torch.arange(20.0)
    same = torch.zeros(20, dtype=torch.bool)
    same[16] = True  # three different pairs score higher, one of 19 each
    assert sn.true_positive_rate_at(scores, same, 3 / 19) == 1
    assert sn.true_positive_rate_at(scores, same, 2.9 / 19) == 0


def test_extremes():
    same = torch.tensor([True] * 5 + [False] * 5)
    separated = torch.tensor([1.0] * 5 + [0.0] * 5)
    assert sn.equal_error_rate(separated, same) == 0
    assert sn.equal_error_rate(-separated, same) == 1
    assert sn.equal_error_rate(torch.zeros(10), same) == 0.5
    assert sn.true_positive_rate_at(separated, same, 0) == 1
    assert metrics.roc_auc(torch.zeros(10), same) == 0.5
    result = sn.verification_accuracy(separated, same, folds=5)
    assert result.mean == 1
    assert result.standard_error == 0
    assert result.thresholds == [0.5] * 5


@pytest.mark.parametrize(("seed", "levels"), CASES)
@pytest.mark.parametrize("folds", [2, 7])
def test_cross_validation_equals_the_definition(seed, levels, folds):
    scores, same = made_pairs(seed, levels=levels)
    result = sn.verification_accuracy(scores, same, folds)
    expected = oracle.fold_accuracies(scores.tolist(), same.tolist(), folds)
    assert result.accuracies == pytest.approx(expected)
    assert result.mean == pytest.approx(np.mean(expected))
    assert result.standard_error == pytest.approx(np.std(expected, ddof=1) / math.sqrt(folds))


def test_folds_are_those_of_labeled_faces_in_the_wild():
    """Its file alternates 3 same and 3 different pairs per fold here; one fold has all its scores shifted."""
    same = torch.tensor(([True] * 3 + [False] * 3) * 4)
    scores = same.double() + torch.arange(24) / 1000
    scores[6:12] += 10  # the second fold: all are accepted at the threshold of the others
    assert sn.verification_accuracy(scores, same, 4).accuracies[1] == 0.5


def made_embeddings(seed, count=50, classes=9):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=generator)
    labels[0] = classes  # the only image of its class
    centers = torch.randn(classes + 1, 6, generator=generator)
    return centers[labels] + torch.randn(count, 6, generator=generator), labels


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("block", [1 << 24, 120])
def test_retrieval_equals_the_definition(seed, block, monkeypatch):
    monkeypatch.setattr(arrays, "SIMILARITIES_PER_BLOCK", block)
    embeddings, labels = made_embeddings(seed)
    rows, names = embeddings.tolist(), labels.tolist()
    ranked = list(oracle.ranked_matches(rows, names, rows, names, skip_self=True))
    assert len(ranked) < len(rows)
    for k in (1, 2, 5, 49):
        assert sn.recall_at_k(embeddings, labels, k) == pytest.approx(oracle.recall_at_k(ranked, k))
    expected = oracle.mean_average_precision_at_r(ranked)
    assert sn.mean_average_precision_at_r(embeddings, labels) == pytest.approx(expected)
    gallery, gallery_labels = made_embeddings(seed + 10, count=30, classes=5)
    ranked = list(oracle.ranked_matches(rows, names, gallery.tolist(), gallery_labels.tolist(), skip_self=False))
    options = {"gallery": gallery, "gallery_labels": gallery_labels}
    assert sn.recall_at_k(embeddings, labels, 3, **options) == pytest.approx(oracle.recall_at_k(ranked, 3))
    expected = oracle.mean_average_precision_at_r(ranked)
    assert sn.mean_average_precision_at_r(embeddings, labels, **options) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(3))
def test_retrieval_agrees_with_pytorch_metric_learning(seed):
    from pytorch_metric_learning.distances import CosineSimilarity
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
    from pytorch_metric_learning.utils.inference import CustomKNN

    embeddings, labels = made_embeddings(seed)
    names = ("precision_at_1", "mean_average_precision_at_r")
    calculator = AccuracyCalculator(include=names, k="max_bin_count", knn_func=CustomKNN(CosineSimilarity()))
    theirs = calculator.get_accuracy(embeddings, labels)
    assert sn.recall_at_k(embeddings, labels) == pytest.approx(theirs["precision_at_1"])
    own = sn.mean_average_precision_at_r(embeddings, labels)
    assert own == pytest.approx(theirs["mean_average_precision_at_r"], abs=1e-6)


def test_arrays_lists_and_strings_are_accepted():
    embeddings, labels = made_embeddings(0)
    names = [f"class {label}" for label in labels.tolist()]
    assert sn.recall_at_k(embeddings.numpy(), names, 2) == sn.recall_at_k(embeddings, labels, 2)
    assert sn.recall_at_k(embeddings.tolist(), np.array(names), 2) == sn.recall_at_k(embeddings, labels, 2)
    scores, same = made_pairs(0)
    assert sn.equal_error_rate(scores.tolist(), same.tolist()) == sn.equal_error_rate(scores, same.int().numpy())


def test_lists_keep_the_digits_of_float64():
    scores, same = [1 - 1e-9, 1 - 2e-9, 1 - 3e-9, 1 - 4e-9], [1, 1, 0, 0]
    assert sn.roc_auc(scores, same) == 1
    assert sn.metrics.equal_error_rate(scores, same) == 0
    assert metrics.roc_curve([20240101.0, 20240103.0], [0, 1]).thresholds.tolist()[1:] == [20240103.0, 20240101.0]


def test_reversed_and_foreign_arrays_are_accepted():
    scores, same = np.array([0.9, 0.8, 0.3]), np.array([True, False, False])
    expected = metrics.roc_auc(scores, same)
    assert metrics.roc_auc(scores[::-1], same[::-1]) == expected
    assert metrics.roc_auc(scores.astype(">f8"), same) == expected
    assert metrics.roc_auc([torch.tensor(score) for score in scores], same) == expected


def test_similarities_are_cosines_and_zero_for_zero():
    first, second = torch.randn(5, 3), torch.randn(5, 3)
    expected = [oracle.cosine(a, b) for a, b in zip(first.tolist(), second.tolist(), strict=True)]
    assert sn.pair_similarities(first, second).tolist() == pytest.approx(expected, abs=1e-6)
    assert sn.pair_similarities(torch.zeros(1, 3), torch.ones(1, 3)).tolist() == [0]


SCORES, SAME = made_pairs(0)
ROWS, LABELS = made_embeddings(0)
WRONG = {
    "all pairs are the same": (lambda: sn.roc_curve([1.0, 2.0], [True, True]), "both kinds, got 2 pairs, all same"),
    "all pairs are different": (lambda: sn.equal_error_rate([1.0, 2.0], [0, 0]), "both kinds, got 2 pairs, all diff"),
    "no pairs": (lambda: sn.roc_curve([], []), "same must have pairs of both kinds"),
    "lengths": (lambda: sn.roc_curve(SCORES, SAME[1:]), "same must have one value per score"),
    "not finite": (lambda: sn.roc_curve([1.0, math.nan], [True, False]), "scores must be finite, got nan"),
    "labels 2": (lambda: sn.roc_curve([1.0, 2.0], [1, 2]), "same must hold only true and false"),
    "matrix": (lambda: sn.roc_curve([[1.0, 2.0]], [True, False]), r"scores must be a vector.*got shape \[1, 2\]"),
    "text": (lambda: sn.roc_curve("abc", SAME), "scores must be numbers in a tensor, an array or a list, got str"),
    "rate": (lambda: sn.true_positive_rate_at(SCORES, SAME, 1.5), "false_positive_rate must be from 0 to 1, got 1.5"),
    "folds": (lambda: sn.verification_accuracy(SCORES, SAME, 50), "folds must be at most .* the rarer kind.*got 50"),
    "one fold": (lambda: sn.verification_accuracy(SCORES, SAME, 1), "folds must be at least 2, got 1"),
    "k": (lambda: sn.recall_at_k(ROWS, LABELS, 50), "k must be at most 49, the number of images.*got 50"),
    "k of 0": (lambda: sn.recall_at_k(ROWS, LABELS, 0), "k must be at least 1, got 0"),
    "single images": (lambda: sn.recall_at_k(ROWS, range(50)), "labels must have an image of the same class"),
    "labels short": (lambda: sn.recall_at_k(ROWS, LABELS[1:]), r"labels must have one value per embedding \(50\)"),
    "labels nested": (lambda: sn.recall_at_k(ROWS, [[1]] * 50), "labels must be a sequence of numbers or strings"),
    "no matrix": (lambda: sn.recall_at_k(ROWS[0], LABELS), "embeddings must be a matrix, one row per image"),
    "nan": (lambda: sn.recall_at_k(ROWS * math.nan, LABELS), "embeddings must be finite, got another value in row 0"),
    "gallery": (lambda: sn.recall_at_k(ROWS, LABELS, gallery=ROWS), "gallery_labels must be given exactly if gallery"),
    "columns": (
        lambda: sn.recall_at_k(ROWS, LABELS, gallery=ROWS[:, 1:], gallery_labels=LABELS),
        "gallery must have 6 columns as embeddings, got 5",
    ),
    "pair shapes": (lambda: sn.pair_similarities(ROWS, ROWS[1:]), r"second must have the shape \[50, 6\] of first"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named(case):
    call, message = WRONG[case]
    with pytest.raises((TypeError, ValueError), match=message):
        call()


@pytest.mark.parametrize("scale", [1e-30, 1e-14, 1.0, 1e20, 1e30])
def test_cosines_do_not_depend_on_the_scale(scale):
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, 20, 8, generator=generator)
    expected = sn.pair_similarities(first, second)
    assert torch.allclose(sn.pair_similarities(first * scale, second), expected, atol=1e-6)
    labels = [f"class {index % 4}" for index in range(20)]
    assert sn.recall_at_k(first * scale, np.array(labels, dtype=object)) == sn.recall_at_k(first, labels)
    extreme = first.double() * scale**10  # float64 has a larger range
    assert torch.allclose(sn.pair_similarities(extreme, second.double()), expected.double(), atol=1e-6)
    assert sn.recall_at_k(first, torch.arange(20).remainder(4).bfloat16()) == sn.recall_at_k(first, labels)
