"""Random integers that are a function of (seed, epoch, index, purpose) and of nothing else.

A picture's augmentation must not depend on which batch, worker, process or device it meets, nor on what was drawn
before. So there is no generator with a state: each number is the output of SplitMix64 (Steele, Lea and Flood, 2014)
started at a key made of seed, epoch and purpose, at the step `index`. The arithmetic is that of unsigned 64-bit
integers, which numpy wraps the same way everywhere.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

__all__ = ["Purpose", "draw", "shuffled"]

GAMMA = 0x9E3779B97F4A7C15  # 2⁶⁴ divided by the golden ratio: the step of SplitMix64
MULTIPLIERS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
WORD = (1 << 64) - 1


class Purpose(IntEnum):
    """What a random number is for: the numbers of two purposes have nothing to do with each other."""

    HORIZONTAL_FLIP = 0
    VERTICAL_FLIP = 1
    PADDED_CROP_TOP = 2
    PADDED_CROP_LEFT = 3
    CROP_TOP = 4
    CROP_LEFT = 5
    SHUFFLE = 6


def _mixed(word: int) -> int:
    """Return SplitMix64's output for the state `word`, in Python's integers."""
    word = ((word ^ (word >> 30)) * MULTIPLIERS[0]) & WORD
    word = ((word ^ (word >> 27)) * MULTIPLIERS[1]) & WORD
    return word ^ (word >> 31)


def _key(seed: int, epoch: int, purpose: Purpose) -> int:
    key = 0
    for part in (seed, epoch, purpose):
        key = _mixed((key + GAMMA + part) & WORD)
    return key


def _words(seed: int, epoch: int, indices: Tensor, purpose: Purpose) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Return one uniform 64-bit word for each index: [N] uint64."""
    steps = indices.numpy().astype(np.uint64)
    words = np.uint64(_key(seed, epoch, purpose)) + steps * np.uint64(GAMMA)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(MULTIPLIERS[0])
    words = (words ^ (words >> np.uint64(27))) * np.uint64(MULTIPLIERS[1])
    return words ^ (words >> np.uint64(31))


def draw(seed: int, epoch: int, indices: Tensor, purpose: Purpose, below: int) -> Tensor:
    """Return a uniform integer of [0, below) for each index: [N] int64, CPU.

    The word's upper 32 bits are scaled by `below` (at most 2³¹): a value's probability is off by less than 2⁻³².
    """
    upper = _words(seed, epoch, indices, purpose) >> np.uint64(32)
    return torch.from_numpy(((upper * np.uint64(below)) >> np.uint64(32)).astype(np.int64))


def shuffled(seed: int, count: int) -> Tensor:
    """Return the numbers 0 … count − 1 in a random order that is the same on every machine and version."""
    words = _words(seed, 0, torch.arange(count), Purpose.SHUFFLE)
    return torch.from_numpy(np.argsort(words, kind="stable"))
