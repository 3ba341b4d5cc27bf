"""2-D features: angles within and between classes, reproducible training, and the figure."""

import math

import pytest
import torch

from spherenet.losses import SoftmaxLoss
from spherenet_paper.theory.features import Digits, Embedding, class_angles, draw, embed_digits, plane_network, train
from spherenet_paper.theory.labs import feature_table


def test_class_angles_of_points_on_rays():
    degrees = torch.tensor([0.0, 10.0, 90.0, 100.0, 180.0, 190.0])
    points = torch.stack([degrees.deg2rad().cos(), degrees.deg2rad().sin()], 1) * torch.arange(1, 7).unsqueeze(1)
    within, between = class_angles(points, torch.tensor([0, 0, 1, 1, 2, 2]))
    assert within == pytest.approx(5, abs=1e-3)
    assert between == pytest.approx(90, abs=1e-3)


def test_class_angles_ignore_length_and_zero_features():
    points, labels = torch.randn(40, 2), torch.arange(40) % 4
    expected = class_angles(points, labels)
    assert class_angles(points * torch.rand(40, 1).add(0.1), labels) == pytest.approx(expected, abs=1e-3)
    more = torch.cat([points, torch.zeros(4, 2)])
    assert class_angles(more, torch.cat([labels, torch.arange(4)])) == pytest.approx(expected)


def test_embed_digits_returns_three_networks_and_reports_progress():
    calls = []
    embeddings = embed_digits(2, seed=1, progress=lambda done, total: calls.append((done, total)))
    assert [embedding.network for embedding in embeddings] == [
        "CNN, softmax",
        "SphereNet, softmax",
        "SphereNet, GA-Softmax m = 4",
    ]
    assert calls == [(done, 6) for done in range(1, 7)]
    for embedding in embeddings:
        assert embedding.features.shape == (1000, 2)
        assert embedding.accuracy * 1000 == pytest.approx(round(embedding.accuracy * 1000), abs=1e-6)
        assert embedding.as_dict()["within_degrees"] == embedding.within


def test_same_seed_gives_the_same_network():
    digits = Digits()
    trained = []
    for _ in range(2):
        model = plane_network("sigmoid", SoftmaxLoss(), digits, seed=3)
        list(train(model, digits, 2, seed=3))
        trained.append(model.state_dict())
    assert all(torch.equal(value, trained[1][name]) for name, value in trained[0].items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"iterations": 0}, "iterations must be at least 1"),
        ({"iterations": 2, "operator": "cos"}, "operator must be one of"),
        ({"iterations": 2, "m": 0.5}, "m must be at least 1"),
    ],
)
def test_invalid_arguments_are_rejected_before_training(options, message):
    with pytest.raises(ValueError, match=message):
        embed_digits(**options, progress=lambda done, total: pytest.fail("trained"))


def test_figure_has_points_and_an_arc_per_class():
    labels = torch.arange(200) % 10
    angle = labels * math.tau / 10 + 0.05 * torch.randn(200)
    features = torch.stack([angle.cos(), angle.sin()], 1) * 5
    figure = draw([Embedding("a", features, labels, 1.0, 2.0, 36.0)] * 2)
    assert len(figure.axes) == 2
    for axis in figure.axes:
        assert len(axis.collections) == len(axis.lines) == 10
        assert sorted(text.get_text() for text in axis.texts) == [str(label) for label in range(10)]


def test_table_has_one_row_per_network():
    labels = torch.arange(20) % 10
    table = feature_table([Embedding(name, torch.randn(20, 2), labels, 0.875, 2.0, 36.0) for name in ("a", "b")])
    assert table.rows == [["a", "87.5%", "2.0°", "36.0°"], ["b", "87.5%", "2.0°", "36.0°"]]
    assert len(table.columns) == 4


def test_zero_features_can_be_drawn():
    labels = torch.arange(20) % 10
    draw([Embedding("dead", torch.zeros(20, 2), labels, 0.1, 0.0, 0.0)])
