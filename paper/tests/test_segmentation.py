"""The U-Net at small batches: its images, its normalizations, its table, and its verdict on made-up numbers."""

import pytest
import torch
from made_answers import segmentation_scores
from torch import nn
from torch.nn import functional as F

from spherenet_paper import segmentation
from spherenet_paper.comparisons import read_rows
from spherenet_paper.segmentation import (
    ARMS,
    BASELINES,
    BATCHES,
    QUESTION,
    RATES,
    SEEDS,
    Score,
    StandardizedConv2d,
    UNet,
    make_images,
)


def test_images_show_all_classes_and_are_the_same_each_time():
    images, labels = make_images(20, 3)
    assert images.shape == (20, 3, 32, 32)
    assert labels.unique().tolist() == [0, 1, 2, 3]
    assert torch.equal(images, make_images(20, 3)[0])
    assert not torch.equal(images, make_images(20, 4)[0])
    means = torch.stack([images.transpose(0, 1)[:, labels == k].mean(1) for k in range(4)])
    assert means.abs().max() < 0.5  # the color says nothing about the class


@pytest.mark.parametrize("arm", ARMS)
def test_networks_learn_at_a_batch_of_one(arm):
    torch.manual_seed(0)
    network = UNet(arm)
    images, labels = make_images(1, 0)
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        losses.append(F.cross_entropy(network(images), labels))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert network(images).shape == (1, 4, 32, 32)
    assert losses[-1] < 0.9 * losses[0]


def test_standardized_filters_have_mean_0_and_keep_the_variance():
    torch.manual_seed(0)
    layer = StandardizedConv2d(16, 8, 3, scaled=True).double()
    nn.init.zeros_(layer.bias)
    x = torch.randn(4, 16, 12, 12, dtype=torch.float64)
    assert layer(x)[..., 1:-1, 1:-1].var().item() == pytest.approx(1, rel=0.1)
    assert torch.allclose(layer(x + 5)[..., 1:-1, 1:-1], layer(x)[..., 1:-1, 1:-1])
    assert segmentation.ScaledReLU()(torch.randn(100_000)).var() == pytest.approx(1, rel=0.03)


def test_score_is_the_intersection_over_union():
    labels = torch.tensor([[[0, 1], [2, 3]]])
    perfect = F.one_hot(labels, 4).permute(0, 3, 1, 2).float()
    assert segmentation._score(nn.Identity(), perfect, labels) == 1
    half = perfect.clone()
    half[0, :, 0, 1] = half[0, :, 0, 0]  # class 1 taken for class 0
    assert segmentation._score(nn.Identity(), half, labels) == pytest.approx((0.5 + 0 + 1 + 1) / 4)
    assert segmentation._score(nn.Identity(), half.fill_(float("nan")), labels) == 0


@pytest.mark.parametrize(("lead", "decision"), [(0.1, "confirmed"), (-0.1, "refuted"), (0.0, "not decided")])
def test_verdict_follows_the_differences(lead, decision):
    comparisons = segmentation.judge(segmentation_scores(lead))
    assert [one.name for one in comparisons] == list(BASELINES)
    assert {one.decision for one in comparisons} == {decision}
    assert segmentation.judge(segmentation_scores(lead)[1:]) == []


def test_best_rate_of_the_search_is_used(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(segmentation, "train", lambda arm, seed, batch, rate: 0.5 + rate - 0.01 * (rate == RATES[-1]))
    folder, table = str(tmp_path / "runs"), tmp_path / "segmentation.csv"
    assert QUESTION.main(["run", folder, "--arms", "batchnorm"]) == 0
    assert QUESTION.main(["table", folder, "-o", str(table)]) == 0
    rows = read_rows(table, Score)
    assert {row.learning_rate for row in rows if row.seed in SEEDS} == {RATES[1]}
    assert len(rows) == len(BATCHES) * (len(RATES) + len(SEEDS))
    capsys.readouterr()
    assert QUESTION.main(["judge", str(table)]) == 0
    assert capsys.readouterr().out.startswith("No verdict")
