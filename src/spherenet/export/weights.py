"""The tensors of a module in a safetensors file: written once where modules share them, read only if they fit.

No code is run by reading such a file. What the file claims to hold is compared with the model, name by name and shape
by shape, before any tensor is read.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
from safetensors import torch as safetensors_torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from spherenet.errors import ModelError
from spherenet.files import write_file
from spherenet.losses import obsolete_state
from spherenet.text import first_line, first_names

__all__ = ["WEIGHTS_FILE", "Match", "StoredWeights", "load_matching", "load_weights", "save_weights", "write_weights"]

WEIGHTS_FILE = "model.safetensors"

_TIED = "tied_tensors"
"""The entry of the file's header with the names, as JSON, of tensors that are stored under another name."""

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def save_weights(model: nn.Module, file: str | os.PathLike[str]) -> None:
    """Write the state dict of any module as safetensors; a tensor that several modules share is written once.

    The file is complete or absent at any moment. Raises ModelError for a state that is no tensor or has no values
    yet (lazy modules, the meta device), and where the file cannot be written.
    """
    write_file(file, lambda path: write_weights(model, path))


def load_weights(model: nn.Module, folder_or_file: str | os.PathLike[str]) -> None:
    """Load a safetensors file, or that of a saved folder, into a module of exactly the same names and shapes.

    Tensors take the dtype and device that the module has. Raises ModelError, and changes nothing, for a file that
    is damaged or does not fit: the first few names that are missing, too many, or of another shape, and how many.
    """
    stored = StoredWeights.open(folder_or_file)
    model.load_state_dict(stored.read_for(model))


class Match(NamedTuple):
    """What `load_matching` loaded, what of the model it left as it was, and what of the file it did not use."""

    loaded: list[str]
    left_in_model: list[str]
    left_in_file: list[str]


def load_matching(model: nn.Module, folder_or_file: str | os.PathLike[str]) -> Match:
    """Load every tensor whose name and shape fit, as for fine-tuning to other classes, and report the rest.

    Raises ModelError for a damaged file and where nothing fits.
    """
    stored = StoredWeights.open(folder_or_file)
    state = _tensors_of(model)
    loaded = [name for name, tensor in state.items() if name in stored.shapes and stored.fits(name, tensor)]
    if not loaded:
        raise ModelError(f"{stored.path} holds no tensor that fits the model: its first names are {stored.first()}.")
    tensors = stored.read()
    model.load_state_dict({name: tensors[name] for name in loaded}, strict=False)
    left_in_model = [name for name in state if name not in loaded]
    return Match(loaded, left_in_model, [name for name in stored.shapes if name not in loaded])


def write_weights(model: nn.Module, path: Path) -> None:
    """Write the state dict of a module to a path that is nobody's yet."""
    state = _tensors_of(model)
    tied = _tied(state)
    tensors = {name: _compact(tensor) for name, tensor in state.items() if name not in tied}
    header = {"format": "pt"} | ({_TIED: json.dumps(tied)} if tied else {})
    try:
        safetensors_torch.save_file(tensors, path, header)
    except (safetensors.SafetensorError, ValueError) as error:
        raise ModelError(f"cannot write {path.name}: {first_line(error)}.") from error


