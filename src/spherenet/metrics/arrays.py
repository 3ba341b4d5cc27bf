"""Numbers that users pass as tensors, arrays or lists, as checked tensors on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from spherenet._util.validation import require_memory
from spherenet.errors import InvalidArgument, InvalidArgumentType

__all__ = ["as_labels", "as_matrix", "as_tensor", "in_blocks", "unit_rows"]

SIMILARITIES_PER_BLOCK = 1 << 24
"""Number of similarities that a metric keeps at a time: 64 MiB in float32."""


def as_matrix(name: str, value: Any) -> Tensor:
    """Return a matrix of finite numbers, one row per image, in float32 or float64."""
    tensor = as_tensor(name, value)
    if tensor.dim() != 2 or tensor.numel() == 0:
        raise InvalidArgumentType(name, f"must be a matrix, one row per image, got shape {list(tensor.shape)}.")
    tensor = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
    if not bool(tensor.isfinite().all()):
        row = int((~tensor.isfinite()).any(1).nonzero()[0])
        raise InvalidArgument(name, f"must be finite, got another value in row {row}.")
    return tensor


def unit_rows(embeddings: Tensor) -> Tensor:
    """Return rows of norm 1, or 0 for rows of zeros."""
    # Divided by the largest entry first, so that no square overflows or underflows.
    largest = embeddings.abs().amax(1, keepdim=True)
    return F.normalize(embeddings / largest.where(largest > 0, 1))


def in_blocks(rows: Tensor, others: int) -> tuple[Tensor, ...]:
    """Split rows into blocks whose similarities with so many other rows fit in memory."""
    blocks: tuple[Tensor, ...] = torch.split(rows, max(1, SIMILARITIES_PER_BLOCK // others))
    return blocks


def as_tensor(name: str, value: Any) -> Tensor:
    """Return numbers as a tensor on the CPU; lists of numbers with a decimal point as float64, as numpy does."""
    if isinstance(value, Tensor):
        require_memory(value)
    try:
        if isinstance(value, Tensor):
            return value.detach().cpu()
        if isinstance(value, (list, tuple)) and any(isinstance(element, Tensor) for element in value):
            return torch.as_tensor(value).detach().cpu()
        array = np.asarray(value)
        # A copy, because tensors have neither negative strides nor another byte order.
        return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))
    except (TypeError, ValueError, RuntimeError):
        raise InvalidArgumentType(
            name, f"must be numbers in a tensor, an array or a list, got {type(value).__name__}."
        ) from None


def as_labels(name: str, labels: Tensor | Sequence[Any], count: int) -> np.ndarray[Any, Any]:
    """Return one number or string per embedding as an array."""
    if isinstance(labels, Tensor):
        require_memory(labels)
        labels = labels.detach().cpu()
        array = (labels.float() if labels.dtype == torch.bfloat16 else labels).numpy()
    else:
        array = np.asarray(labels)
    if array.dtype.kind == "O" and all(isinstance(label, str) for label in array.flat):  # as pandas returns them
        array = array.astype(str)
    if array.ndim != 1 or array.dtype.kind not in "biufUS":
        raise InvalidArgumentType(name, "must be a sequence of numbers or strings, one per image.")
    if len(array) != count:
        raise InvalidArgument(name, f"must have one value per embedding ({count}), got {len(array)}.")
    return array
