"""Which pictures are in which batch: a function of seed and step alone, so that any run can go on anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

__all__ = ["evaluation_order", "training_order"]


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
