"""Save and load the tensors of any module as safetensors.

Reading such a file runs no code. The names, shapes and dtypes in its header are compared with the module before any
tensor is read. Tensors that modules share are stored once.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
from safetensors import torch as safetensors_torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from spherenet._util.atomic import atomic_file
from spherenet._util.files import open_regular, user_path
from spherenet._util.text import first_line, first_names
from spherenet.errors import ModelError
from spherenet.layers.base import SphereLayer, different_options

__all__ = [
    "WEIGHTS_FILE",
    "Match",
    "StoredWeights",
    "load_matching",
    "load_weights",
    "save_weights",
    "write_weights",
    "writing",
]

WEIGHTS_FILE = "model.safetensors"

_TIED = "tied_tensors"
"""Header entry with {name: name under which the shared tensor is stored} as JSON."""

_LAYERS = "sphere_layers"
"""Header entry with {name: options} of the sphere layers as JSON; absent if there are none."""

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def save_weights(model: nn.Module, file: str | os.PathLike[str]) -> None:
    """Write the state dict of any module as safetensors. Shared tensors are written once.

    The file is replaced atomically: it is never incomplete.

    Args:
        model: Any module.
        file: File to write.

    Raises:
        ModelError: If an entry of the state is not a tensor or has no values yet (lazy modules, the meta device), or
            if the file cannot be written.
    """
    with writing(file) as target, atomic_file(target) as path:
        write_weights(model, path)


@contextmanager
def writing(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the resolved target, whose parent folders are created. Raise ModelError if writing to it fails."""
    # Through links: the file or folder that they point to is replaced, not the link.
    path = user_path(target).resolve()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield path
    except (FileExistsError, NotADirectoryError) as error:
        raise ModelError(f"cannot write {path}: {error.filename or path.parent} is not a folder.") from error
    except OSError as error:
        raise ModelError(f"cannot write {path}: {error.strerror or error}.") from error


def require_free(folder: Path, replaceable: Collection[str], *, overwrite: bool) -> None:
    """Raise ModelError if a target folder is a file, or contains anything that may not be replaced.

    Args:
        folder: Target folder.
        replaceable: Names of the files that may be replaced.
        overwrite: Whether they may be replaced.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ModelError(f"cannot write the folder {folder}: a file has that name.")
    names = sorted(path.name for path in folder.iterdir())
    if names and not overwrite:
        raise ModelError(f"the folder {folder} is not empty; pass overwrite=True to replace it.")
    foreign = [name for name in names if name not in replaceable]
    if foreign:
        raise ModelError(
            f"the folder {folder} contains {foreign[0]!r}, which is not a file of a saved model, and is not replaced; "
            "remove it or choose another folder."
        )


def load_weights(model: nn.Module, folder_or_file: str | os.PathLike[str]) -> None:
    """Load a safetensors file into a module with exactly the same names and shapes.

    The module keeps its dtype and device.

    Args:
        model: Module to change.
        folder_or_file: Safetensors file, or a folder of `save_model`.

    Raises:
        ModelError: If the file is corrupt or does not fit the module, with the first names that are missing, unexpected
            or of another shape, or of sphere layers that are plain in the module or have another operator, k, center,
            magnitude or fixed rescaling. The module is unchanged then.
    """
    stored = StoredWeights.open(folder_or_file)
    different = stored.different_layers(model)
    if different:
        raise ModelError(f"{stored.path} does not fit the model: {first_names(different)}.")
    model.load_state_dict(stored.read_for(model))


class Match(NamedTuple):
    """Names of the tensors that `load_matching` loaded, left unchanged in the model, and did not use from the file."""

    loaded: list[str]
    left_in_model: list[str]
    left_in_file: list[str]


def load_matching(model: nn.Module, folder_or_file: str | os.PathLike[str]) -> Match:
    """Load every tensor whose name and shape fit, e.g. to fine-tune a model to other classes.

    If a sphere layer of the file is a plain layer of the model, or has other options there, a warning names it.

    Args:
        model: Module to change.
        folder_or_file: Safetensors file, or a folder of `save_model`.

    Returns:
        Names of the tensors that were loaded and of those that were not.

    Raises:
        ModelError: If the file is corrupt, or no tensor fits.
    """
    stored = StoredWeights.open(folder_or_file)
    state = _state_of(model)
    loaded = [name for name, tensor in state.items() if name in stored.shapes and stored.fits(name, tensor)]
    if not loaded:
        names = first_names(stored.shapes)
        raise ModelError(f"{stored.path} must contain a tensor that fits the model, got only others: {names}.")
    different = stored.different_layers(model)
    if different:
        warnings.warn(f"{stored.path} does not fit the model: {first_names(different)}.", stacklevel=2)
    tensors = stored.read()
    model.load_state_dict({name: tensors[name] for name in loaded}, strict=False)
    left_in_model = [name for name in state if name not in loaded]
    return Match(loaded, left_in_model, [name for name in stored.shapes if name not in loaded])


def write_weights(model: nn.Module, path: Path, *, half: bool = False) -> None:
    """Write the state dict of a module to a new file; with `half`, float32 matrices and kernels in float16."""
    state = _state_of(model)
    tied = _tied_names(state)
    tensors = {name: _compact(_halved(name, tensor) if half else tensor) for name, tensor in state.items()
               if name not in tied}  # fmt: skip
    layers = {name: module.saved_options() for name, module in model.named_modules() if isinstance(module, SphereLayer)}
    header = {"format": "pt"} | ({_TIED: json.dumps(tied)} if tied else {})
    header |= {_LAYERS: json.dumps(layers)} if layers else {}
    try:
        safetensors_torch.save_file(tensors, path, header)
        _sort_header(path)
    except (safetensors.SafetensorError, ValueError) as error:
        raise ModelError(f"cannot write {path.name}: {first_line(error)}.") from error


def _halved(name: str, tensor: Tensor) -> Tensor:
    """Return a float32 tensor with two dimensions or more in float16; statistics and biases stay as they are."""
    if tensor.dtype != torch.float32 or tensor.dim() < 2:
        return tensor
    stored = tensor.half()
    if not torch.equal(stored.isfinite(), tensor.isfinite()):
        largest = tensor.abs().max().item()
        raise ModelError(f"{name} must be at most 65,504 to be stored in half precision, got {largest:g}.")
    return stored


def _sort_header(path: Path) -> None:
    """Sort the metadata in the header, whose order in safetensors is random: equal models become equal files."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        # safetensors writes the same entries without spaces, too, and fills up with them.
        content = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode().ljust(length)
        if len(content) != length:
            raise ValueError("the header has another length after sorting")
        file.seek(8)
        file.write(content)


