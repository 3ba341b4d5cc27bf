"""Embedded digits as the labs take them: batches by a seed, and the plainest training loop there is.

2-D features of digits: what a softmax, a SphereNet and a margin make of ten classes in a plane (SPEC 5).

Three small networks end in two numbers an image, so their features can be drawn as they are: a CNN with softmax, its
SphereNet twin with softmax, the SphereNet with GA-Softmax under annealing. The layer that makes the two numbers is a
plain one in all three: two cosines would bound ‖x‖ by √2, and with it how sure any softmax may become.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spherenet.data import Batch, Split, load_dataset
from spherenet.data.splits import Progress
from spherenet.errors import TrainingError
from spherenet.layers import AngularHead
from spherenet.losses import AngularLoss, Annealing, GASoftmaxLoss, SoftmaxLoss
from spherenet.models import Classifier
from spherenet.models.layer_factory import LayerFactory
from spherenet.models.networks import PlainFeatures
from spherenet.theory import drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["BATCH_SIZE", "Digits", "Embedding", "class_angles", "draw", "embed_digits", "plane_network", "train"]

DIGITS_LEARNING_RATE = 1e-2
BATCH_SIZE = 64


class Digits:
    """The splits of mnist5k as images in float of any dtype and labels.

    shrink: 2 halves both sides by the mean of 2 × 2 pixels, which makes second derivatives affordable.
    """

    def __init__(self, dtype: torch.dtype = torch.float32, shrink: int = 1) -> None:
        dataset = load_dataset("mnist5k")
        self._train, self._test = dataset.train, dataset.test
        self._dtype, self._shrink = dtype, shrink
        self.classes = len(dataset.classes)
        self.side = dataset.preprocessing.size[0] // shrink

    def test(self, count: int | None = None) -> tuple[Tensor, Tensor]:
        """Return `count` test digits, evenly from all classes, or all of them: [N, 1, side, side] and [N]."""
        whole = len(self._test)
        indices = torch.arange(whole) if count is None else torch.linspace(0, whole - 1, count).long()
        return self._taken(self._test, indices)

    def batches(self, iterations: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield training batches, drawn with replacement by the seed."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(iterations):
            yield self._taken(self._train, torch.randint(len(self._train), (BATCH_SIZE,), generator=generator))

    def _taken(self, split: Split, indices: Tensor) -> tuple[Tensor, Tensor]:
        batch: Batch = next(iter(split.batches([(0, indices)], device=torch.device("cpu"), augmentation=None)))
        images = batch.images.to(self._dtype)
        return (images if self._shrink == 1 else F.avg_pool2d(images, self._shrink)), batch.labels


def train(
    model: Classifier, digits: Digits, iterations: int, seed: int, learning_rate: float = DIGITS_LEARNING_RATE
) -> Iterator[float]:
    """Train by Adam; yield the loss of every iteration, once it has been taken.

    TrainingError where the loss is no longer a number.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    model.train()
    for step, (images, labels) in enumerate(digits.batches(iterations, seed), start=1):
        optimizer.zero_grad()
        if isinstance(model.criterion, GASoftmaxLoss):
            model.criterion.set_step(step - 1)
        loss, _ = model(images, labels)
        loss.backward()
        optimizer.step()
        value = loss.item()
        if not math.isfinite(value):
            raise TrainingError(f"the loss is {value} at iteration {step}; try another seed.")
        yield value


WIDTHS, FEATURES = (16, 24, 32), 64
LEARNING_RATE = 3e-3
MARGIN = 4
SECTOR = (0.1, 0.9)  # of a class's features: what its arc in the drawing spans
SHOWN = 0.98  # of all norms: a few far points would shrink the picture


