"""Save a model as a folder with `model.safetensors`, `config.json` and a model card, and load it again.

Loading runs no code. `config.json` holds the arguments of `create_model` and may come from anyone, so each value is
checked before it is used.
"""

from __future__ import annotations

import inspect
import json
import math
import numbers
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spherenet.errors import ModelError
from spherenet.export.card import ModelCard, library_versions
from spherenet.export.weights import WEIGHTS_FILE, StoredWeights, require_free, write_weights, writing
from spherenet.files import atomic_folder, read_regular, user_path
from spherenet.losses import Annealing, MarginLoss, options_of_earlier_versions
from spherenet.models import Classifier, create_model
from spherenet.text import first_line, short

__all__ = [
    "CARD_FILE",
    "CONFIG_FILE",
    "FORMAT_VERSION",
    "build_on_meta",
    "load_metadata",
    "load_model",
    "metadata_as_json",
    "model_config",
    "save_model",
    "shipped_model",
    "to_json",
]


def to_json(name: str, value: object) -> Any:
    """Return a value in types that JSON supports, with tuples as lists.

    Raises ModelError, which starts with `name`, for other objects, NaN, infinities and keys that are not strings.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        if not math.isfinite(value):
            raise ModelError(f"{name} must be finite to be saved as JSON, got {value!r}.")
        return float(value)
    if isinstance(value, (list, tuple)):
        return [to_json(f"{name}[{index}]", item) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ModelError(f"{name} must have strings as keys to be saved as JSON, got {key!r}.")
        return {key: to_json(f"{name}[{key!r}]", item) for key, item in value.items()}
    if isinstance(value, Annealing):
        return asdict(value)
    if isinstance(value, Tensor) and value.dim() == 1:
        return to_json(name, value.tolist())
    raise ModelError(
        f"{name} must be a value that JSON supports, got an object of type {type(value).__name__}; "
        "save_weights saves the tensors of any model."
    )


def metadata_as_json(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return metadata as JSON. Raises TypeError if it is not a mapping, and ModelError as `to_json` does."""
    if metadata is not None and not isinstance(metadata, Mapping):
        raise TypeError(f"metadata must be None or a mapping of JSON values, got {type(metadata).__name__}.")
    converted: dict[str, Any] = to_json("metadata", metadata or {})
    return converted


def model_config(model: Classifier) -> dict[str, Any]:
    """Return the arguments of `create_model` that reproduce this model, as JSON.

    If the annealing was replaced later, its current value is used. Raises ModelError if the arguments contain objects,
    or if the model is not what they describe, e.g. because it was converted or has another loss.
    """
    if not model.config.get("name"):
        raise ModelError("model must be created by create_model to be saved as a folder, got a config without a name.")
    config = {name: to_json(name, value) for name, value in model.config.items()}
    described = build_on_meta(config, "the model's config")
    if isinstance(model.criterion, MarginLoss) and isinstance(described.criterion, MarginLoss):
        if model.criterion.annealing != described.criterion.annealing:
            options = {**config.get("loss_options", {}), "annealing": to_json("annealing", model.criterion.annealing)}
            config["loss_options"] = options
        described.criterion.annealing = model.criterion.annealing
    _require_same_modules(model, described)
    return config


def build_on_meta(config: object, source: str) -> Classifier:
    """Return the model of a config on the meta device, which allocates no memory however large the model is.

    Raises ModelError, which starts with `source`, if the config does not consist of valid arguments of `create_model`.
    """
    arguments = _checked_arguments(config, source)
    try:
        with torch.device("meta"):
            return create_model(**arguments)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise ModelError(f"{source} does not describe a model: {first_line(error)}.") from error


def _require_same_modules(model: nn.Module, described: nn.Module) -> None:
    """Raise ModelError for a model that was changed after its creation, since it would load as another model."""
    actual, expected = (dict(each.named_modules()) for each in (model, described))
    for name in (*actual, *expected):
        module, expected_module = actual.get(name), expected.get(name)
        if type(module) is not type(expected_module) or _describe(module) != _describe(expected_module):
            raise ModelError(
                f"the model must be as its config describes, got {_describe(module)} instead of "
                f"{_describe(expected_module)} for {name or 'the model'}; save_weights saves the tensors of any model."
            )


def _describe(module: nn.Module | None) -> str:
    return "no module" if module is None else f"{type(module).__name__}({module.extra_repr()})"


# --- Checks of JSON from unknown sources ----------------------------------------------------------------------


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31


def _is_number(value: object) -> bool:
    # The bound rejects infinity, which JSON can write as 1e999, and integers that do not fit in a float.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= 1e300


