"""Probes at each evaluation: angles of classes on a fixed random sample of the images."""

import math

import pytest
import torch

import spherenet as sn
from spherenet.data import Batch
from spherenet.training.probes import Probes, class_angles


def test_angles_are_those_of_the_features_of_the_head():
    torch.manual_seed(0)
    model = sn.create_model("cnn-3", 4, widths=(4, 4, 4), input_size=16)
    images, labels = torch.randn(12, 3, 16, 16), torch.arange(12) % 4
    row = Probes(pytest.fail)(model, Batch(images, labels, torch.arange(12)))
    model.eval()
    with torch.no_grad():
        expected = sn.neural_collapse(model.features(images), labels)
    for name in ("within_class_angle", "between_class_angle", "simplex_distance"):
        assert row[name] == pytest.approx(getattr(expected, name), rel=1e-4)


def test_collapsed_features_have_the_angles_of_a_simplex():
    labels = torch.arange(12) % 4
    angles = class_angles(sn.etf_directions(4, 6)[labels], labels)
    assert angles == pytest.approx(
        {"within_class_angle": 0, "between_class_angle": math.acos(-1 / 3), "simplex_distance": 0}, abs=1e-3
    )


def test_classes_with_one_image_are_left_out():
    features, labels = torch.randn(7, 3), torch.tensor([0, 0, 5, 5, 1, 2, 3])
    assert class_angles(features, labels) == class_angles(features[:4], labels[:4]) != {}


@pytest.mark.parametrize(
    ("features", "labels"),
    [
        (torch.randn(4, 3), torch.arange(4)),
        (torch.randn(4, 3), torch.zeros(4, dtype=torch.int64)),
        (torch.zeros(4, 3), torch.tensor([0, 0, 1, 1])),
        (torch.full((4, 3), math.nan), torch.tensor([0, 0, 1, 1])),
        (torch.randn(0, 3), torch.zeros(0, dtype=torch.int64)),
    ],
    ids=["one image per class", "a single class", "zeros", "NaN", "no images"],
)
def test_undefined_angles_are_left_out(features, labels):
    assert class_angles(features, labels) == {}
