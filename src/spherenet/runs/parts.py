"""Tensors of checkpoints that several processes wrote, read by one process.

torch.distributed.checkpoint writes one safetensors file per process. Tensors have names "group/name", and the header
has the offset of each part under DCP_SHARDING_INFO, as JSON. Parts are rows of a tensor: everything is sharded along
the first dimension.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from spherenet._util.files import parse_json

__all__ = ["PART_PREFIX", "read_parts", "read_tensors"]

PART_PREFIX = "shard-"
"""Start of the names of the files."""

_OFFSETS = "DCP_SHARDING_INFO"


def read_tensors(file: Path, shapes_only: bool = False) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, without values on the meta device if `shapes_only` is set."""
    with safe_open(file, framework="pt") as content:
        return {name: _tensor(content, name, shapes_only) for name in content.keys()}  # noqa: SIM118


def read_parts(files: Iterable[Path], shapes_only: bool = False) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of a checkpoint by group, each joined from its parts.

    Raises:
        ValueError: If offsets are missing or wrong, or parts do not fit together.
        SafetensorError, OSError: If a file cannot be read.
    """
    parts_of: dict[str, list[tuple[int, Tensor]]] = {}
    for file in files:
        with safe_open(file, framework="pt") as content:
            offsets = parse_json((content.metadata() or {}).get(_OFFSETS, "").encode())
            for name in content.keys():  # noqa: SIM118
                tensor = _tensor(content, name, shapes_only)
                parts_of.setdefault(name, []).append((_first_row(offsets, name, tensor, file), tensor))
    groups: dict[str, dict[str, Tensor]] = {}
    for key, parts in parts_of.items():
        group, _, name = key.partition("/")
        groups.setdefault(group, {})[name] = _joined(key, parts)
    return groups


def _tensor(content: Any, name: str, shapes_only: bool) -> Tensor:
    if not shapes_only:
        tensor: Tensor = content.get_tensor(name)
        return tensor
    entry = content.get_slice(name)
    shape = entry.get_shape()
    dtype = (entry[:0] if shape else content.get_tensor(name)).dtype
    return torch.empty(shape, dtype=dtype, device="meta")


def _first_row(offsets: Any, name: str, tensor: Tensor, file: Path) -> int:
    """Return the index of the first row of a part. Raises ValueError if it is not the offset of rows."""
    entry = offsets.get(name) if isinstance(offsets, dict) else None
    place = entry.get("saved_offsets") if isinstance(entry, dict) else None
    if not isinstance(place, list) or any(type(at) is not int for at in place):
        raise ValueError(f"{file.name} has no valid offsets of {name!r}")
    if len(place) != tensor.dim() or any(at != 0 for at in place[1:]):
        raise ValueError(f"{file.name} has no valid offsets of {name!r}")
    return int(place[0]) if place else 0


def _joined(key: str, parts: list[tuple[int, Tensor]]) -> Tensor:
    """Return a tensor of its parts. Raises ValueError if there are gaps, or parts have different types."""
    parts.sort(key=lambda part: (part[0], len(part[1]) if part[1].dim() else 0))
    expected = 0
    first = parts[0][1]
    for row, tensor in parts:
        fits = (tensor.dim(), tensor.shape[1:], tensor.dtype) == (first.dim(), first.shape[1:], first.dtype)
        if row != expected or not fits:
            raise ValueError(f"the parts of {key!r} do not fit together")
        expected += len(tensor) if tensor.dim() else 1
    return first if len(parts) == 1 else torch.cat([tensor for _, tensor in parts])
