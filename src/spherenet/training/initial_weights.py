"""Initial weights of a run (`--init-from`): those of a run, a saved model, or a checkpoint of another library.

Tensors are matched by name and shape. The names that torchvision and transformers give to the layers of their basic
residual networks (resnet18) are known, so that `resnet-18` with widths 64 128 256 512 starts from such checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from spherenet._util.files import user_path
from spherenet._util.text import first_names
from spherenet.errors import ModelError, RunError
from spherenet.export.folder import read_json_object
from spherenet.export.weights import WEIGHTS_FILE, StoredWeights
from spherenet.layers.base import SphereLayer, different_options
from spherenet.models import Classifier
from spherenet.training.saved_runs import load_run

__all__ = ["start_from"]

INDEX_FILE = "model.safetensors.index.json"
MAX_FILES = 10_000
UNIT, LAYER = {"1": "first", "2": "second"}, {"convolution": "0", "normalization": "1", "conv": "0", "bn": "1"}

_WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.)+")
"""Prefixes that DistributedDataParallel and torch.compile add to names."""


def start_from(model: Classifier, source: str) -> list[str]:
    """Copy the weights of another model into a new model, if names and shapes match.

    Fine-tuning changes the head or the loss. Tensors without a match keep their initial values.

    Args:
        model: Model to change.
        source: Folder of a run, of a saved model, of transformers or of any safetensors files, or a safetensors file.

    Returns:
        Warnings: tensors without a match, and sphere layers whose options differ.

    Raises:
        RunError: If no tensor fits.
        ModelError, CheckpointError: If the source is corrupt or not supported.
    """
    weights, layers = _read(source)
    own = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("criterion.")}
    matching = {name: weights[name] for name in own if name in weights and own[name].shape == weights[name].shape}
    if not matching:
        raise RunError(f"no tensor in {source} fits this model: it has {first_names(weights)}, got {first_names(own)}.")
    model.load_state_dict(matching, strict=False)
    modules = dict(model.named_modules())
    different = {name: different_options(saved, modules[name]) for name, saved in layers.items() if name in modules}
    messages = [f"{name} of {source} has {text}: its outputs differ." for name, text in different.items() if text][:1]
    unmatched = [name for name in own if name not in matching]
    if unmatched:
        first = f"{len(unmatched)} tensors (first: {unmatched[0]})"
        messages.append(f"{first} have no match in {source} and keep their initial values.")
    return messages


def _read(source: str) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Return the tensors of a source and the saved options of its sphere layers, by the names of this library."""
    files = _safetensors(user_path(source))
    if files is None:
        model = load_run(source).model
        spherical = {name: layer for name, layer in model.named_modules() if isinstance(layer, SphereLayer)}
        return model.state_dict(), {name: layer.saved_options() for name, layer in spherical.items()}
    weights: dict[str, Tensor] = {}
    layers: dict[str, object] = {}
    for stored in map(StoredWeights.open, files):
        weights |= {_translated(name): tensor for name, tensor in stored.read().items()}
        layers |= {_translated(f"{name}.").removesuffix("."): saved for name, saved in stored.sphere_layers.items()}
    return weights, layers


def _safetensors(path: Path) -> list[Path] | None:
    """Return the safetensors files of a source, None for the folder of a run."""
    if path.is_file():
        return [path]
    if (path / WEIGHTS_FILE).is_file():
        return [path / WEIGHTS_FILE]
    if (path / INDEX_FILE).is_file():
        names = read_json_object(path / INDEX_FILE).get("weight_map")
        files = sorted(set(map(str, names.values()))) if isinstance(names, dict) else []
        if not 0 < len(files) <= MAX_FILES or any(
            Path(name).name != name or Path(name).suffix != ".safetensors" for name in files
        ):
            raise ModelError(f"{path / INDEX_FILE} must have a weight_map of names of files in its folder.")
        return [path / name for name in files]
    if not (path / "config.json").is_file() or (path / "checkpoints").exists():
        return None
    pickled = sorted([*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")])
    if pickled:
        raise ModelError(
            f"{pickled[0]} is a pickle, which can run code when it is loaded: save the model as safetensors first."
        )
    return None


def _translated(name: str) -> str:
    """Return the name in `ResidualFeatures` of a tensor of a basic residual network; other names are unchanged."""
    name = _WRAPPERS.sub("", name)
    for pattern, replacement in _RULES:
        match = pattern.match(name)
        if match is not None:
            return replacement(match.groups()) + name[match.end() :]
    return name


_RULES: list[tuple[re.Pattern[str], Callable[[Sequence[str]], str]]] = [
    # torchvision: conv1, bn1, layer1.0.conv1, layer1.0.bn1, layer2.0.downsample.0
    (re.compile(r"(conv|bn)1\."), lambda g: f"features.begin.{LAYER[g[0]]}."),
    (
        re.compile(r"layer([1-9])\.(\d+)\.(conv|bn)([12])\."),
        lambda g: f"features.stages.{int(g[0]) - 1}.{g[1]}.{UNIT[g[3]]}.{LAYER[g[2]]}.",
    ),
    (
        re.compile(r"layer([1-9])\.(\d+)\.downsample\.([01])\."),
        lambda g: f"features.stages.{int(g[0]) - 1}.{g[1]}.shortcut.{g[2]}.",
    ),
    # transformers: resnet.encoder.stages.0.layers.0.layer.0.convolution
    (
        re.compile(r"(?:resnet\.)?embedder\.embedder\.(convolution|normalization)\."),
        lambda g: f"features.begin.{LAYER[g[0]]}.",
    ),
    (
        re.compile(r"(?:resnet\.)?encoder\.stages\.(\d+)\.layers\.(\d+)\.layer\.([01])\.(convolution|normalization)\."),
        lambda g: f"features.stages.{g[0]}.{g[1]}.{UNIT[str(int(g[2]) + 1)]}.{LAYER[g[3]]}.",
    ),
    (
        re.compile(r"(?:resnet\.)?encoder\.stages\.(\d+)\.layers\.(\d+)\.shortcut\.(convolution|normalization)\."),
        lambda g: f"features.stages.{g[0]}.{g[1]}.shortcut.{LAYER[g[2]]}.",
    ),
]
"""Patterns of names in other libraries, with the names here."""
