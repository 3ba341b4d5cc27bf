"""How good a model is on a split: exact counts over all processes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spherenet.data import Split
from spherenet.engine.deferred import widest_dtype
from spherenet.engine.order import evaluation_order
from spherenet.engine.processes import Processes

__all__ = ["Evaluation", "autocast", "evaluate"]


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
