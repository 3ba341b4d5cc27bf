"""2-D features of digits: the effect of softmax, sphere layers and a margin on ten classes in a plane.

Three small networks have two features per image, so that the features can be drawn directly: a CNN with softmax, a
SphereNet with softmax, and a SphereNet with GA-Softmax and annealing (Eq. 6 and 7 of docs/concepts.md). The last layer
before the head is a plain linear one in all three, because two cosines would bound ‖x‖ by √2 and with it the confidence
of the softmax.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spherenet.data import Batch, Progress, Split, load_dataset
from spherenet.errors import InvalidArgument, TrainingError
from spherenet.layers import AngularHead
from spherenet.losses import AngularLoss, Annealing, GASoftmaxLoss, MarginLoss, SoftmaxLoss
from spherenet.models import Classifier, LayerFactory, PlainFeatures
from spherenet_paper.theory import drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["BATCH_SIZE", "Digits", "Embedding", "class_angles", "draw", "embed_digits", "plane_network", "train"]

DIGITS_LEARNING_RATE = 1e-2
BATCH_SIZE = 64


class Digits:
    """The splits of mnist5k as floating-point images and labels.

    Args:
        dtype: Data type of the images.
        shrink: Factor by which both sides are reduced by averaging, which makes second derivatives affordable.
    """

    def __init__(self, dtype: torch.dtype = torch.float32, shrink: int = 1) -> None:
        dataset = load_dataset("mnist5k")
        self._train, self._test = dataset.train, dataset.test
        self._dtype, self._shrink = dtype, shrink
        self.classes = len(dataset.classes)
        self.side = dataset.preprocessing.size[0] // shrink

    def test(self, count: int | None = None) -> tuple[Tensor, Tensor]:
        """Return `count` test digits, evenly over all classes, or all of them: [N, 1, side, side] and [N]."""
        total = len(self._test)
        indices = torch.arange(total) if count is None else torch.linspace(0, total - 1, count).long()
        return self._select(self._test, indices)

    def batches(self, iterations: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield training batches, drawn with replacement."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(iterations):
            yield self._select(self._train, torch.randint(len(self._train), (BATCH_SIZE,), generator=generator))

    def _select(self, split: Split, indices: Tensor) -> tuple[Tensor, Tensor]:
        batch: Batch = next(iter(split.batches([(0, indices)], device=torch.device("cpu"), augmentation=None)))
        images = batch.images.to(self._dtype)
        return (images if self._shrink == 1 else F.avg_pool2d(images, self._shrink)), batch.labels


def train(
    model: Classifier, digits: Digits, iterations: int, seed: int, learning_rate: float = DIGITS_LEARNING_RATE
) -> Iterator[float]:
    """Train with Adam and yield the loss after every iteration.

    Raises:
        TrainingError: The loss is not finite.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    model.train()
    for step, (images, labels) in enumerate(digits.batches(iterations, seed), start=1):
        optimizer.zero_grad()
        if isinstance(model.criterion, MarginLoss):
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
SECTOR = (0.1, 0.9)  # quantiles of the directions of a class that its arc spans
SHOWN = 0.98  # quantile of the norms at the edge of the drawing, which cuts off outliers


@dataclass(frozen=True)
class Embedding:
    """Features of the test digits in one network.

    Attributes:
        network: Name of the network.
        features: Features [N, 2].
        labels: Labels [N].
        accuracy: Test accuracy.
        within: Mean angle in degrees between a feature and the mean direction of its class.
        between: Smallest angle in degrees between the mean directions of two classes.
    """

    network: str
    features: Tensor
    labels: Tensor
    accuracy: float
    within: float
    between: float

    def as_dict(self) -> dict[str, Any]:
        """Return the result for JSON, without the features."""
        return {
            "network": self.network,
            "accuracy": self.accuracy,
            "within_degrees": self.within,
            "between_degrees": self.between,
        }


