"""How well the scores for unknown inputs separate the images of a run from others: `spherenet evaluate --ood`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spherenet.data import Split
from spherenet.metrics import energy_score, knn_cosine_score, max_cosine_score, max_softmax_score, roc_auc
from spherenet.models.create import Classifier
from spherenet.training.embedding import embed_images
from spherenet.training.saved_runs import Predictor, SavedRun

__all__ = ["Separation", "separate_unknowns"]

NEIGHBORS = 50
"""Rank of the neighbor of the score by neighbors, or the number of training images if there are fewer."""

MOST_TRAINING_IMAGES = 50_000
"""Number of training images among which neighbors are searched; of more, equally spaced ones are used."""


class Separation(NamedTuple):
    """Areas under the ROC curves of known against unknown images.

    Attributes:
        areas: Area by the name of the score; 1 if every known image has a higher score than every unknown one.
        known: Number of known images.
        unknown: Number of unknown images.
        neighbors: k of the score by neighbors.
    """

    areas: dict[str, float]
    known: int
    unknown: int
    neighbors: int


@torch.no_grad()
def separate_unknowns(
    run: SavedRun,
    train: Split,
    known: Split,
    files: Sequence[str],
    *,
    device: torch.device,
    batch_size: int = 256,
    workers: int = 0,
    max_megapixels: float | None = None,
    failures: dict[str, str] | None = None,
) -> Separation:
    """Return how well each score separates known images from image files of other classes, in float32.

    Args:
        run: Trained network with its preprocessing, which the files receive too.
        train: Training images, among which neighbors are searched.
        known: Images of the known classes that the network was not trained on.
        files: Paths of images of other classes.
        device: Device of the computation.
        batch_size: Images per batch.
        workers: Number of processes that read images.
        max_megapixels: Largest size of an image file in millions of pixels; the default is 89.
        failures: Receives a message per file that cannot be read, by its path; by default it raises an error.

    Raises:
        DataError: A file cannot be read, or none of them with `failures`.
    """
    model = run.model.to(device).eval()
    unknown_features = embed_images(
        Predictor(model, run.classes, run.preprocessing),
        files,
        batch_size=batch_size,
        device=str(device),
        workers=workers,
        max_megapixels=max_megapixels,
        failures=failures,
    )
    known_features = _features(model, known, torch.arange(len(known)), batch_size, workers, device)
    chosen = torch.linspace(0, len(train) - 1, min(len(train), MOST_TRAINING_IMAGES), dtype=torch.float64).long()
    train_features = _features(model, train, chosen, batch_size, workers, device)
    features = torch.cat([known_features, unknown_features])
    logits, cosines = _outputs(model, features, batch_size, device)
    neighbors = min(NEIGHBORS, len(train_features))
    scores = {
        "max_cosine": max_cosine_score(cosines),
        "knn_cosine": knn_cosine_score(train_features, features, neighbors),
        "energy": energy_score(logits),
        "max_softmax": max_softmax_score(logits),
    }
    is_known = torch.arange(len(features)) < len(known_features)
    areas = {name: roc_auc(score, is_known) for name, score in scores.items()}
    return Separation(areas, len(known_features), len(unknown_features), neighbors)


def _features(
    model: Classifier, split: Split, indices: Tensor, batch_size: int, workers: int, device: torch.device
) -> Tensor:
    """Return the features of images of a split, float32 [N, D] on the CPU."""
    batches = split.batches(
        [(0, block) for block in torch.split(indices, batch_size)], device=device, augmentation=None, workers=workers
    )
    return torch.cat([model.features(batch.images).float().cpu() for batch in batches])


def _outputs(model: Classifier, features: Tensor, batch_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return logits and cosines [N, classes] on the CPU."""
    outputs = [model.head(block.to(device)) for block in torch.split(features, batch_size)]
    logits = torch.cat([model.criterion.logits(output).float().cpu() for output in outputs])
    return logits, torch.cat([output.cosine.float().cpu() for output in outputs])
