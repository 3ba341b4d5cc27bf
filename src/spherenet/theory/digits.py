"""Embedded digits as the labs take them: batches by a seed, and the plainest training loop there is."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from spherenet.data import Batch, Split, load_dataset
from spherenet.errors import TrainingError
from spherenet.models import Classifier

__all__ = ["BATCH_SIZE", "Digits", "train"]

LEARNING_RATE = 1e-2
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
    model: Classifier, digits: Digits, iterations: int, seed: int, learning_rate: float = LEARNING_RATE
) -> Iterator[float]:
    """Train by Adam; yield the loss of every iteration, once it has been taken.

    TrainingError where the loss is no longer a number.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    model.train()
    for step, (images, labels) in enumerate(digits.batches(iterations, seed), start=1):
        optimizer.zero_grad()
        loss, _ = model(images, labels)
        loss.backward()
        optimizer.step()
        value = loss.item()
        if not math.isfinite(value):
            raise TrainingError(f"the loss is {value} at iteration {step}; try another seed.")
        yield value