@dataclass(frozen=True)
class Embedding:
    """Features [N, 2] and labels [N] of the test digits under one network, and how its classes lie (angles in degrees).

    within: mean angle between a feature and its class's mean direction. between: smallest angle between two of those.
    """

    network: str
    features: Tensor
    labels: Tensor
    accuracy: float
    within: float
    between: float

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON takes, the features left out."""
        return {
            "network": self.network,
            "accuracy": self.accuracy,
            "within_degrees": self.within,
            "between_degrees": self.between,
        }


def plane_network(operator: str | None, loss: AngularLoss, digits: Digits, seed: int) -> Classifier:
    """A cnn-3 that ends in two features; operator None for plain convolutions."""
    torch.manual_seed(seed)
    size = (digits.side, digits.side)
    convolutions = PlainFeatures(LayerFactory(operator=operator), WIDTHS, 1, size, depth=3, out_features=FEATURES)
    features = nn.Sequential(convolutions, nn.Linear(FEATURES, 2, bias=False))
    return Classifier(features, AngularHead(2, digits.classes), loss, {})


def embed_digits(
    iterations: int = 300,
    *,
    operator: str = "sigmoid",
    m: float = MARGIN,
    seed: int = 0,
    progress: Progress = lambda done, total: None,
) -> list[Embedding]:
    """Train the three networks alike and return where each puts the test digits.

    ValueError for iterations < 1, an unknown operator or m < 1; TrainingError where training fails.
    """
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}.")
    margin = GASoftmaxLoss("linear", m, annealing=Annealing.for_run(iterations))
    cases: list[tuple[str, str | None, Callable[[], AngularLoss]]] = [
        ("CNN, softmax", None, SoftmaxLoss),
        ("SphereNet, softmax", operator, SoftmaxLoss),
        (f"SphereNet, GA-Softmax m = {m:g}", operator, lambda: margin),
    ]
    digits = Digits()
    # All are made before the first is trained: a wrong operator must not cost a minute.
    models = [(name, plane_network(chosen, loss(), digits, seed)) for name, chosen, loss in cases]
    found = []
    for index, (name, model) in enumerate(models):
        for step, _ in enumerate(train(model, digits, iterations, seed, LEARNING_RATE), start=1):
            progress(index * iterations + step, len(models) * iterations)
        found.append(_embedding(name, model, digits))
    return found


def _embedding(name: str, model: Classifier, digits: Digits) -> Embedding:
    images, labels = digits.test()
    model.eval()
    with torch.no_grad():
        # In batches of the training's size: larger ones would have kernels compiled for a second's work.
        features = torch.cat([model.features(part) for part in torch.split(images, BATCH_SIZE)])
        scores = model.criterion.logits(model.head(features))
    accuracy = (scores.argmax(1) == labels).double().mean().item()
    within, between = class_angles(features, labels)
    return Embedding(name, features, labels, accuracy, within, between)


def class_angles(features: Tensor, labels: Tensor) -> tuple[float, float]:
    """Mean angle to the own class's mean direction, and smallest angle between two of those, in degrees.

    Shapes: features [N, F], labels [N] with two classes or more. A zero feature has no direction and is left out.
    """
    directed = features.norm(dim=1) > 0
    features, labels = features[directed].double(), labels[directed]
    units = features / features.norm(dim=1, keepdim=True)
    classes, members = torch.unique(labels, return_inverse=True)
    sums = torch.zeros(len(classes), units.shape[1], dtype=torch.float64).index_add_(0, members, units)
    centres = sums / sums.norm(dim=1, keepdim=True).clamp_min(1e-12)
    within = (units * centres[members]).sum(1).clamp(-1, 1).acos().mean()
    cosines = (centres @ centres.mT).clamp(-1, 1).fill_diagonal_(-1)
    return math.degrees(within.item()), math.degrees(math.acos(cosines.max().item()))


def draw(embeddings: list[Embedding]) -> Figure:
    """One panel a network: its features, and around them an arc for each class; the gaps between arcs are margins."""
    figure, axes = drawing.new_figure(1, len(embeddings), width=4.6 * len(embeddings), height=5.2)
    for axis, embedding in zip(axes, embeddings, strict=True):
        _draw_one(axis, embedding)
    figure.supxlabel("arcs: the middle 80 % of each class's directions; gaps between them are margins", fontsize=10)
    return figure


def _draw_one(axis: Axes, embedding: Embedding) -> None:
    features, labels = embedding.features.double(), embedding.labels
    radius = float(features.norm(dim=1).quantile(SHOWN)) or 1.0
    arcs = []
    for index, label in enumerate(sorted(set(labels.tolist()))):
        colour = drawing.TEN[index % len(drawing.TEN)]
        own = features[labels == label]
        axis.scatter(own[:, 0], own[:, 1], s=5, color=colour, linewidths=0, alpha=0.8)
        mean = own.mean(0)
        middle = math.atan2(float(mean[1]), float(mean[0]))
        turned = (torch.atan2(own[:, 1], own[:, 0]) - middle + math.pi) % (2 * math.pi) - math.pi
        low, high = (middle + float(turned.quantile(share)) for share in SECTOR)
        arcs.append((middle, low, high, label, colour))
    for index, (middle, low, high, label, colour) in enumerate(sorted(arcs)):
        # Neighbours at two radii, so that arcs which overlap are seen to.
        at = (1.08 + 0.06 * (index % 2)) * radius
        arc = torch.linspace(low, high, 40)
        axis.plot(at * arc.cos(), at * arc.sin(), color=colour, linewidth=4.5, solid_capstyle="butt")
        beyond = 1.26 * radius
        axis.text(beyond * math.cos(middle), beyond * math.sin(middle), f"{label}", ha="center", va="center")
    axis.set_xlim(-1.35 * radius, 1.35 * radius)
    axis.set_ylim(-1.35 * radius, 1.35 * radius)
    axis.set_aspect("equal")
    axis.grid(alpha=0.2)
    axis.set_title(
        f"{embedding.network}\naccuracy {embedding.accuracy:.1%}, within {embedding.within:.1f}°, "
        f"between ≥ {embedding.between:.1f}°",
        fontsize=10,
    )
