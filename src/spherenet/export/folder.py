"""Save a model as a folder with `model.safetensors`, `config.json` and a model card, and load it again.

Loading runs no code of the folder and imports nothing that it names. A network of `create_model` is described by its
arguments. Any other module, e.g. a converted one of torchvision or transformers, is described by its conversion record;
the caller of `load_model` passes the module or its class. JSON may come from anyone, so each value is checked before it
is used.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from torch import nn

from spherenet._util.atomic import atomic_folder
from spherenet._util.files import parse_json, read_regular, user_path
from spherenet._util.files import to_json as json_text
from spherenet._util.text import first_line, is_utf8, short
from spherenet._util.validation import require_device
from spherenet.convert import apply_conversion, conversion_record
from spherenet.errors import InvalidArgumentType, ModelError
from spherenet.export.card import ModelCard, library_versions
from spherenet.export.description import build_on_meta, metadata_as_json, model_description, to_json
from spherenet.export.foreign_values import build_configuration, checked_arguments, require_arguments
from spherenet.export.weights import WEIGHTS_FILE, StoredWeights, require_free, write_weights, writing
from spherenet.layers import SphereLayer, SphereMultiheadAttention
from spherenet.models import Classifier

__all__ = [
    "CARD_FILE",
    "CONFIG_FILE",
    "FORMAT_VERSION",
    "load_metadata",
    "load_model",
    "read_json_object",
    "save_model",
    "shipped_model",
]

CONFIG_FILE = "config.json"
CARD_FILE = "README.md"
FORMAT = "spherenet-model"
FORMAT_VERSION = 1
LARGEST_CONFIG = 64 * 2**20
"""Largest config.json in bytes: enough for a million class names, too small to exhaust memory."""

M = TypeVar("M", bound=nn.Module)


def save_model(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    metadata: Mapping[str, Any] | None = None,
    card: ModelCard | None = None,
    overwrite: bool = False,
    arguments: Mapping[str, Any] | None = None,
    half: bool = False,
) -> None:
    """Write a model as a folder that `load_model` reads, bit for bit unless `half` is set.

    A network of `create_model` is saved with its arguments, converted or not. Any other module that `to_sphere`
    converted is saved with its conversion record and the name of its class; `load_model` takes a new module or the
    class from its caller. The folder is replaced atomically: it is never incomplete.

    Args:
        model: Model of `create_model`, or any module with sphere layers.
        folder: Folder to create.
        metadata: JSON values that belong to the model, such as class names and preprocessing.
        card: Content of README.md. Fields that are None are derived from the model if possible.
        overwrite: Whether to replace an existing folder. It must contain nothing but a saved model.
        arguments: Keyword arguments with which the class of a module that is not of `create_model` is called, so that
            `load_model` can call it again: numbers, switches and lists of them, which load neither code nor files. The
            configuration of a transformers model is saved without them.
        half: Whether to store float32 kernels and matrices in float16, which halves the file. `load_model` returns a
            network of `create_model` in float32 again, with rounded weights.

    Raises:
        ModelError: If JSON cannot describe the model (the operator, magnitude or loss is an object, or a network of
            `create_model` was changed other than by `to_sphere`), the model is wrapped (`torch.compile`,
            `nn.DataParallel`), the folder is not empty, or it cannot be written.
        TypeError: If model is a module without sphere layers that is not of `create_model`, or metadata or arguments
            are not mappings.
    """
    config: dict[str, Any] = {"format": FORMAT, "format_version": FORMAT_VERSION, "versions": library_versions()}
    for inside in ("module", "_orig_mod"):  # of DataParallel and others, of torch.compile
        if type(model).__module__.startswith("torch.") and isinstance(getattr(model, inside, None), nn.Module):
            raise ModelError(f"model must be saved without {type(model).__name__} around it: pass model.{inside}.")
    if isinstance(model, Classifier):
        if arguments is not None:
            raise InvalidArgumentType(
                "arguments", "must be None for a Classifier of create_model, which contains its own."
            )
        config["model"], conversion = model_description(model)
        if conversion is not None:
            config["conversion"] = conversion
    elif isinstance(model, nn.Module) and _sphere_layers(model):
        config["module"] = _module_description(model, arguments)
        config["conversion"] = conversion_record(model)
    else:
        raise InvalidArgumentType(
            "model",
            f"must be a Classifier of create_model or a module with sphere layers, got {type(model).__name__}; "
            "save_weights accepts any module.",
        )
    if half:
        config["half"] = True
    config["metadata"] = metadata_as_json(metadata)
    text = json_text(config)
    page = _completed_card(card, model, config).to_hub_page()
    with writing(folder) as target:
        if not is_utf8(target):
            raise ModelError(f"{target} must be a path in UTF-8, because safetensors reads no others.")
        names = (WEIGHTS_FILE, CONFIG_FILE, CARD_FILE)
        require_free(target, names, overwrite=overwrite)
        # Another program may write into the target after the check: its files are kept.
        with atomic_folder(target, names if overwrite else ()) as path:
            for name, content in ((CONFIG_FILE, text), (CARD_FILE, page)):
                (path / name).write_text(content, encoding="utf-8", errors="backslashreplace")
            write_weights(model, path / WEIGHTS_FILE, half=half)
            # safetensors creates a private file, but the folder should follow the user's umask.
            (path / WEIGHTS_FILE).chmod((path / CONFIG_FILE).stat().st_mode)


def _module_description(model: nn.Module, arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the class of a module and, if known, the arguments or the transformers configuration it is called with."""
    if arguments is not None and not isinstance(arguments, Mapping):
        raise InvalidArgumentType(
            "arguments", f"must be None or a mapping of JSON values, got {type(arguments).__name__}."
        )
    description: dict[str, Any] = {"class": f"{type(model).__module__}.{type(model).__qualname__}"}
    if arguments is not None:
        description["arguments"] = to_json("arguments", arguments)
        require_arguments(description["arguments"], "arguments")
    elif callable(getattr(getattr(model, "config", None), "to_diff_dict", None)):  # a transformers model
        # With strings as keys: transformers accepts class indices in both forms.
        configuration = json.loads(json.dumps(model.config.to_diff_dict(), default=str))  # type: ignore[union-attr, operator]
        description["transformers_config"] = to_json("the transformers configuration", configuration)
    return description


