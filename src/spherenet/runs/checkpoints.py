"""Checkpoints: folders of safetensors and JSON with a manifest of SHA-256, complete or absent at any moment.

    checkpoints/step-00000500/   model.safetensors, optimizer.safetensors, state.json, manifest.json
    checkpoints/best-00000450/   the same of the best evaluation

A checkpoint is made under a temporary name, synced, and renamed; only then are older ones removed. Nothing in it can
run code.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from spherenet.errors import CheckpointError
from spherenet.files import (
    LARGEST_JSON,
    discard,
    file_kind,
    is_temporary,
    make_folder,
    open_regular,
    parse_json,
    read_json,
    read_regular,
    remove,
    replacing,
    write_json,
)

__all__ = ["Checkpoint", "Checkpoints"]

_NAME = re.compile(r"(step|best)-(\d{8,})")
_MANIFEST, _STATE = "manifest.json", "state.json"
_SUFFIX = ".safetensors"

ATTEMPTS = 10
"""How often the checkpoints of a live run are listed anew: each time takes longer than its next checkpoint."""


@dataclass(frozen=True)
class Checkpoint:
    """What a run was at a step: tensors in named groups ("model", "optimizer", …) and a JSON state."""

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    state: Mapping[str, Any]


class Checkpoints:
    """The checkpoints of one run: the last few, and the best."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        """keep: how many of the last ones stay; two, so that a damaged newest one has a predecessor."""
        self.folder = folder
        self.keep = keep

    def save(self, checkpoint: Checkpoint, *, best: bool = False) -> Path:
        """Write a checkpoint and then remove the ones it makes superfluous; return its folder."""
        kind = "best" if best else "step"
        if not self._is_there():
            make_folder(self.folder)
        path = self.folder / f"{kind}-{checkpoint.step:08d}"
        try:
            with replacing(path) as temporary:
                temporary.mkdir()
                for name, tensors in checkpoint.tensors.items():
                    # Copies: safetensors takes no two names for one memory, as tied weights have.
                    copies = {key: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
                              for key, tensor in tensors.items()}  # fmt: skip
                    save_file(copies, temporary / f"{name}{_SUFFIX}")
                write_json(temporary / _STATE, {"step": checkpoint.step, **checkpoint.state})
                write_json(temporary / _MANIFEST, {file.name: _digest(file) for file in sorted(temporary.iterdir())})
                discard(path)  # the same step, saved again
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} could not be written ({_reason(error)}); earlier ones are intact.") from None
        for old in self.paths(kind)[: -1 if best else -self.keep]:
            discard(old)
        return path

    def paths(self, kind: str = "step") -> list[Path]:
        """Return the checkpoints of a kind, "step" or "best", the oldest first; whether they are whole is not known."""
        if not self._is_there():
            return []
        found = [(match, path) for path in self.folder.iterdir() if (match := _NAME.fullmatch(path.name))]
        return [path for match, path in sorted(found, key=lambda pair: int(pair[0][2])) if match[1] == kind]

    def _is_there(self) -> bool:
        """Whether there is a folder; CheckpointError if something else has its name, through which others' are lost."""
        kind = file_kind(self.folder)
        if kind not in ("a folder", "nothing"):
            raise CheckpointError(f"{self.folder} must be a folder of its own, got {kind}.")
        return kind == "a folder"

    def remove_unfinished(self) -> None:
        """Remove what a killed process left half written."""
        if self._is_there():
            for path in self.folder.iterdir():
                if is_temporary(path):
                    remove(path)

    def newest(self, kind: str = "step") -> tuple[Checkpoint | None, list[str]]:
        """Return the newest valid checkpoint, None without one, and a sentence about each corrupt one before it.

        A run that is being trained replaces its checkpoints: one that was removed while it was read is no corrupt one,
        and those that took its place are read instead.
        """
        complaints: list[str] = []
        for _ in range(ATTEMPTS):
            complaints, listed = [], self.paths(kind)
            for path in reversed(listed):
                try:
                    return load_checkpoint(path), complaints
                except CheckpointError as error:
                    complaints.append(str(error))
            if self.paths(kind) == listed:
                break
        return None, complaints

    def steps(self, kind: str = "step", *, up_to: int) -> list[int]:
        """Return the steps of the checkpoints of a kind, up to a step."""
        return [step for path in self.paths(kind) if (step := _step_of(path)) <= up_to]

    def remove_after(self, step: int) -> None:
        """Remove those after a step that the run is resumed from, the best one too: what comes after it is anew."""
        for path in (*self.paths(), *self.paths("best")):
            if _step_of(path) > step:
                discard(path)


