"""How large the blocks are in which heads and losses walk over very many classes."""

from __future__ import annotations

from torch import Tensor

__all__ = ["BLOCK_ELEMENTS", "block_length"]

BLOCK_ELEMENTS = {"cpu": 1 << 19}
"""Elements of a block by device: 2 MB in float32 on a CPU, so that a block and its scratch stay in the cache."""

BLOCK_ELEMENTS_ELSEWHERE = 1 << 25
"""On other devices a block serves to save memory, not cache: few, large launches."""


def block_length(tensor: Tensor) -> int:
    """Return how many rows of a matrix make a block."""
    elements = BLOCK_ELEMENTS.get(tensor.device.type, BLOCK_ELEMENTS_ELSEWHERE)
    return max(1, elements // tensor.shape[1])