@overload
def load_model(
    folder: str | os.PathLike[str], *, device: str | torch.device = ..., model: None = ...
) -> Classifier: ...
@overload
def load_model(
    folder: str | os.PathLike[str], *, device: str | torch.device = ..., model: M | Callable[..., M]
) -> M: ...
def load_model(
    folder: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    model: nn.Module | Callable[..., nn.Module] | None = None,
) -> nn.Module:
    """Return the model of a saved folder, in evaluation mode.

    Folders from unknown sources are safe: the JSON is checked, and the network that it describes is compared with the
    header of the safetensors file before memory is allocated. No class is imported by a name in the folder. A module
    that is not of `create_model` must therefore be passed as `model`; its layers are converted as recorded.

    Args:
        folder: Folder written by `save_model`.
        device: Device of the model.
        model: New module of the same structure as the saved one before its conversion, which is changed in place, or a
            class or function that returns one. The latter is called with the saved arguments or transformers
            configuration, or without arguments if the folder has neither. Arguments must be named in its signature
            and be numbers, switches or lists of them, and none may select what is loaded (pretrained, path, …).

    Raises:
        ModelError: If a file is missing, corrupt or of an unknown format, or if the files or the module do not fit
            together, with the first names of tensors that are missing or unexpected.
        ValueError: If the device is unknown or not available.
        TypeError: If model is neither a module nor callable.
    """
    target = require_device("device", device)
    path = user_path(folder)
    config = _read(path)
    weights = StoredWeights.open(path / WEIGHTS_FILE)
    if model is None:
        if "model" not in config:
            raise ModelError(
                f"{path} holds a module of the class {_class_name(config)}: pass it as model, or a new module of this "
                "class, since no code is imported by a name in a file."
            )
        module: nn.Module = build_on_meta(config["model"], str(path / CONFIG_FILE))
    else:
        module = model if isinstance(model, nn.Module) else _called(model, config.get("module", {}), path)
    if "conversion" in config:
        apply_conversion(module, config["conversion"])
    if model is None:
        state = weights.read_for(module)
        if config.get("half") is True:
            state = {
                name: tensor.float() if tensor.dtype == torch.float16 else tensor for name, tensor in state.items()
            }
        module.load_state_dict(state, assign=True)
    else:
        different = weights.different_layers(module)
        if different:
            raise ModelError(f"{weights.path} does not fit the model: {different[0]}.")
        module.load_state_dict(weights.read_for(module))
    return module.eval().to(target)


def _class_name(config: dict[str, Any]) -> str:
    return short(repr(config["module"].get("class", "unknown")), 200)


def _called(factory: object, description: dict[str, Any], path: Path) -> nn.Module:
    """Return the module of a class or function, called with the arguments of a folder."""
    if not callable(factory):
        raise InvalidArgumentType(
            "model", f"must be a module, a class or a function that returns one, got {factory!r}."
        )
    configuration = description.get("transformers_config")
    config_class = getattr(factory, "config_class", None)
    try:
        if isinstance(configuration, dict) and config_class is not None:
            module = factory(build_configuration(config_class, configuration, str(path)))
        else:
            options = checked_arguments(factory, description.get("arguments"), f"the arguments in {path}")
            inspect.signature(factory).bind(**options)
            module = factory(**options)
    except (TypeError, ValueError) as error:
        raise ModelError(f"model cannot be called with the arguments in {path}: {first_line(error)}.") from error
    if not isinstance(module, nn.Module):
        raise InvalidArgumentType("model", f"must return a module, got {type(module).__name__}.")
    return module


