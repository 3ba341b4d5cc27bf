"""Slopes of g and ψ against closed forms, and where ψ is flat."""

import math

import pytest
import torch

from spherenet.angles import CosineAngle, LinearAngle, SigmoidAngle
from spherenet.ops.margins import continued
from spherenet.theory.operators import draw, meetings, operators, psi_slope, saddle_points, slope

THETA = torch.linspace(0.05, math.pi - 0.05, 101, dtype=torch.float64)


def sigmoid_slope(k, theta):
    """SPEC's dg/dθ, with C(k)."""
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
def test_slopes_are_the_closed_forms(angle, expected):
    torch.testing.assert_close(slope(angle, THETA), expected(THETA), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", ["cosine", "linear", "sigmoid, k = 0.3"])
@pytest.mark.parametrize("m", [2, 3, 4])
def test_slope_of_psi_is_that_of_differences(name, m):
    angle, step = operators([0.3])[name], 1e-6
    by_difference = (continued(angle, m * (THETA + step)) - continued(angle, m * (THETA - step))) / (2 * step)
    away = (m * THETA / math.pi - (m * THETA / math.pi).round()).abs() > 1e-3
    torch.testing.assert_close(psi_slope(angle, m, THETA)[away], by_difference[away], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("m", [2, 3, 4, 7])
def test_saddle_points_are_where_pieces_meet(m):
    points = saddle_points(m)
    torch.testing.assert_close(points, torch.tensor([j * math.pi / m for j in range(1, m)], dtype=torch.float64))
    assert psi_slope(CosineAngle(), m, points).abs().max() < 1e-12
    # Nowhere else inside (0, π).
    grid = torch.linspace(0, math.pi, 40 * m + 1, dtype=torch.float64)[1:-1]
    elsewhere = grid[(grid[:, None] - points).abs().min(1).values > 1e-6]
    assert psi_slope(CosineAngle(), m, elsewhere).abs().min() > 0.01


@pytest.mark.parametrize("m", [2, 4, 5])
def test_only_the_cosine_is_flat_and_small_sigmoids_nearly(m):
    found = {meeting.g: meeting for meeting in meetings(operators([0.1, 0.3, 0.7]), m)}
    assert [name for name, meeting in found.items() if meeting.saddle] == ["cosine"]
    assert found["cosine"].steepest == pytest.approx(m, rel=1e-4)
    assert found["linear"].slope_there == pytest.approx(2 * m / math.pi)
    for k in (0.1, 0.3, 0.7):
        meeting = found[f"sigmoid, k = {k}"]
        ends = sigmoid_slope(k, torch.tensor(0.0, dtype=torch.float64)).abs().item()
        assert meeting.slope_there == pytest.approx(m * ends, rel=1e-6)
        assert meeting.slope_there > 0
    assert found["cosine"].theta == pytest.approx([j * math.pi / m for j in range(1, m)])


def test_wrong_margin_and_k():
    with pytest.raises(ValueError, match="m must be a whole number of at least 2, got 1"):
        meetings(operators([0.3]), 1)
    with pytest.raises(ValueError, match="k must be greater than 0"):
        operators([0.3, -1])


@pytest.mark.parametrize("m", [2, 4, 20])
def test_drawing_marks_the_saddle_points(m):
    figure = draw(operators([0.1, 0.3]), m)
    for axis in figure.axes[2:]:
        dots = [line for line in axis.lines if line.get_marker() == "o"]
        assert [list(line.get_xdata()) for line in dots] == [saddle_points(m).tolist()]
    labels = [label.get_text() for label in figure.axes[2].get_xticklabels()]
    assert labels[0] == "0"
    assert "π" in labels