def _is_list_of(is_valid: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and len(value) <= 100_000 and all(map(is_valid, value))


def _is_annealing(value: object) -> bool:
    names = {"start", "decay", "floor"}
    return isinstance(value, dict) and set(value) - {"power"} == names and all(map(_is_number, value.values()))


def _is_scalar(value: object) -> bool:
    return value is None or isinstance(value, (bool, str)) or _is_number(value)


_JsonType = tuple[str, Callable[[object], bool]]
_TEXT: _JsonType = ("a string", lambda value: isinstance(value, str))
_TEXT_OR_NULL: _JsonType = ("a string or null", lambda value: value is None or isinstance(value, str))
_SIZE: _JsonType = ("an integer from 1 to 2³¹ − 1", _is_size)
_SIZES: _JsonType = ("a list of integers from 1 to 2³¹ − 1", _is_list_of(_is_size))
_SIZE_PAIR: _JsonType = (
    "two integers from 1 to 2³¹ − 1",
    lambda value: isinstance(value, list) and len(value) == 2 and all(map(_is_size, value)),
)
_NUMBER: _JsonType = ("a number", _is_number)
_NUMBER_OR_NULL: _JsonType = ("a number or null", lambda value: value is None or _is_number(value))
_FLAG: _JsonType = ("true or false", lambda value: isinstance(value, bool))
_PAIR: _JsonType = (
    'null, "learned" or two numbers',
    lambda value: (
        value in (None, "learned") or (isinstance(value, list) and len(value) == 2 and all(map(_is_number, value)))
    ),
)
_SCALAR: _JsonType = ("a number, a string, true, false or null", _is_scalar)

_ARGUMENTS: dict[str, _JsonType] = {
    "name": _TEXT, "num_classes": _SIZE, "operator": _TEXT_OR_NULL, "k": _NUMBER_OR_NULL, "loss": _TEXT,
    "loss_options": ("an object", lambda value: isinstance(value, dict)), "k_sharing": _TEXT, "rescale": _PAIR,
    "eps": _NUMBER, "batch_norm": _FLAG, "relu": _FLAG, "widths": _SIZES, "in_channels": _SIZE,
    "input_size": _SIZE_PAIR, "shortcut": _TEXT, "head_bias": _FLAG, "feature_batch_norm": _FLAG,
}  # fmt: skip
_LOSS_OPTIONS: dict[str, _JsonType] = {
    "annealing": (
        "null or an object of start, decay, floor and power",
        lambda value: value is None or _is_annealing(value),
    ),
    "class_weight": ("null or a list of numbers", lambda value: value is None or _is_list_of(_is_number)(value)),
}
"""JSON type of each argument; all other arguments are scalars."""


def _checked_arguments(config: object, source: str) -> dict[str, Any]:
    """Return the arguments of `create_model` in a JSON value after checking their types."""
    if not isinstance(config, dict):
        raise ModelError(f"{source} must be an object with the arguments of create_model, got {_short(config)}.")
    allowed = inspect.signature(create_model).parameters
    for name, value in config.items():
        if name not in allowed:
            raise ModelError(f"{source} has the unknown argument {_short(name)}; allowed: {', '.join(allowed)}.")
        _require_type(source, name, value, _ARGUMENTS.get(name, _SCALAR))
    if "name" not in config:
        raise ModelError(f"{source} does not name a network.")
    arguments = dict(config)
    if isinstance(arguments.get("rescale"), list):
        arguments["rescale"] = tuple(arguments["rescale"])
    options = dict(arguments.get("loss_options", {}))
    for name, value in options.items():
        _require_type(source, f"loss_options.{name}", value, _LOSS_OPTIONS.get(name, _SCALAR))
    if options.get("annealing") is not None:
        try:
            options["annealing"] = Annealing(**options["annealing"])
        except ValueError as error:
            raise ModelError(f"{source} has an invalid annealing: {error}") from error
    if options.get("class_weight") is not None:
        options["class_weight"] = _vector(options["class_weight"])
    if "feature_batch_norm" not in config:  # saved before margins had a scale
        options = options_of_earlier_versions(config.get("loss"), options, config.get("num_classes", 10))
    # A config without these keys means plain convolutions, or layers that are not centered, whatever the defaults of
    # create_model.
    return {"operator": None, "center": None} | arguments | {"loss_options": options}


def _vector(values: list[float]) -> Tensor:
    """Return class weights as float32 if that represents every value exactly, otherwise as float64."""
    double = torch.tensor(values, dtype=torch.float64)
    return double.float() if torch.equal(double.float().double(), double) else double


def _require_type(source: str, name: str, value: object, json_type: _JsonType) -> None:
    allowed, is_valid = json_type
    if not is_valid(value):
        raise ModelError(f"{source} must have {allowed} for {short(name)}, got {_short(value)}.")


def _short(value: object) -> str:
    return (
        f"a {type(value).__name__} of {len(value)} entries" if isinstance(value, (dict, list)) else short(repr(value))
    )


CONFIG_FILE = "config.json"
CARD_FILE = "README.md"
FORMAT = "spherenet-model"
FORMAT_VERSION = 1

LARGEST_CONFIG = 64 * 2**20
"""Largest config.json in bytes: enough for a million class names, too small to exhaust memory."""


def save_model(
    model: Classifier,
    folder: str | os.PathLike[str],
    *,
    metadata: Mapping[str, Any] | None = None,
    card: ModelCard | None = None,
    overwrite: bool = False,
) -> None:
    """Write a model as a folder that `load_model` reads, bit for bit.

    The folder is replaced atomically: it is never incomplete.

    Args:
        model: Model of `create_model`.
        folder: Folder to create.
        metadata: JSON values that belong to the model, such as class names and preprocessing.
        card: Content of README.md. Fields that are None are derived from the model if possible.
        overwrite: Whether to replace an existing folder. It must contain nothing but a saved model.

    Raises:
        ModelError: If JSON cannot describe the model (the operator or loss is an object, or the network was changed
            after its creation), the folder is not empty, or it cannot be written.
        TypeError: If model is not a `Classifier`, or metadata not a mapping.
    """
    if not isinstance(model, Classifier):
        raise TypeError(
            f"model must be a Classifier of create_model, got {type(model).__name__}; save_weights accepts any module."
        )
    config = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "versions": library_versions(),
        "model": model_config(model),
        "metadata": metadata_as_json(metadata),
    }
    text = json.dumps(config, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    page = _completed_card(card, model, config).to_hub_page()
    with writing(folder) as target:
        require_free(target, (WEIGHTS_FILE, CONFIG_FILE, CARD_FILE), overwrite=overwrite)
        with atomic_folder(target) as path:
            for name, content in ((CONFIG_FILE, text), (CARD_FILE, page)):
                (path / name).write_text(content, encoding="utf-8")
            write_weights(model, path / WEIGHTS_FILE)
            # safetensors creates a private file, but the folder should follow the user's umask.
            (path / WEIGHTS_FILE).chmod((path / CONFIG_FILE).stat().st_mode)


def load_model(folder: str | os.PathLike[str], *, device: str | torch.device = "cpu") -> Classifier:
    """Return the model of a saved folder, in evaluation mode.

    Folders from unknown sources are safe: the JSON is checked, and the network that it describes is compared with the
    header of the safetensors file before memory is allocated.

    Args:
        folder: Folder written by `save_model`.
        device: Device of the model.

    Raises:
        ModelError: If a file is missing, corrupt or of an unknown format, or if the files do not fit together, with the
            first names of tensors that are missing or unexpected.
        ValueError: If the device is unknown.
    """
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f'device must be a torch device such as "cpu" or "cuda:0", got {device!r}.') from error
    path = user_path(folder)
    model = build_on_meta(_read(path)["model"], str(path / CONFIG_FILE))
    model.load_state_dict(StoredWeights.open(path / WEIGHTS_FILE).read_for(model), assign=True)
    return model.eval().to(target)