def plane_network(operator: str | None, loss: AngularLoss, digits: Digits, seed: int) -> Classifier:
    """Return a cnn-3 with two features; operator None gives plain convolutions."""
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
    """Train the three networks and return the features of the test digits.

    Args:
        iterations: Training iterations per network.
        operator: Operator of the SphereNets.
        m: Margin of GA-Softmax.
        seed: Seed of networks and batches.
        progress: Function called with (done, total).

    Raises:
        ValueError: iterations < 1, the operator is unknown, or m < 1.
        TrainingError: The loss is not finite.
    """
    if iterations < 1:
        raise InvalidArgument("iterations", f"must be at least 1, got {iterations}.")
    margin = GASoftmaxLoss.paper(m=m, annealing=Annealing.for_run(iterations))
    cases: list[tuple[str, str | None, Callable[[], AngularLoss]]] = [
        ("CNN, softmax", None, SoftmaxLoss),
        ("SphereNet, softmax", operator, SoftmaxLoss),
        (f"SphereNet, GA-Softmax m = {m:g}", operator, lambda: margin),
    ]
    digits = Digits()
    # All models are created before training, so that an invalid argument is reported at once.
    models = [(name, plane_network(chosen, loss(), digits, seed)) for name, chosen, loss in cases]
    embeddings = []
    for index, (name, model) in enumerate(models):
        for step, _ in enumerate(train(model, digits, iterations, seed, LEARNING_RATE), start=1):
            progress(index * iterations + step, len(models) * iterations)
        embeddings.append(_embedding(name, model, digits))
    return embeddings


def _embedding(name: str, model: Classifier, digits: Digits) -> Embedding:
    images, labels = digits.test()
    model.eval()
    with torch.no_grad():
        # Batches of the training's size, so that no other kernels have to be prepared.
        features = torch.cat([model.features(batch) for batch in torch.split(images, BATCH_SIZE)])
        scores = model.criterion.logits(model.head(features))
    accuracy = (scores.argmax(1) == labels).double().mean().item()
    within, between = class_angles(features, labels)
    return Embedding(name, features, labels, accuracy, within, between)


def class_angles(features: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return the mean angle to the mean direction of the class and the smallest angle between two such, in degrees.

    Args:
        features: Features [N, F]. Zero features have no direction and are ignored.
        labels: Labels [N] with at least two classes.
    """
    nonzero = features.norm(dim=1) > 0
    features, labels = features[nonzero].double(), labels[nonzero]
    units = features / features.norm(dim=1, keepdim=True)
    classes, members = torch.unique(labels, return_inverse=True)
    sums = torch.zeros(len(classes), units.shape[1], dtype=torch.float64).index_add_(0, members, units)
    centers = sums / sums.norm(dim=1, keepdim=True).clamp_min(1e-12)
    within = (units * centers[members]).sum(1).clamp(-1, 1).acos().mean()
    cosines = (centers @ centers.mT).clamp(-1, 1).fill_diagonal_(-1)
    return math.degrees(within.item()), math.degrees(math.acos(cosines.max().item()))


def draw(embeddings: list[Embedding]) -> Figure:
    """Draw one panel per network: its features and an arc per class; the gaps between arcs are margins."""
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
        color = drawing.TEN_COLORS[index % len(drawing.TEN_COLORS)]
        members = features[labels == label]
        axis.scatter(members[:, 0], members[:, 1], s=5, color=color, linewidths=0, alpha=0.8)
        mean = members.mean(0)
        middle = math.atan2(float(mean[1]), float(mean[0]))
        turned = (torch.atan2(members[:, 1], members[:, 0]) - middle + math.pi) % (2 * math.pi) - math.pi
        low, high = (middle + float(turned.quantile(fraction)) for fraction in SECTOR)
        arcs.append((middle, low, high, label, color))
    for index, (middle, low, high, label, color) in enumerate(sorted(arcs)):
        # Adjacent arcs have different radii, so that overlaps are visible.
        arc_radius = (1.08 + 0.06 * (index % 2)) * radius
        arc = torch.linspace(low, high, 40)
        axis.plot(arc_radius * arc.cos(), arc_radius * arc.sin(), color=color, linewidth=4.5, solid_capstyle="butt")
        outside = 1.26 * radius
        axis.text(outside * math.cos(middle), outside * math.sin(middle), f"{label}", ha="center", va="center")
    axis.set_xlim(-1.35 * radius, 1.35 * radius)
    axis.set_ylim(-1.35 * radius, 1.35 * radius)
    axis.set_aspect("equal")
    axis.grid(alpha=0.2)
    axis.set_title(
        f"{embedding.network}\naccuracy {embedding.accuracy:.1%}, within {embedding.within:.1f}°, "
        f"between ≥ {embedding.between:.1f}°",
        fontsize=10,
    )
