"""Checkpoints: folders of safetensors and JSON files with SHA-256 checksums, complete or absent at any time.

    checkpoints/step-00000500/   model.safetensors, optimizer.safetensors, state.json, manifest.json
    checkpoints/best-00000450/   the same for the best evaluation

A run whose weights are sharded has shard-00001-….safetensors and so on instead, one file per process, as
torch.distributed.checkpoint writes them: tensors have names "group/name", and the header has the offset of each part
under DCP_SHARDING_INFO, as JSON. Parts are rows of a tensor: everything is sharded along the first dimension.

A checkpoint is written to a temporary folder, synced to the disk and renamed before older ones are removed. Loading one
cannot run code.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from spherenet._util.atomic import atomic_folder, discard, is_temporary
from spherenet._util.files import (
    LARGEST_JSON,
    file_kind,
    make_folder,
    open_regular,
    parse_json,
    read_json,
    read_regular,
    remove,
    to_json,
)
from spherenet.errors import CheckpointError

__all__ = ["Checkpoint", "Checkpoints", "file_digest", "is_distributed", "load_checkpoint", "write_tensors"]

_NAME = re.compile(r"(step|best)-(\d{8,})")
_MANIFEST, _STATE = "manifest.json", "state.json"
_SUFFIX = ".safetensors"

_PART_PREFIX = "shard-"
"""Start of the names of the files."""

_OFFSETS = "DCP_SHARDING_INFO"

ATTEMPTS = 10
"""How often the checkpoints of a running process are listed before they count as corrupt."""


@dataclass(frozen=True)
class Checkpoint:
    """State of a run at a step: tensors in named groups ("model", "optimizer", …) and a JSON state."""

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    state: Mapping[str, Any]


class Checkpoints:
    """Checkpoints of a run: the last few, and the best one.

    Args:
        folder: Folder of the checkpoints.
        keep: Number of last checkpoints to keep. Two, so that a corrupt one has a predecessor.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder = folder
        self.keep = keep

    def save(self, checkpoint: Checkpoint, *, best: bool = False) -> Path:
        """Write a checkpoint, remove those that it replaces, and return its folder.

        Raises:
            CheckpointError: If it cannot be written. Earlier checkpoints are unchanged then.
        """
        with self.writing(checkpoint.step, checkpoint.state, {}, best=best) as folder:
            write_tensors(checkpoint.tensors, folder)
        return self.path(checkpoint.step, best=best)

    @contextmanager
    def writing(
        self, step: int, state: Mapping[str, Any], digests: Mapping[str, str], *, best: bool = False
    ) -> Iterator[Path]:
        """Yield a temporary folder for tensors. When the block ends, it becomes a checkpoint and replaces older ones.

        Args:
            step: Step of the checkpoint.
            state: JSON state.
            digests: SHA-256 of files that is known when the block ends. Those of other files are computed.
            best: Whether it is the checkpoint of the best evaluation.

        Raises:
            CheckpointError: If it cannot be written. Earlier checkpoints are unchanged then.
        """
        if not self._exists():
            make_folder(self.folder)
        path = self.path(step, best=best)
        try:
            with atomic_folder(path) as folder:
                yield folder
                (folder / _STATE).write_text(to_json({"step": step, **state}), "utf-8")
                names = sorted(file.name for file in folder.iterdir())
                manifest = {name: digests.get(name) or file_digest(folder / name) for name in names}
                (folder / _MANIFEST).write_text(to_json(manifest), "utf-8")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} could not be written ({_reason(error)}); {self.earlier()}.") from None
        for old in self.paths("best" if best else "step")[: -1 if best else -self.keep]:
            discard(old)

    def path(self, step: int, *, best: bool = False) -> Path:
        """Return the folder of the checkpoint of a step."""
        return self.folder / f"{'best' if best else 'step'}-{step:08d}"

    def paths(self, name: str = "step") -> list[Path]:
        """Return the folders of "step" or "best" checkpoints, the oldest first, without checking them."""
        if not self._exists():
            return []
        matches = [match for path in self.folder.iterdir() if (match := _NAME.fullmatch(path.name))]
        return [
            self.folder / match[0] for match in sorted(matches, key=lambda match: int(match[2])) if match[1] == name
        ]

    def last(self) -> str:
        """Return the part of a sentence that names the last checkpoint, or states that there is none."""
        paths = self.paths()
        return f"the checkpoint of step {_step_of(paths[-1])} is valid" if paths else "there is no checkpoint yet"

    def earlier(self) -> str:
        """Return the part of a sentence about the other checkpoints if one cannot be written."""
        return "earlier ones are valid" if self.paths() or self.paths("best") else "there is no earlier one"

    def _exists(self) -> bool:
        """Return whether the folder exists. Raises CheckpointError if it is a link or a file."""
        kind = file_kind(self.folder)
        if kind not in ("a folder", "nothing"):
            raise CheckpointError(f"{self.folder} must be a folder, got {kind}.")
        return kind == "a folder"

    def remove_unfinished(self) -> None:
        """Remove unfinished checkpoints of killed processes."""
        if self._exists():
            for path in self.folder.iterdir():
                if is_temporary(path):
                    remove(path)

    def newest(self, name: str = "step") -> tuple[Checkpoint | None, list[str]]:
        """Return the newest valid checkpoint, None if there is none, and an error message per newer corrupt one.

        A running process replaces its checkpoints. If one disappears while it is read, the new ones are read instead.
        """
        errors: list[str] = []
        for _ in range(ATTEMPTS):
            errors, listed = [], self.paths(name)
            for path in reversed(listed):
                try:
                    return load_checkpoint(path), errors
                except CheckpointError as error:
                    errors.append(str(error))
            if self.paths(name) == listed:
                break
        return None, errors

    def steps(self, name: str = "step", *, up_to: int) -> list[int]:
        """Return the steps of "step" or "best" checkpoints, up to a step."""
        return [step for path in self.paths(name) if (step := _step_of(path)) <= up_to]

    def remove_after(self, step: int) -> None:
        """Remove all checkpoints after the step from which a run is resumed."""
        for path in (*self.paths(), *self.paths("best")):
            if _step_of(path) > step:
                discard(path)

    def remove_best(self) -> None:
        """Remove the best checkpoint, because its accuracy is not comparable with later ones."""
        for path in self.paths("best"):
            discard(path)