def load_metadata(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the metadata of a saved folder.

    Raises:
        ModelError: If config.json is missing, corrupt or of an unknown format.
    """
    metadata: dict[str, Any] = _read(user_path(folder))["metadata"]
    return metadata


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a folder's config.json, with its top level checked."""
    if path.exists() and not path.is_dir():
        raise ModelError(f"{path} must be the folder of a saved model, got a file: sn.load_weights reads single files.")
    if not path.is_dir():
        raise ModelError(f"the folder {path} does not exist.")
    file = path / CONFIG_FILE
    if not file.is_file():
        raise ModelError(f"{path} is not a saved model: it has no {CONFIG_FILE}.")
    config = read_json_object(file)
    if config.get("format") != FORMAT:
        hint = "; load_pretrained loads folders of transformers" if "model_type" in config else ""
        hint = "; it is a run: use load_run, or spherenet export" if "train" in config else hint
        raise ModelError(f'{file} is not the config of a saved model: it has no "format": "{FORMAT}"{hint}.')
    version = config.get("format_version")
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise ModelError(f"{file} must have format_version {FORMAT_VERSION}, got {str(version)[:40]!r}.")
    for name in ("module" if "module" in config else "model", "metadata"):
        if not isinstance(config.get(name), dict):
            raise ModelError(f"{file} is corrupt: {name!r} must be an object.")
    return config


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file of unknown source. Raises ModelError if there is none."""
    try:
        # The caches of model hubs consist of links.
        value = parse_json(read_regular(file, LARGEST_CONFIG, follow_links=True))
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise ModelError(f"{file} is corrupt: it is not valid JSON ({first_line(error)}).") from error
    return value if isinstance(value, dict) else {}


def _completed_card(card: ModelCard | None, model: nn.Module, config: dict[str, Any]) -> ModelCard:
    """Return a card whose missing fields are derived from the model."""
    metadata = config["metadata"]
    classes = metadata.get("classes")
    valid = isinstance(classes, list) and all(isinstance(name, str) for name in classes)
    derived: dict[str, Any] = {"classes": classes if valid else None}
    if isinstance(model, Classifier):
        arguments = config["model"]
        name, size = arguments["name"], arguments.get("input_size") or [32, 32]
        derived |= {
            "architecture": _architecture(model, arguments),
            "input_shape": [1, arguments.get("in_channels", 3), *size],
        }
    else:
        name = type(model).__name__
        derived |= {"architecture": _converted_architecture(model), "usage": _USAGE.format(name=name)}
    if card is None:
        return ModelCard(name, versions=config["versions"], **derived)
    return replace(card, **{name: value for name, value in derived.items() if getattr(card, name) is None})


_USAGE = """\
from spherenet.export import load_metadata, load_model

# A new module of the saved class, or the class itself. Nothing is imported by a name in this folder.
model = load_model("path/to/this/folder", model={name})
print(load_metadata("path/to/this/folder"))"""


def _sphere_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a module that a conversion record describes."""
    return [module for module in model.modules() if isinstance(module, (SphereLayer, SphereMultiheadAttention))]


def _converted_architecture(model: nn.Module) -> str:
    """Return a sentence about a converted module."""
    layers = _sphere_layers(model)
    operators = ", ".join(sorted({getattr(layer, "operator", "attention") for layer in layers}))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return f"{type(model).__name__} with {len(layers)} sphere layers ({operators}); {parameters:,} parameters."


def _architecture(model: Classifier, arguments: dict[str, Any]) -> str:
    """Return a sentence about the network."""
    operator, k = arguments.get("operator"), arguments.get("k")
    layers = "plain convolutions" if operator is None else f"the {operator} operator"
    layers += "" if k is None else f" (k = {k:g})"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return (
        f"{arguments['name']} with {layers} and the loss {arguments.get('loss', 'softmax')}, {model.head.num_classes} "
        f"classes, images of {arguments.get('in_channels', 3)}×{'×'.join(map(str, arguments['input_size']))}; "
        f"{parameters:,} parameters."
    )


def shipped_model() -> Path:
    """Return the folder of the model included in the package, a small SphereNet trained on CIFAR-10.

    It is the default model of `spherenet predict`. Its README.md states how it was trained and its accuracy.
    """
    return Path(__file__).with_name("cifar10-air-cosine")