@dataclass(frozen=True)
class StoredWeights:
    """The header of a safetensors file: what it holds, known before a tensor is read."""

    path: Path
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    tied: dict[str, str]

    @classmethod
    def open(cls, folder_or_file: str | os.PathLike[str]) -> StoredWeights:
        """Read the header; raises ModelError for what is missing, truncated or no safetensors file."""
        path = Path(folder_or_file).expanduser()
        path = path / WEIGHTS_FILE if path.is_dir() else path
        if not path.is_file():
            raise ModelError(f"there is no file {path}.")
        shapes, dtypes = {}, {}
        try:
            with safetensors.safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 (it is no dict)
                    entry = file.get_slice(name)
                    shapes[name], dtypes[name] = tuple(entry.get_shape()), _DTYPES[entry.get_dtype()]
                tied = _checked_ties(file.metadata(), shapes)
        except (safetensors.SafetensorError, OSError, ValueError, RecursionError) as error:
            raise ModelError(f"{path} is not a whole safetensors file: {first_line(error)}.") from error
        except KeyError as error:
            known = ", ".join(_DTYPES)
            raise ModelError(f"{path} holds tensors of the type {error}, which is none of {known}.") from error
        for alias, name in tied.items():
            shapes[alias], dtypes[alias] = shapes[name], dtypes[name]
        return cls(path, shapes, dtypes, tied)

    def read(self) -> dict[str, Tensor]:
        """Every tensor on the CPU, in memory of its own; tied names give one tensor."""
        try:
            with safetensors.safe_open(self.path, "pt") as file:
                # Copies: the originals are the file itself, and would change with it.
                tensors = {name: file.get_tensor(name).clone() for name in self.shapes if name not in self.tied}
        except (safetensors.SafetensorError, OSError) as error:
            raise ModelError(f"{self.path} cannot be read: {first_line(error)}.") from error
        return tensors | {alias: tensors[name] for alias, name in self.tied.items()}

    def read_for(self, model: nn.Module) -> dict[str, Tensor]:
        """The whole state dict of a model that may be on the meta device; raises ModelError where it does not fit."""
        state = _tensors_of(model, values=False)
        tied = _tied(state)
        # Other programs write tied tensors once too, under whichever of their names.
        stored_as = {tied.get(name, name): name for name in self.shapes if name in state}
        missing = [name for name in state if name not in self.shapes and tied.get(name, name) not in stored_as]
        obsolete = obsolete_state(model)
        extra = [name for name in self.shapes if name not in state and name not in obsolete]
        unfit = [
            f"{name} (file {_describe(self.shapes[name], self.dtypes[name])}, "
            f"model {_describe(tuple(tensor.shape), tensor.dtype)})"
            for name, tensor in state.items()
            if name in self.shapes and not self.fits(name, tensor)
        ]
        findings = {"missing": missing, "too many": extra, "of another shape or type": unfit}
        if any(findings.values()):
            words = [f"{len(names)} {what}: {first_names(names)}" for what, names in findings.items() if names]
            raise ModelError(f"{self.path} does not fit the model: {'; '.join(words)}.")
        tensors = self.read()
        for name, first in tied.items():
            kept = tensors[stored_as[first]]
            found = tensors.setdefault(name, kept)
            if found is not kept and not torch.equal(found, kept):
                raise ModelError(f"{self.path} has two values for {name} and {first}, one tensor in the model.")
            tensors.setdefault(first, kept)
        return tensors

    def fits(self, name: str, tensor: Tensor) -> bool:
        """Whether a stored tensor can take the place of `tensor`: the same shape, both floating or the same type."""
        dtype = self.dtypes[name]
        alike = dtype == tensor.dtype or (dtype.is_floating_point and tensor.dtype.is_floating_point)
        return alike and self.shapes[name] == tuple(tensor.shape)

    def first(self) -> str:
        """The first few names, for an error message."""
        return first_names(self.shapes)


def _tensors_of(model: nn.Module, values: bool = True) -> dict[str, Tensor]:
    """The state dict of a model; raises ModelError for what safetensors cannot hold."""
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ModelError(f"{name} must be a tensor to be saved or loaded, got {type(value).__name__}.")
        if is_lazy(value) or (values and value.is_meta):
            raise ModelError(f"{name} has no values yet: run the model once, or give it a device.")
        if value.layout != torch.strided or value.is_quantized:
            raise ModelError(f"{name} must be a dense tensor, got {value.layout} of {value.dtype}.")
    return state


def _tied(state: dict[str, Tensor]) -> dict[str, str]:
    """For each name whose tensor is the very tensor of an earlier name, that earlier name."""
    first: dict[object, str] = {}
    tied = {}
    for name, tensor in state.items():
        same_memory = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        # Tensors without memory of their own (meta, empty) have no address to tell them by.
        key: object = id(tensor) if tensor.is_meta or tensor.numel() == 0 else same_memory
        if first.setdefault(key, name) != name:
            tied[name] = first[key]
    return tied


def _compact(tensor: Tensor) -> Tensor:
    """A tensor on the CPU that fills its memory: safetensors refuses views that overlap others."""
    found = tensor.detach().cpu().contiguous()
    whole = found.untyped_storage().nbytes() == found.numel() * found.element_size()
    return found if whole else found.clone()


def _checked_ties(header: dict[str, str] | None, shapes: dict[str, tuple[int, ...]]) -> dict[str, str]:
    tied = json.loads((header or {}).get(_TIED, "{}"))
    pairs = tied.items() if isinstance(tied, dict) else [("", None)]
    if any(not isinstance(name, str) or name not in shapes or alias in shapes for alias, name in pairs):
        raise ValueError(f"its entry {_TIED} does not name tensors of the file")
    return dict(pairs)


def _describe(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"
