"""The order of images in training and evaluation, and the evaluation of a model on a split.

The order is a function of seed and step, so that a run can be resumed at any step without saved state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spherenet.data import Batch, Split
from spherenet.training.config import TrainConfig
from spherenet.training.deferred import sum_dtype
from spherenet.training.distributed import Processes

__all__ = ["Evaluation", "epoch_seed", "evaluate", "evaluation_order", "first_batch", "training_order"]


def training_order(
    num_examples: int, config: TrainConfig, processes: Processes, first_step: int = 0
) -> Iterator[tuple[int, Tensor]]:
    """Return an endless iterator of (epoch, indices), one pair per micro-batch of this process.

    Each epoch is a new permutation of all images. Images that do not fill a last batch are left out of the epoch.

    Args:
        num_examples: Number of training images.
        config: Batch size, seed and number of micro-batches (`accumulate`).
        processes: Number of processes, among which a batch is divided, and the rank of this one.
        first_step: Step to start from.

    Raises:
        ValueError: If a batch is larger than the data set, or too small for all processes and micro-batches.
    """
    batch_size = config.batch_size
    if batch_size > num_examples:
        raise ValueError(f"batch_size must be at most the {num_examples} training images, got {batch_size}.")
    smallest = batch_size // processes.world // config.accumulate
    if smallest == 0:
        raise ValueError(
            f"batch_size must be at least {processes.world * config.accumulate} ({processes.world} processes × "
            f"{config.accumulate} micro-batches), got {batch_size}."
        )
    return _micro_batches(num_examples, config, processes, first_step)


def _micro_batches(
    num_examples: int, config: TrainConfig, processes: Processes, first_step: int
) -> Iterator[tuple[int, Tensor]]:
    """Yield what `training_order` returns."""
    batches = num_examples // config.batch_size
    epoch, batch = divmod(first_step, batches)
    while True:
        seed = epoch_seed(config.seed, epoch)
        order = torch.randperm(num_examples, generator=torch.Generator().manual_seed(seed))
        for indices in torch.split(order, config.batch_size)[batch:batches]:
            own = indices.tensor_split(processes.world)[processes.rank]
            for micro_batch in own.tensor_split(config.accumulate):
                yield epoch, micro_batch
        epoch, batch = epoch + 1, 0


def epoch_seed(seed: int, epoch: int) -> int:
    """Return a seed for an epoch (or step) of a run. Runs with neighboring seeds have no seed in common."""
    return (seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9) % 2**63


def evaluation_order(num_examples: int, batch_size: int, processes: Processes) -> Iterator[tuple[int, Tensor]]:
    """Yield (0, indices) of the batches that this process evaluates. Over all processes each image occurs once."""
    own = torch.arange(num_examples).tensor_split(processes.world)[processes.rank]
    for indices in torch.split(own, batch_size):
        if len(indices):
            yield 0, indices


def first_batch(split: Split, batch_size: int, device: torch.device) -> Batch:
    """Return the first images of a split, without augmentation."""
    order = [(0, torch.arange(min(len(split), batch_size)))]
    return next(iter(split.batches(order, device=device, augmentation=None)))


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation.

    Attributes:
        loss: Mean loss.
        accuracy: Fraction of correct predictions.
        count: Number of images.
        confusion: Number of images of class i that are predicted as class j, [classes, classes].
    """

    loss: float
    accuracy: float
    count: int
    confusion: Tensor


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
    """Evaluate a model in eval mode on a split. The counts are exact over all processes.

    Args:
        model: Module (images, labels) → (loss, scores). Its training mode is restored.
        split: Images and labels.
        num_classes: Number of classes.
        processes: Processes that divide the split among them.
        batch_size: Images per batch.
        precision: "float32", or "bfloat16" or "float16" for autocast.
        workers: Number of processes that read images from files.
    """
    device = processes.device
    was_training = model.training
    model.eval()
    loss_sum = torch.zeros((), dtype=sum_dtype(device), device=device)
    confusion = torch.zeros(num_classes, num_classes, dtype=torch.int64, device=device)
    autocast = torch.autocast(device.type, getattr(torch, precision), enabled=precision != "float32")
    order = evaluation_order(len(split), batch_size, processes)
    for batch in split.batches(order, device=device, augmentation=None, workers=workers):
        with autocast:
            loss, scores = model(batch.images, batch.labels)
        loss_sum += loss.to(loss_sum.dtype) * len(batch.labels)
        pairs = batch.labels * num_classes + scores.argmax(1)
        confusion += torch.bincount(pairs, minlength=num_classes**2).reshape(num_classes, num_classes)
    model.train(was_training)
    total_loss, confusion = processes.total(loss_sum).item(), processes.total(confusion).cpu()
    count = int(confusion.sum())
    return Evaluation(total_loss / count, confusion.trace().item() / count, count, confusion)