def refuse_pickle(path: Path) -> None:
    """Raise ModelError if the first bytes of a file are those of torch.save: a zip archive, or a pickle."""
    with open_regular(path, follow_links=True) as file:
        start = file.read(4)
    # A safetensors file starts with the length of its header as eight bytes, of which the upper ones are 0.
    if start == b"PK\x03\x04" or (start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05"):
        raise ModelError(
            f"{path} must be a safetensors file, got a pickle of torch.save, which can run code when it is loaded: "
            "load it in torch with weights_only=True and write it with safetensors.torch.save_file."
        )


@dataclass(frozen=True)
class StoredWeights:
    """Header of a safetensors file.

    Args:
        path: The file.
        shapes: Shape of each tensor by name.
        dtypes: Dtype of each tensor by name.
        tied: For each name that shares a stored tensor, the name under which it is stored.
        sphere_layers: Options of each sphere layer by name; empty if the file does not contain them.
    """

    path: Path
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    tied: dict[str, str]
    sphere_layers: dict[str, object]

    @classmethod
    def open(cls, folder_or_file: str | os.PathLike[str]) -> StoredWeights:
        """Read the header. Raises ModelError if the file is missing or is not a valid safetensors file."""
        path = user_path(folder_or_file)
        path = path / WEIGHTS_FILE if path.is_dir() else path
        if not path.is_file():
            raise ModelError(f"the file {path} does not exist.")
        refuse_pickle(path)
        shapes, dtypes = {}, {}
        try:
            with safetensors.safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 (the file is not a dict)
                    entry = file.get_slice(name)
                    shapes[name], dtypes[name] = tuple(entry.get_shape()), _DTYPES[entry.get_dtype()]
                tied = _checked_ties(file.metadata(), shapes)
                layers = json.loads((file.metadata() or {}).get(_LAYERS, "{}"))
        except (safetensors.SafetensorError, OSError, ValueError, RecursionError) as error:
            raise ModelError(f"{path} is not a valid safetensors file: {first_line(error)}.") from error
        except KeyError as error:
            raise ModelError(f"{path} must contain tensors of type {', '.join(_DTYPES)}, got {error}.") from error
        for alias, name in tied.items():
            shapes[alias], dtypes[alias] = shapes[name], dtypes[name]
        return cls(path, shapes, dtypes, tied, layers if isinstance(layers, dict) else {})

    def different_layers(self, model: nn.Module) -> list[str]:
        """Return the saved sphere layers whose options are not those of the model's module of the same name."""
        modules = dict(model.named_modules())
        different = {
            name: different_options(saved, modules[name])
            for name, saved in self.sphere_layers.items()
            if name in modules
        }
        return [f"{name or type(model).__name__} was saved with {text}" for name, text in different.items() if text]

    def read(self) -> dict[str, Tensor]:
        """Return every tensor on the CPU. Tied names share one tensor."""
        try:
            with safetensors.safe_open(self.path, "pt") as file:
                # Copies, since the tensors of `file` are memory-mapped and would change with the file.
                tensors = {name: file.get_tensor(name).clone() for name in self.shapes if name not in self.tied}
        except (safetensors.SafetensorError, OSError) as error:
            raise ModelError(f"{self.path} cannot be read: {first_line(error)}.") from error
        return tensors | {alias: tensors[name] for alias, name in self.tied.items()}

    def read_for(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the complete state dict of a model, which may be on the meta device.

        Raises ModelError if the file does not fit the model.
        """
        state = _state_of(model, values=False)
        tied = _tied_names(state)
        # Other programs may store a shared tensor under any one of its names.
        stored_as = {tied.get(name, name): name for name in self.shapes if name in state}
        missing = [name for name in state if name not in self.shapes and tied.get(name, name) not in stored_as]
        unexpected = [name for name in self.shapes if name not in state]
        different = [
            f"{name} (file {_describe(self.shapes[name], self.dtypes[name])}, "
            f"model {_describe(tuple(tensor.shape), tensor.dtype)})"
            for name, tensor in state.items()
            if name in self.shapes and not self.fits(name, tensor)
        ]
        problems = {"missing": missing, "unexpected": unexpected, "of another shape or type": different}
        if any(problems.values()):
            texts = [f"{len(names)} {problem}: {first_names(names)}" for problem, names in problems.items() if names]
            raise ModelError(f"{self.path} does not fit the model: {'; '.join(texts)}.")
        tensors = self.read()
        for name, first in tied.items():
            shared = tensors[stored_as[first]]
            stored = tensors.setdefault(name, shared)
            if stored is not shared and not torch.equal(stored, shared):
                raise ModelError(f"{self.path} has different values for {name} and {first}, which the model shares.")
            tensors.setdefault(first, shared)
        return tensors

    def fits(self, name: str, tensor: Tensor) -> bool:
        """Return whether a stored tensor can replace `tensor`: equal shapes, and equal or floating point dtypes."""
        dtype = self.dtypes[name]
        compatible = dtype == tensor.dtype or (dtype.is_floating_point and tensor.dtype.is_floating_point)
        return compatible and self.shapes[name] == tuple(tensor.shape)


def _state_of(model: nn.Module, values: bool = True) -> dict[str, Tensor]:
    """Return the state dict of a model. Raises ModelError for an entry that safetensors cannot store."""
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ModelError(f"{name} must be a tensor to be saved or loaded, got {type(value).__name__}.")
        if is_lazy(value) or (values and value.is_meta):
            raise ModelError(f"{name} has no values yet: run the model once, or move it from the meta device.")
        if value.layout != torch.strided or value.is_quantized:
            raise ModelError(f"{name} must be a dense tensor, got {value.layout} of {value.dtype}.")
    return state


def _tied_names(state: dict[str, Tensor]) -> dict[str, str]:
    """Return {name: earlier name} for each tensor that already occurs under an earlier name."""
    first: dict[object, str] = {}
    tied = {}
    for name, tensor in state.items():
        memory = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        # Meta and empty tensors have no address.
        key: object = id(tensor) if tensor.is_meta or tensor.numel() == 0 else memory
        if first.setdefault(key, name) != name:
            tied[name] = first[key]
    return tied


def _compact(tensor: Tensor) -> Tensor:
    """Return a CPU tensor that fills its storage, because safetensors rejects overlapping views."""
    compact = tensor.detach().cpu().contiguous()
    fills_storage = compact.untyped_storage().nbytes() == compact.numel() * compact.element_size()
    return compact if fills_storage else compact.clone()


def _checked_ties(header: dict[str, str] | None, shapes: dict[str, tuple[int, ...]]) -> dict[str, str]:
    tied = json.loads((header or {}).get(_TIED, "{}"))
    pairs = tied.items() if isinstance(tied, dict) else [("", None)]
    if any(not isinstance(name, str) or name not in shapes or alias in shapes for alias, name in pairs):
        raise ValueError(f"its header entry {_TIED} must refer to tensors of the file")
    return dict(pairs)


def _describe(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"
