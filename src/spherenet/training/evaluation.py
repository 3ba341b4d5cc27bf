"""Which pictures are in which batch: a function of seed and step alone, so that any run can go on anywhere.

How good a model is on a split: exact counts over all processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spherenet.data import Split
from spherenet.training.deferred import widest_dtype
from spherenet.training.distributed import Processes

__all__ = ["Evaluation", "autocast", "evaluate", "evaluation_order", "training_order"]


def training_order(
    num_examples: int, batch_size: int, seed: int, first_step: int, share: Callable[[Tensor], Tensor], accumulate: int
) -> Iterator[tuple[int, Tensor]]:
    """Yield (epoch, indices) of every piece of every batch from `first_step` on, without end.

    An epoch is a new permutation of all pictures; what is left over when it does not divide into batches is left
    out of that epoch. share: the part of a batch that this process takes. Raises ValueError where a batch is
    larger than the set, or too small for every process and piece to get a picture.
    """
    batches = num_examples // batch_size
    if batches == 0:
        raise ValueError(f"batch_size must be at most the {num_examples} training pictures, got {batch_size}.")
    if min(len(piece) for piece in share(torch.arange(batch_size)).tensor_split(accumulate)) == 0:
        raise ValueError(f"batch_size {batch_size} is too small for {accumulate} pieces in every process.")
    return _pieces(num_examples, batch_size, seed, first_step, share, accumulate)


def _pieces(
    num_examples: int, batch_size: int, seed: int, first_step: int, share: Callable[[Tensor], Tensor], accumulate: int
) -> Iterator[tuple[int, Tensor]]:
    epoch, batch = divmod(first_step, num_examples // batch_size)
    while True:
        order = torch.randperm(num_examples, generator=torch.Generator().manual_seed(epoch_seed(seed, epoch)))
        for indices in torch.split(order, batch_size)[batch : num_examples // batch_size]:
            for piece in share(indices).tensor_split(accumulate):
                yield epoch, piece
        epoch, batch = epoch + 1, 0


def epoch_seed(seed: int, epoch: int) -> int:
    """A seed of its own for each epoch of each run; runs with neighbouring seeds share none."""
    return (seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9) % 2**63


def evaluation_order(
    num_examples: int, batch_size: int, share: Callable[[Tensor], Tensor]
) -> Iterator[tuple[int, Tensor]]:
    """Yield (0, indices) of this process's part of a set, each picture once."""
    for indices in torch.split(share(torch.arange(num_examples)), batch_size):
        if len(indices):
            yield 0, indices


@dataclass(frozen=True)
class Evaluation:
    """Loss and accuracy (a fraction) over `count` pictures; confusion[i, j] counts class i taken for class j."""

    loss: float
    accuracy: float
    count: int
    confusion: Tensor


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """The context a forward pass runs in."""
    return torch.autocast(device.type, getattr(torch, precision), enabled=precision != "float32")


@torch.no_grad()
def evaluate(
    model: nn.Module,
    split: Split,
    num_classes: int,
    processes: Processes,
    *,
    batch_size: int = 256,
    precision: str = "float32",
    workers: int = 0,
) -> Evaluation:
    """Evaluate a model in eval mode on a whole split, each picture once; the model's mode is left as it was."""
    was_training = model.training
    model.eval()
    wide = widest_dtype(processes.device)
    loss_sum = torch.zeros((), dtype=wide, device=processes.device)
    confusion = torch.zeros(num_classes, num_classes, dtype=torch.int64, device=processes.device)
    order = evaluation_order(len(split), batch_size, processes.share)
    for batch in split.batches(order, device=processes.device, augmentation=None, workers=workers):
        with autocast(processes.device, precision):
            loss, scores = model(batch.images, batch.labels)
        loss_sum += loss.to(wide) * len(batch.labels)
        pairs = batch.labels * num_classes + scores.argmax(1)
        confusion += torch.bincount(pairs, minlength=num_classes**2).reshape(num_classes, num_classes)
    model.train(was_training)
    loss_sum, confusion = processes.total(loss_sum), processes.total(confusion)
    count = int(confusion.sum())
    return Evaluation(loss_sum.item() / count, confusion.trace().item() / count, count, confusion)