def _step_of(path: Path) -> int:
    return int(path.name.partition("-")[2])


def check_checkpoint(path: Path) -> None:
    """Raise CheckpointError, naming the file, if a file is missing or differs from the manifest."""
    if (kind := file_kind(path)) != "a folder":
        raise CheckpointError(f"{path} must be a folder, got {kind}.")
    try:
        content = read_regular(path / _MANIFEST, LARGEST_JSON)
        manifest = parse_json(content)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / _MANIFEST} cannot be read ({_reason(error)}).") from None
    # The newline is written last: a file without it was truncated.
    if not content.endswith(b"\n") or not isinstance(manifest, dict) or _STATE not in manifest:
        raise CheckpointError(f"{path / _MANIFEST} is not the complete manifest of a checkpoint.")
    for name, expected in manifest.items():
        if name != Path(name).name:
            raise CheckpointError(f"{path / _MANIFEST} names {name!r}, which is not a file beside it.")
        try:
            digest = file_digest(path / name)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path / name} cannot be read ({_reason(error)}).") from None
        if digest != expected:
            raise CheckpointError(f"{path / name} is corrupt: its SHA-256 differs from the manifest.")


def load_checkpoint(path: Path, *, shapes_only: bool = False) -> Checkpoint:
    """Check and load a checkpoint. Raises CheckpointError, naming the file, if it is corrupt.

    Args:
        path: Folder of the checkpoint.
        shapes_only: Whether to return tensors without values, on the meta device.
    """
    check_checkpoint(path)
    try:
        state = read_json(path / _STATE)
        files = [path / name for name in read_json(path / _MANIFEST) if name.endswith(_SUFFIX)]
        if is_distributed(path):
            tensors = _read_parts(files, shapes_only)
        else:
            tensors = {file.name.removesuffix(_SUFFIX): _read_tensors(file, shapes_only) for file in files}
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({_reason(error)}).") from None
    step = state.pop("step", None) if isinstance(state, dict) else None
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise CheckpointError(f"{path / _STATE} is not the state of a checkpoint.")
    return Checkpoint(step, tensors, state)


def write_tensors(tensors: Mapping[str, Mapping[str, Tensor]], folder: Path) -> None:
    """Write one safetensors file per group."""
    for group, named in tensors.items():
        # Copies, because safetensors rejects tensors that share memory, such as tied weights.
        copies = {
            key: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for key, tensor in named.items()
        }
        save_file(copies, folder / f"{group}{_SUFFIX}")


def is_distributed(path: Path) -> bool:
    """Return whether a checkpoint was written by several processes, each with its part of the tensors."""
    return any(entry.name.startswith(_PART_PREFIX) for entry in path.iterdir())


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file. Raises OSError, before reading it, if it is longer than its header states."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        size, allowed = os.fstat(file.fileno()).st_size, LARGEST_JSON
        if path.suffix == _SUFFIX:
            # A safetensors file starts with the length of its header, then the header with the offsets of each tensor.
            length = int.from_bytes(file.read(8), "little")
            header: Any = parse_json(file.read(length)) if length <= LARGEST_JSON else None
            offsets = [entry.get("data_offsets") for entry in header.values()] if _is_header(header) else []
            allowed = 8 + length + max((pair[-1] for pair in offsets if pair), default=0)
            file.seek(0)
        if size > allowed:
            raise OSError(errno.EFBIG, f"must have at most {allowed:,} bytes, got {size:,}", str(path))
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _is_header(header: Any) -> bool:
    """Return whether a value has the structure of a safetensors header. safetensors checks its content."""
    if not isinstance(header, dict) or not all(isinstance(entry, dict) for entry in header.values()):
        return False
    offsets = [entry["data_offsets"] for entry in header.values() if "data_offsets" in entry]
    return all(isinstance(pair, list) and pair and isinstance(pair[-1], int) for pair in offsets)


def _reason(error: Exception) -> str:
    """Return a short reason without the path, which the message already contains."""
    return error.strerror or str(error) if isinstance(error, OSError) else (str(error) or type(error).__name__)


def _read_tensors(file: Path, shapes_only: bool = False) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, without values on the meta device if `shapes_only` is set."""
    with safe_open(file, framework="pt") as content:
        return {name: _tensor(content, name, shapes_only) for name in content.keys()}  # noqa: SIM118


def _read_parts(files: Iterable[Path], shapes_only: bool = False) -> dict[str, dict[str, Tensor]]:
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
