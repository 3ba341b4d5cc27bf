"""The order of images in training and evaluation, and the evaluation of a model on a split.

The order is a function of seed and step, so that a run can be resumed at any step without saved state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spherenet.data import Batch, Split
from spherenet.errors import InvalidArgument
from spherenet.models.test_time import scores_of_views
from spherenet.training.balance import balanced_permutation, total_weight
from spherenet.training.config import TrainConfig
from spherenet.training.deferred import sum_dtype
from spherenet.training.distributed import Processes

__all__ = [
    "Evaluation",
    "epoch_seed",
    "evaluate",
    "evaluation_order",
    "first_batch",
    "mixed_batches",
    "training_order",
]


def training_order(
    labels: Tensor, config: TrainConfig, processes: Processes, first_step: int = 0
) -> Iterator[tuple[int, Tensor]]:
    """Return an endless iterator of (epoch, indices), one pair per micro-batch of this process.

    Each epoch is a new permutation of all images. Images that do not fill a last batch are left out of the epoch. If
    `sampling` is "balanced", an epoch has as many images, each class equally often. An image may then occur several
    times, so that the number of the batch takes the place of the epoch: it is augmented differently each time.

    Args:
        labels: Labels of the training images.
        config: Batch size, seed, sampling and number of micro-batches (`accumulate`).
        processes: Number of processes, among which a batch is divided, and the rank of this one.
        first_step: Step to start from.

    Raises:
        ValueError: If a batch is larger than the data set, or too small for all processes and micro-batches.
    """
    batch_size = config.batch_size
    if batch_size > len(labels):
        raise InvalidArgument("batch_size", f"must be at most the {len(labels)} training images, got {batch_size}.")
    smallest = batch_size // processes.world // config.accumulate
    if smallest == 0:
        raise InvalidArgument(
            "batch_size",
            f"must be at least {processes.world * config.accumulate} ({processes.world} processes × "
            f"{config.accumulate} micro-batches), got {batch_size}.",
        )
    if smallest == 1 and config.feature_batch_norm:
        raise InvalidArgument(
            "batch_size",
            f"must be at least {2 * processes.world * config.accumulate} with feature_batch_norm (two "
            f"images per process and micro-batch), got {batch_size}.",
        )
    return _micro_batches(labels, config, processes, first_step)


def _micro_batches(
    labels: Tensor, config: TrainConfig, processes: Processes, first_step: int
) -> Iterator[tuple[int, Tensor]]:
    """Yield what `training_order` returns."""
    batches, is_balanced = len(labels) // config.batch_size, config.sampling == "balanced"
    epoch, batch = divmod(first_step, batches)
    while True:
        generator = torch.Generator().manual_seed(epoch_seed(config.seed, epoch))
        if is_balanced:
            order = balanced_permutation(labels, generator)
        else:
            order = torch.randperm(len(labels), generator=generator)
        for number, indices in enumerate(torch.split(order, config.batch_size)[batch:batches], epoch * batches + batch):
            own = indices.tensor_split(processes.world)[processes.rank]
            for micro_batch in own.tensor_split(config.accumulate):
                yield number if is_balanced else epoch, micro_batch
        epoch, batch = epoch + 1, 0


def epoch_seed(seed: int, epoch: int) -> int:
    """Return a seed for an epoch (or step) of a run. Runs with neighboring seeds have no seed in common."""
    return (seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9) % 2**63


def evaluation_order(
    num_examples: int, batch_size: int, processes: Processes, *, together: bool = False
) -> Iterator[tuple[int, Tensor]]:
    """Yield (0, indices) of the batches that this process evaluates. Over all processes each image occurs once.

    With `together`, all processes have the same number of batches, of which the last may be empty in some.
    """
    if together:
        for indices in torch.split(torch.arange(num_examples), batch_size * processes.world):
            yield 0, indices.tensor_split(processes.world)[processes.rank]
        return
    own = torch.arange(num_examples).tensor_split(processes.world)[processes.rank]
    for indices in torch.split(own, batch_size):
        if len(indices):
            yield 0, indices


def mixed_batches(
    num_examples: int, batch_size: int, processes: Processes, count: int | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Yield (0, indices) of batches that this process evaluates if their composition matters.

    The images are in a fixed random order, because images sorted by class would fill batches with one class. Batches
    have nearly equal sizes of at least `batch_size`, because statistics of a small rest would be noise.

    Args:
        num_examples: Number of images.
        batch_size: Smallest size of a batch, if there are as many images.
        processes: Processes that divide the images among them.
        count: Number of images to use; None for all. There must be at least one per process.
    """
    order = torch.randperm(num_examples, generator=torch.Generator().manual_seed(0))[:count]
    own = order.tensor_split(processes.world)[processes.rank]
    # Sharded weights require the same number of batches in all processes.
    for indices in own.tensor_split(max(1, len(order) // processes.world // batch_size)):
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
        per_class: Images, correct predictions and predictions of each class, [3, classes].
        confusion: Number of images of class i that are predicted as class j, [classes, classes], None if there are
            more than 4,096 classes.
        tta_accuracy: Accuracy of the mean scores of several views of each image; None without them.
    """

    loss: float
    accuracy: float
    count: int
    per_class: Tensor
    confusion: Tensor | None
    tta_accuracy: float | None = None

    @property
    def balanced_accuracy(self) -> float:
        """Mean recall of the classes that have images."""
        images, correct, _ = self.per_class.double()
        return float((correct / images)[images > 0].mean())

    def as_row(self) -> dict[str, float]:
        """Return the numbers of a row of metrics."""
        return {
            "loss": self.loss,
            "accuracy": self.accuracy,
            "balanced_accuracy": self.balanced_accuracy,
            "count": self.count,
            **({} if self.tta_accuracy is None else {"tta_accuracy": self.tta_accuracy}),
        }


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
    mixed: bool = False,
    together: bool = False,
    progress: Callable[[int, int], None] | None = None,
    tta: str = "none",
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
        mixed: Whether batches are those of `mixed_batches`, for a model whose output depends on them.
        together: Whether the model's weights are sharded, so that all processes must make the same number of calls.
        progress: Function (done, total) that is called after each batch of this process.
        tta: Views of each image whose mean scores give a second accuracy; see `scores_of_views`.
    """
    device = processes.device
    was_training = model.training
    model.eval()
    # Losses, class weights, correct predictions with test-time augmentation.
    sums = torch.zeros(3, dtype=sum_dtype(device), device=device)
    has_confusion = num_classes <= LARGEST_CONFUSION
    # The confusion matrix, or for very many classes the rows of `Evaluation.per_class`.
    table = torch.zeros(num_classes if has_confusion else 3, num_classes, dtype=torch.int64, device=device)
    autocast = torch.autocast(device.type, getattr(torch, precision), enabled=precision != "float32")
    if mixed:
        order = mixed_batches(len(split), batch_size, processes)
    else:
        order = evaluation_order(len(split), batch_size, processes, together=together)
    done = 0
    for batch in split.batches(order, device=device, augmentation=None, workers=workers):
        with autocast:
            loss, scores = model(batch.images, batch.labels)
        if len(batch.labels):  # the mean loss of an empty batch, which keeps processes together, is NaN
            weight = torch.as_tensor(total_weight(model, batch.labels), dtype=sums.dtype, device=device)
            sums[:2] += torch.stack([loss.to(sums.dtype) * weight, weight])
        predictions = scores.argmax(1) if scores.dim() > 1 else scores
        if tta != "none":
            with autocast:
                views = scores_of_views(model, batch.images, tta)
            sums[2] += (views.argmax(1) == batch.labels).sum()
        if has_confusion:
            pairs = torch.bincount(batch.labels * num_classes + predictions, minlength=num_classes**2)
            table += pairs.reshape(num_classes, num_classes)
        else:
            correct = batch.labels[predictions == batch.labels]
            rows = (batch.labels, correct, predictions)
            table += torch.stack([row.bincount(minlength=num_classes) for row in rows])
        done += len(batch.labels)
        if progress is not None:
            progress(done, -(-len(split) // processes.world))
    model.train(was_training)
    (loss_sum, weight_sum, tta_correct), table = processes.total(sums).tolist(), processes.total(table).cpu()
    per_class = torch.stack([table.sum(1), table.diagonal(), table.sum(0)]) if has_confusion else table
    count, correct_count, _ = per_class.sum(1).tolist()
    confusion, tta_accuracy = table if has_confusion else None, None if tta == "none" else tta_correct / count
    return Evaluation(loss_sum / weight_sum, correct_count / count, count, per_class, confusion, tta_accuracy)


LARGEST_CONFUSION = 4096
"""Largest number of classes for which an evaluation counts the predictions of each class: 128 MB."""
