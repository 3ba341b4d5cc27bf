"""Slopes of g and ψ compared with closed forms, and the points where ψ is flat."""

import math

import pytest
import torch

from spherenet.angles import CosineAngle, LinearAngle, SigmoidAngle
from spherenet_paper.theory.operators import draw, margin_slopes, operators, psi_slope, saddle_points, slope

THETA = torch.linspace(0.05, math.pi - 0.05, 101, dtype=torch.float64)


def sigmoid_slope(k, theta):
    """Return dg/dθ of the sigmoid in closed form (Eq. 1 of docs/concepts.md)."""
    u = theta / k - math.pi / (2 * k)
    c = (1 + math.exp(-math.pi / (2 * k))) / (1 - math.exp(-math.pi / (2 * k)))
    return -c * 2 * u.exp() / (k * (1 + u.exp()) ** 2)


@pytest.mark.parametrize(
    ("angle", "expected"),
    [
        (CosineAngle(), lambda theta: -theta.sin()),
        (LinearAngle(), lambda theta: torch.full_like(theta, -2 / math.pi)),
        (SigmoidAngle(0.3), lambda theta: sigmoid_slope(0.3, theta)),
        (SigmoidAngle(0.7), lambda theta: sigmoid_slope(0.7, theta)),
    ],
)
def test_slopes_match_closed_forms(angle, expected):
    torch.testing.assert_close(slope(angle, THETA), expected(THETA), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", ["cosine", "linear", "sigmoid, k = 0.3"])
@pytest.mark.parametrize("m", [2, 3, 4])
def test_slope_of_psi_matches_finite_differences(name, m):
    angle, step = operators([0.3])[name], 1e-6
    difference_quotient = (angle.extended(m * (THETA + step)) - angle.extended(m * (THETA - step))) / (2 * step)
    away = (m * THETA / math.pi - (m * THETA / math.pi).round()).abs() > 1e-3
    torch.testing.assert_close(psi_slope(angle, m, THETA)[away], difference_quotient[away], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("m", [2, 3, 4, 7])
def test_saddle_points_are_where_segments_meet(m):
    points = saddle_points(m)
    torch.testing.assert_close(points, torch.tensor([j * math.pi / m for j in range(1, m)], dtype=torch.float64))
    assert psi_slope(CosineAngle(), m, points).abs().max() < 1e-12
    # There are no other zeros inside (0, π).
    grid = torch.linspace(0, math.pi, 40 * m + 1, dtype=torch.float64)[1:-1]
    elsewhere = grid[(grid[:, None] - points).abs().min(1).values > 1e-6]
    assert psi_slope(CosineAngle(), m, elsewhere).abs().min() > 0.01


@pytest.mark.parametrize("m", [2, 4, 5])
def test_only_the_cosine_has_saddle_points(m):
    slopes = {each.g: each for each in margin_slopes(operators([0.001, 0.1, 0.3, 0.7]), m)}
    assert [name for name, each in slopes.items() if each.saddle] == ["cosine"]
    assert slopes["cosine"].steepest == pytest.approx(m, rel=1e-4)
    assert slopes["linear"].slope_there == pytest.approx(2 * m / math.pi)
    for k in (0.1, 0.3, 0.7):
        sigmoid = slopes[f"sigmoid, k = {k}"]
        ends = sigmoid_slope(k, torch.tensor(0.0, dtype=torch.float64)).abs().item()
        assert sigmoid.slope_there == pytest.approx(m * ends, rel=1e-6)
        assert sigmoid.slope_there > 0
    assert slopes["cosine"].theta == pytest.approx([j * math.pi / m for j in range(1, m)])


def test_invalid_margin_and_k_raise_value_error():
    with pytest.raises(ValueError, match="m must be a whole number from 2 to 1000, got 1"):
        margin_slopes(operators([0.3]), 1)
    with pytest.raises(ValueError, match="k must be greater than 0"):
        operators([0.3, -1])


@pytest.mark.parametrize("m", [2, 4, 20])
def test_figure_marks_the_saddle_points(m):
    figure = draw(operators([0.1, 0.3]), m)
    for axis in figure.axes[2:]:
        dots = [line for line in axis.lines if line.get_marker() == "o"]
        assert [list(line.get_xdata()) for line in dots] == [saddle_points(m).tolist()]
    labels = [label.get_text() for label in figure.axes[2].get_xticklabels()]
    assert labels[0] == "0"
    assert "π" in labels