def load_metadata(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the metadata of a saved folder.

    Raises:
        ModelError: If config.json is missing, corrupt or of an unknown format.
    """
    metadata: dict[str, Any] = _read(user_path(folder))["metadata"]
    return metadata


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a folder's config.json, with its top level checked."""
    if not path.is_dir():
        raise ModelError(f"the folder {path} does not exist.")
    file = path / CONFIG_FILE
    if not file.is_file():
        raise ModelError(f"{path} is not a saved model: it has no {CONFIG_FILE}.")
    try:
        # The caches of model hubs consist of links.
        content = read_regular(file, LARGEST_CONFIG, follow_links=True)
        config = json.loads(content.decode(), parse_constant=_reject_constant)
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is corrupt: it is not valid JSON ({first_line(error)}).") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise ModelError(f'{file} is not the config of a saved model: it has no "format": "{FORMAT}".')
    version = config.get("format_version")
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise ModelError(f"{file} must have format_version {FORMAT_VERSION}, got {str(version)[:40]!r}.")
    for name in ("model", "metadata"):
        if not isinstance(config.get(name), dict):
            raise ModelError(f"{file} is corrupt: {name!r} must be an object.")
    return config


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _completed_card(card: ModelCard | None, model: Classifier, config: dict[str, Any]) -> ModelCard:
    """Return a card whose missing fields are derived from the model."""
    arguments, metadata = config["model"], config["metadata"]
    classes = metadata.get("classes")
    valid = isinstance(classes, list) and all(isinstance(name, str) for name in classes)
    size = arguments.get("input_size") or [32, 32]
    derived: dict[str, Any] = {
        "architecture": _architecture(model, arguments),
        "classes": classes if valid else None,
        "input_shape": [1, arguments.get("in_channels", 3), *size],
    }
    if card is None:
        return ModelCard(arguments["name"], versions=config["versions"], **derived)
    return replace(card, **{name: value for name, value in derived.items() if getattr(card, name) is None})


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
    return Path(__file__).with_name("cifar10-cnn-9-cosine")
