"""Margin losses reach their margins: three sectors of the plane, a small network, two-dimensional features.

With the same training, W-Softmax stops at a few degrees between the classes, while each margin loss continues until
every training point satisfies the inequality of its margin.
"""

import math
from functools import cache

import pytest
import torch
from torch import nn

from spherenet.angles import CosineAngle, LinearAngle
from spherenet.layers.head import AngularHead
from spherenet.losses import Annealing, ArcFaceLoss, ASoftmaxLoss, CosFaceLoss, GASoftmaxLoss, WSoftmaxLoss
from spherenet.ops.angular import additive_angle, additive_cosine

CLASSES, POINTS, STEPS, GAP = 3, 60, 300, 0.1
SCHEDULE = Annealing.for_run(STEPS, start=20, floor=0.1, floor_at=0.5)
LOSSES = {
    "w": lambda: WSoftmaxLoss(),
    "ga-2": lambda: GASoftmaxLoss.paper(m=2, annealing=SCHEDULE),
    "ga-4": lambda: GASoftmaxLoss.paper(m=4, annealing=SCHEDULE),
    "a-4": lambda: ASoftmaxLoss.paper(m=4, annealing=SCHEDULE),
    "cosface": lambda: CosFaceLoss(0.35),
    "arcface": lambda: ArcFaceLoss(0.5),
}
# Inequality of each margin: similarity of the target with the margin > similarity of another class without it.
MARGINS = {
    "ga-2": (lambda c: LinearAngle().psi(c, 2), LinearAngle()),
    "ga-4": (lambda c: LinearAngle().psi(c, 4), LinearAngle()),
    "a-4": (lambda c: CosineAngle().psi(c, 4), CosineAngle()),
    "cosface": (lambda c: additive_cosine(c, 0.35), CosineAngle()),
    "arcface": (lambda c: additive_angle(c, 0.5), CosineAngle()),
}


def sectors():
    """Return points in three sectors of a circle, 11 degrees apart, with varying radius, and their labels."""
    turn = 2 * math.pi / CLASSES
    angle = torch.cat([j * turn + torch.linspace(GAP, turn - GAP, POINTS) for j in range(CLASSES)])
    radius = 1 + 0.3 * torch.sin(1.7 * torch.arange(len(angle)))
    points = torch.stack([angle.cos() * radius, angle.sin() * radius], 1)
    return points, torch.arange(CLASSES).repeat_interleave(POINTS)


@cache
def trained_cosines(name):
    """Return the cosine of each point with its own class [N] and with the nearest other class [N] after training."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    head, loss = AngularHead(2, CLASSES), LOSSES[name]()
    optimizer = torch.optim.Adam([*network.parameters(), *head.parameters()], lr=0.02)
    points, labels = sectors()
    for step in range(STEPS):
        if isinstance(loss, GASoftmaxLoss):
            loss.set_step(step)
        optimizer.zero_grad()
        loss(head(network(points)), labels).backward()
        optimizer.step()
    with torch.no_grad():
        cosine = head(network(points)).cosine
    own = cosine.gather(1, labels[:, None]).squeeze(1)
    return own, cosine.scatter(1, labels[:, None], -2).amax(1)


def smallest_gap(name):
    """Return the smallest θ_rival − θ_own over the training points, in degrees."""
    own, rival = trained_cosines(name)
    return math.degrees((rival.clamp(-1, 1).acos() - own.clamp(-1, 1).acos()).min())


@pytest.mark.parametrize("name", MARGINS)
def test_every_training_point_satisfies_the_margin(name):
    with_margin, plain = MARGINS[name]
    own, rival = trained_cosines(name)
    assert (with_margin(own) > plain(rival)).all()


@pytest.mark.parametrize("name", MARGINS)
def test_w_softmax_does_not_satisfy_the_margin(name):
    with_margin, plain = MARGINS[name]
    own, rival = trained_cosines("w")
    assert (own > rival).all()
    assert not (with_margin(own) > plain(rival)).all()


@pytest.mark.parametrize("name", MARGINS)
def test_margin_widens_the_gap_between_classes(name):
    assert smallest_gap(name) > smallest_gap("w") + 15


def test_larger_margin_widens_the_gap_more():
    assert smallest_gap("ga-4") > smallest_gap("ga-2") + 10