def _step_of(path: Path) -> int:
    return int(path.name.partition("-")[2])


def check_checkpoint(path: Path) -> None:
    """Raise CheckpointError, naming the file, unless all files are there with the bytes of the manifest."""
    if (kind := file_kind(path)) != "a folder":
        raise CheckpointError(f"{path} must be a folder of its own, got {kind}.")
    try:
        content = read_regular(path / _MANIFEST, LARGEST_JSON)
        manifest = parse_json(content)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / _MANIFEST} cannot be read ({_reason(error)}).") from None
    # The newline is written last: without it the file was cut.
    if not content.endswith(b"\n") or not isinstance(manifest, dict) or _STATE not in manifest:
        raise CheckpointError(f"{path / _MANIFEST} is not a whole manifest of a checkpoint.")
    for name, digest in manifest.items():
        if name != Path(name).name:
            raise CheckpointError(f"{path / _MANIFEST} names {name!r}, which is not a file beside it.")
        try:
            found = _digest(path / name)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path / name} cannot be read ({_reason(error)}).") from None
        if found != digest:
            raise CheckpointError(f"{path / name} is damaged: its SHA-256 is not the one of the manifest.")


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint after checking it whole; CheckpointError names the file that is not."""
    check_checkpoint(path)
    try:
        state = read_json(path / _STATE)
        tensors = {
            name.removesuffix(_SUFFIX): load_file(path / name)
            for name in read_json(path / _MANIFEST)
            if name.endswith(_SUFFIX)
        }
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({_reason(error)}).") from None
    step = state.pop("step", None) if isinstance(state, dict) else None
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise CheckpointError(f"{path / _STATE} is not the state of a checkpoint.")
    return Checkpoint(step, tensors, state)


def _digest(path: Path) -> str:
    """The SHA-256 of a file; OSError if it is longer than what it says it holds, before all of it is read."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        size, allowed = os.fstat(file.fileno()).st_size, LARGEST_JSON
        if path.suffix == _SUFFIX:
            # As safetensors files begin: the length of the header, then the header with the place of each tensor.
            length = int.from_bytes(file.read(8), "little")
            header: Any = parse_json(file.read(length)) if length <= LARGEST_JSON else None
            places = [entry.get("data_offsets") for entry in header.values()] if _is_header(header) else []
            allowed = 8 + length + max((place[-1] for place in places if place), default=0)
            file.seek(0)
        if size > allowed:
            raise OSError(errno.EFBIG, f"must have at most {allowed:,} bytes, got {size:,}", str(path))
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _is_header(header: Any) -> bool:
    """Whether a value has the form of the header of a safetensors file; what it holds is safetensors' concern."""
    if not isinstance(header, dict) or not all(isinstance(entry, dict) for entry in header.values()):
        return False
    places = [entry["data_offsets"] for entry in header.values() if "data_offsets" in entry]
    return all(isinstance(place, list) and place and isinstance(place[-1], int) for place in places)


def _reason(error: Exception) -> str:
    """What went wrong in a few words, without the path that the sentence names already."""
    return error.strerror or str(error) if isinstance(error, OSError) else (str(error) or type(error).__name__)
