"""A saved model: a folder of `model.safetensors`, `config.json` and a model card, read without running any code."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from spherenet.errors import ModelError
from spherenet.export.atomic import new_folder
from spherenet.export.card import ModelCard, library_versions
from spherenet.export.config import build_on_meta, config_of, metadata_as_json
from spherenet.export.messages import first_line
from spherenet.export.weights import WEIGHTS_FILE, StoredWeights, write_weights
from spherenet.files import read_regular
from spherenet.models import Classifier

__all__ = ["CARD_FILE", "CONFIG_FILE", "FORMAT_VERSION", "load_metadata", "load_model", "save_model"]

CONFIG_FILE = "config.json"
CARD_FILE = "README.md"
FORMAT = "spherenet-model"
FORMAT_VERSION = 1

LARGEST_CONFIG = 64 * 2**20
"""Bytes of a config.json that are read: room for a million class names, not for a file made to fill memory."""


def save_model(
    model: Classifier,
    folder: str | os.PathLike[str],
    *,
    metadata: Mapping[str, Any] | None = None,
    card: ModelCard | None = None,
    overwrite: bool = False,
) -> None:
    """Write a model as a folder from which `load_model` makes it again, bit for bit.

    metadata: JSON values that belong to the model, such as class names and preprocessing. card: what README.md says;
    None takes what the model itself tells. overwrite: replace a folder that holds a saved model and nothing else.
    The folder is complete or absent at any moment; a replaced one stays until the new one is complete.
    Raises ModelError for a model that JSON cannot describe (an operator or a loss given as an object, a network
    changed after it was made), for a folder that is not free, and where it cannot be written.
    """
    if not isinstance(model, Classifier):
        raise TypeError(
            f"model must be a Classifier of create_model, got {type(model).__name__}; save_weights takes any module."
        )
    config = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "versions": library_versions(),
        "model": config_of(model),
        "metadata": metadata_as_json(metadata),
    }
    text = json.dumps(config, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    page = _complete(card, model, config).to_markdown()
    with new_folder(folder, overwrite=overwrite, replaceable=(WEIGHTS_FILE, CONFIG_FILE, CARD_FILE)) as path:
        for name, content in ((CONFIG_FILE, text), (CARD_FILE, page)):
            (path / name).write_text(content, encoding="utf-8")
        write_weights(model, path / WEIGHTS_FILE)
        # safetensors makes its file private; a model folder is as readable as the user's other files.
        (path / WEIGHTS_FILE).chmod((path / CONFIG_FILE).stat().st_mode)


def load_model(folder: str | os.PathLike[str], *, device: str | torch.device = "cpu") -> Classifier:
    """Return the model of a saved folder, in evaluation mode.

    The folder may be anybody's: its JSON is checked, and the network it describes is compared with the header of
    its safetensors file before memory is taken for either. Raises ModelError for what is missing, damaged, of an
    unknown format, or does not fit together, with the first few names of tensors that are missing or too many.
    """
    where = _device(device)
    path = Path(folder).expanduser()
    model = build_on_meta(_read(path)["model"], str(path / CONFIG_FILE))
    model.load_state_dict(StoredWeights.open(path / WEIGHTS_FILE).read_for(model), assign=True)
    return model.eval().to(where)


def load_metadata(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the metadata of a saved folder; raises ModelError where it is missing, damaged or of unknown format."""
    metadata: dict[str, Any] = _read(Path(folder).expanduser())["metadata"]
    return metadata


def _read(path: Path) -> dict[str, Any]:
    """The checked outer part of a folder's config.json."""
    if not path.is_dir():
        raise ModelError(f"there is no folder {path}.")
    file = path / CONFIG_FILE
    if not file.is_file():
        raise ModelError(f"{path} is not a saved model: it has no {CONFIG_FILE}.")
    try:
        # Through links: the caches of model hubs are made of them.
        content = read_regular(file, LARGEST_CONFIG, follow_links=True)
        config = json.loads(content.decode(), parse_constant=_no_constant)
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is damaged: it is not JSON ({first_line(error)}).") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise ModelError(f'{file} is not of a saved model: it has no "format": "{FORMAT}".')
    version = config.get("format_version")
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise ModelError(f"{file} must have the format version {FORMAT_VERSION}, got {str(version)[:40]!r}.")
    for name in ("model", "metadata"):
        if not isinstance(config.get(name), dict):
            raise ModelError(f"{file} is damaged: {name!r} must be an object.")
    return config


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _device(device: str | torch.device) -> torch.device:
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(f'device must be a device of torch such as "cpu" or "cuda:0", got {device!r}.') from error


def _complete(card: ModelCard | None, model: Classifier, config: dict[str, Any]) -> ModelCard:
    """A card with what the model itself tells, where the caller did not say it."""
    arguments, metadata = config["model"], config["metadata"]
    classes = metadata.get("class_names")
    named = isinstance(classes, list) and all(isinstance(name, str) for name in classes)
    size = arguments.get("input_size") or [32, 32]
    known: dict[str, Any] = {
        "architecture": _architecture(model, arguments),
        "classes": classes if named else None,
        "input_shape": [1, arguments.get("in_channels", 3), *size],
    }
    if card is None:
        return ModelCard(arguments["name"], versions=config["versions"], **known)
    return replace(card, **{name: value for name, value in known.items() if getattr(card, name) is None})


def _architecture(model: Classifier, arguments: dict[str, Any]) -> str:
    """One sentence on the network, from the arguments that made it."""
    operator, k = arguments.get("operator"), arguments.get("k")
    kind = "plain convolutions" if operator is None else f"the {operator} operator"
    kind += "" if k is None else f" (k = {k:g})"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return (
        f"{arguments['name']} with {kind} and the loss {arguments.get('loss', 'softmax')}, {model.head.num_classes} "
        f"classes, images of {arguments.get('in_channels', 3)}×{'×'.join(map(str, arguments['input_size']))}; "
        f"{parameters:,} parameters."
    )
