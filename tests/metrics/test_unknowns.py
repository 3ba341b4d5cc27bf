"""Scores for unknown inputs against their formulas, and their edges."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import spherenet as sn
from spherenet import metrics
from spherenet.metrics import arrays

LOGITS = torch.randn(7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 4


def test_scores_equal_their_formulas():
    probabilities = LOGITS.exp() / LOGITS.exp().sum(1, keepdim=True)
    torch.testing.assert_close(metrics.max_softmax_score(LOGITS), probabilities.max(1).values)
    for temperature in (0.5, 1, 20.0):
        expected = temperature * (LOGITS / temperature).exp().sum(1).log()
        torch.testing.assert_close(metrics.energy_score(LOGITS, temperature), expected)
    cosines = F.normalize(LOGITS)
    torch.testing.assert_close(metrics.max_cosine_score(cosines), torch.stack([max(row) for row in cosines]))


@pytest.mark.parametrize("block", [1, 7, 1 << 24])
@pytest.mark.parametrize("k", [1, 3, 9])
def test_neighbors_equal_sorted_cosines(k, block, monkeypatch):
    monkeypatch.setattr(arrays, "SIMILARITIES_PER_BLOCK", block)
    generator = torch.Generator().manual_seed(1)
    train, features = (torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in (9, 5))
    cosines = F.cosine_similarity(features.unsqueeze(1), train.unsqueeze(0), dim=2)
    expected = cosines.sort(1, descending=True).values[:, k - 1]
    torch.testing.assert_close(metrics.knn_cosine_score(train, features, k), expected)


def test_neighbors_depend_on_directions_only():
    train, features = torch.eye(3), torch.tensor([[1e-30, 0, 0], [0, 3e30, 3e30], [0, 0, 0]])
    torch.testing.assert_close(metrics.knn_cosine_score(train, features, 1), torch.tensor([1, 0.5**0.5, 0]))


def test_scores_take_arrays_lists_and_half_precision():
    assert metrics.max_cosine_score([[0.25, -1.0]]).tolist() == [0.25]
    assert metrics.max_softmax_score(np.zeros((2, 4))).tolist() == [0.25, 0.25]
    assert metrics.energy_score(torch.zeros(1, 2, dtype=torch.bfloat16)).tolist() == pytest.approx([math.log(2)])
    assert metrics.energy_score([[3.5]]).tolist() == [3.5]


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[1e30, -1e30], [1000.0, 1000.0]])
    torch.testing.assert_close(metrics.energy_score(logits), torch.tensor([1e30, 1000 + math.log(2)]))
    torch.testing.assert_close(metrics.energy_score(logits, 1e-20)[0], torch.tensor(1e30))
    assert metrics.max_softmax_score(logits).tolist() == [1, 0.5]


def test_scores_with_roc_auc():
    known, unknown = torch.eye(4) * 5, torch.zeros(3, 4)
    is_known = torch.tensor([True] * 4 + [False] * 3)
    for score in (metrics.max_softmax_score, metrics.energy_score):
        assert sn.roc_auc(score(torch.cat([known, unknown])), is_known) == 1


ERRORS = {
    "vector": (lambda: metrics.energy_score([1.0]), TypeError, r"logits must be a matrix, .* got shape \[1\]"),
    "no images": (lambda: metrics.max_softmax_score(torch.zeros(0, 3)), TypeError, "logits must be a matrix"),
    "infinite logit": (lambda: metrics.max_softmax_score([[math.inf, 0]]), ValueError, "logits must be finite"),
    "text": (lambda: metrics.max_cosine_score("cosines"), TypeError, "cosines must be"),
    "logits as cosines": (lambda: metrics.max_cosine_score([[3.0, 0]]), ValueError, "between -1 and 1, got .* of 3"),
    "temperature 0": (lambda: metrics.energy_score(LOGITS, 0), ValueError, "temperature must be positive"),
    "temperature text": (lambda: metrics.energy_score(LOGITS, "1"), TypeError, "temperature must be"),
    "k 0": (lambda: metrics.knn_cosine_score(LOGITS, LOGITS, 0), ValueError, "k must be"),
    "k too large": (lambda: metrics.knn_cosine_score(LOGITS, LOGITS, 8), ValueError, "k must be at most 7, .* got 8"),
    "k fraction": (lambda: metrics.knn_cosine_score(LOGITS, LOGITS, 1.5), TypeError, "k must be"),
    "columns": (
        lambda: metrics.knn_cosine_score(LOGITS, LOGITS[:, :2], 1),
        ValueError,
        "features must have 5 columns as train_features, got 2",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_wrong_arguments_are_refused(name):
    call, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        call()
