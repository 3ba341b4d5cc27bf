"""Imbalanced data: class weights, an order in which all classes occur equally often, and a warning.

A network that ignores a rare class has a high accuracy. Its balanced accuracy, the mean recall of the classes, is low.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from spherenet._util.text import first_names
from spherenet.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spherenet.training.evaluation import Evaluation

__all__ = ["balanced_permutation", "class_weights", "single_class_warning", "total_weight"]

FEW_IMAGES = 10
"""Number of images below which predictions of a single class mean nothing."""


def class_weights(option: Sequence[str], classes: Sequence[str], labels: Tensor) -> Tensor:
    """Return the weight of each class in the loss, scaled to a mean of 1 over the training images.

    Args:
        option: ["balanced"] for weights inversely proportional to the number of images of a class, or "NAME=WEIGHT"
            per class, 1 for classes that are not named.
        classes: Names of the classes.
        labels: Labels of the training images.

    Returns:
        float32 [C].

    Raises:
        ValueError: If a name is not a class or occurs twice, or a weight is not a number greater than 0.
    """
    counts = labels.bincount(minlength=len(classes)).double()
    if list(option) == ["balanced"]:
        weights = 1 / counts.clamp_min(1)
    else:
        weights = torch.ones(len(classes), dtype=torch.float64)
        given: set[str] = set()
        for entry in option:
            name, weight = _parsed(entry)
            if name not in classes:
                raise InvalidArgument("class_weights", f"must name classes ({first_names(classes, 5)}), got {name!r}.")
            if name in given:
                raise InvalidArgument("class_weights", f"must name each class once, got {name!r} twice.")
            given.add(name)
            weights[classes.index(name)] = weight
    return (weights * len(labels) / (weights * counts).sum()).float()


def _parsed(entry: str) -> tuple[str, float]:
    """Return the name and the weight of "NAME=WEIGHT". The name may contain an equals sign."""
    name, _, text = entry.rpartition("=")
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not name or not 1e-6 <= weight <= 1e6:
        allowed = "balanced alone, or NAME=WEIGHT per class with a weight from 0.000001 to 1,000,000"
        raise InvalidArgument("class_weights", f"must be {allowed}, got {entry[:80]!r}.")
    return name, weight


def total_weight(model: nn.Module, labels: Tensor) -> Tensor | int:
    """Return the sum of the class weights of labels, by which a loss divides its mean; without weights their number."""
    weight = getattr(getattr(model, "criterion", None), "class_weight", None)
    return len(labels) if weight is None else weight.to(labels.device)[labels].sum()


def balanced_permutation(labels: Tensor, generator: torch.Generator) -> Tensor:
    """Return as many indices as there are labels, in which each class occurs equally often, in random order.

    Counts of classes differ by at most 1. So do those of the images of a class: a frequent class leaves
    some of them out, a rare one repeats them.
    """
    count = len(labels)
    _, dense, images = torch.unique(labels, return_inverse=True, return_counts=True)
    shuffled = torch.randperm(count, generator=generator)
    by_class = shuffled[dense[shuffled].argsort(stable=True)]
    quotas = torch.full_like(images, count // len(images))
    quotas[torch.randperm(len(images), generator=generator)[: count % len(images)]] += 1
    class_of_slot = torch.arange(len(images)).repeat_interleave(quotas)
    slot = torch.arange(count) - (quotas.cumsum(0) - quotas)[class_of_slot]
    first = images.cumsum(0) - images
    chosen = by_class[first[class_of_slot] + slot % images[class_of_slot]]
    return chosen[torch.randperm(count, generator=generator)]


def single_class_warning(evaluation: Evaluation, classes: Sequence[str], split: str) -> str | None:
    """Return a sentence if all predictions are the same class although the images are of several, else None."""
    images, _, predictions = evaluation.per_class
    label = int(predictions.argmax())
    has_classes = int((images > 0).sum()) > 1 and evaluation.count >= FEW_IMAGES
    if not has_classes or int(predictions[label]) != evaluation.count:
        return None
    return (
        f"all {evaluation.count} {split} predictions are the class {classes[label]!r}, which has "
        f"{int(images[label]) / evaluation.count:.1%} of these images (balanced accuracy "
        f"{evaluation.balanced_accuracy:.2%}); try --class-weights balanced, --sampling balanced or more iterations."
    )
