"""Neural collapse: values at collapse, of random features by a slow formula, and invalid arguments."""

import math

import pytest
import torch

import spherenet as sn


def test_collapsed_features():
    directions = sn.etf_directions(4, 6, dtype=torch.float64)
    labels = torch.arange(12) % 4
    result = sn.neural_collapse(3 * directions[labels] + 5, labels, directions)
    simplex = math.acos(-1 / 3)
    assert result.within_class_angle == pytest.approx(0, abs=1e-7)
    assert result.weight_angle == pytest.approx(0, abs=1e-7)
    assert result.between_class_angle == pytest.approx(simplex)
    assert result.smallest_between_class_angle == pytest.approx(simplex)
    assert result.simplex_distance == pytest.approx(0, abs=1e-9)
    assert result.norm_variation == pytest.approx(0, abs=1e-9)


def test_random_features_equal_a_slow_formula():
    x, labels, weight = torch.randn(20, 5, dtype=torch.float64), torch.arange(20) % 3, torch.randn(3, 5).double()
    means = torch.stack([x[labels == c].mean(0) for c in range(3)])
    center = means.mean(0)

    def angle(a, b):
        return math.acos((a @ b / (a.norm() * b.norm())).item())

    means = means - center
    between = [angle(means[i], means[j]) for i in range(3) for j in range(i)]
    result = sn.neural_collapse(x, [f"class {c}" for c in labels], weight)
    within = [angle(a - center, means[c]) for a, c in zip(x, labels, strict=True)]
    assert result.within_class_angle == pytest.approx(sum(within) / 20)
    assert result.between_class_angle == pytest.approx(sum(between) / 3)
    assert result.smallest_between_class_angle == pytest.approx(min(between))
    squares = [(math.cos(value) + 1 / 2) ** 2 for value in between]
    assert result.simplex_distance == pytest.approx(math.sqrt(sum(squares) / 3))
    weights = weight - weight.mean(0)
    assert result.weight_angle == pytest.approx(sum(map(angle, weights, means)) / 3)
    assert sn.neural_collapse(x, labels).weight_angle is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(3, 2), [0, 0, 0]), "labels must have at least two classes, got 1."),
        ((torch.ones(3, 2), [0, 1, 0]), "features must have class means that differ from the global mean"),
        ((torch.eye(3), [0, 1, 2], torch.eye(2)), r"weight must have the shape \[3, 3\], got \[2, 2\]."),
    ],
)
def test_invalid_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        sn.neural_collapse(*arguments)
