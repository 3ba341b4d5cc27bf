"""The arguments of `create_model` as JSON, and back from JSON that may be damaged or hostile.

A saved model: a folder of `model.safetensors`, `config.json` and a model card, read without running any code.

The model that comes with the package: a small SphereNet trained on CIFAR-10, as a saved folder.
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
from spherenet.export.weights import WEIGHTS_FILE, StoredWeights, write_weights
from spherenet.files import new_folder, read_regular
from spherenet.losses import Annealing, GASoftmaxLoss
from spherenet.models import Classifier, create_model
from spherenet.text import first_line, short

__all__ = [
    "CARD_FILE",
    "CONFIG_FILE",
    "FORMAT_VERSION",
    "build_on_meta",
    "config_of",
    "load_metadata",
    "load_model",
    "metadata_as_json",
    "save_model",
    "shipped_model",
    "to_json",
]


def to_json(name: str, value: object) -> Any:
    """Return `value` as JSON can hold it, tuples as lists; `name` is what an error calls it.

    Raises ModelError for what JSON cannot express: other objects, NaN and infinities, keys that are no strings.
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
        f"{name} must be a value that JSON can hold, got an object of type {type(value).__name__}; a saved folder "
        "holds names and numbers only (save_weights keeps the tensors of any model)."
    )


def metadata_as_json(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """The metadata of a model as JSON; raises TypeError for what is no mapping, and ModelError as `to_json` does."""
    if metadata is not None and not isinstance(metadata, Mapping):
        raise TypeError(f"metadata must be None or a mapping of JSON values, got {type(metadata).__name__}.")
    known: dict[str, Any] = to_json("metadata", metadata or {})
    return known


def config_of(model: Classifier) -> dict[str, Any]:
    """The arguments of `create_model` that make this model again, as JSON.

    An annealing that was changed after the model was made is taken as it is now. Raises ModelError where the
    arguments hold objects, or where the model is not what they describe: converted, or with another loss.
    """
    if not model.config.get("name"):
        raise ModelError("the model's config names no network: only models of create_model can be saved as a folder.")
    config = {name: to_json(name, value) for name, value in model.config.items()}
    described = build_on_meta(config, "the model's config")
    if isinstance(model.criterion, GASoftmaxLoss) and isinstance(described.criterion, GASoftmaxLoss):
        # The schedule may be replaced at any time, so the model has it, not the arguments that made the model.
        if model.criterion.annealing != described.criterion.annealing:
            options = {**config.get("loss_options", {}), "annealing": to_json("annealing", model.criterion.annealing)}
            config["loss_options"] = options
        described.criterion.annealing = model.criterion.annealing
    _require_same_modules(model, described)
    return config


def build_on_meta(config: object, source: str) -> Classifier:
    """The model of a config without any memory for its tensors, however large it claims to be.

    Raises ModelError, which begins with `source`, for anything that is not an object of `create_model` arguments.
    """
    arguments = _checked(config, source)
    try:
        with torch.device("meta"):
            return create_model(**arguments)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise ModelError(f"{source} describes no model: {first_line(error)}.") from error


def _require_same_modules(model: nn.Module, described: nn.Module) -> None:
    """Refuse a model that was changed after it was made: its folder would load as another model."""
    actual, expected = (dict(each.named_modules()) for each in (model, described))
    for name in (*actual, *expected):
        ours, theirs = actual.get(name), expected.get(name)
        if type(ours) is not type(theirs) or _portrait(ours) != _portrait(theirs):
            raise ModelError(
                f"the model is not what its config describes: {name or 'it'} is {_portrait(ours)}, by the config "
                f"{_portrait(theirs)}; save_weights keeps the tensors of any model."
            )


def _portrait(module: nn.Module | None) -> str:
    return "absent" if module is None else f"{type(module).__name__}({module.extra_repr()})"


# --- JSON that others may have written -------------------------------------------------------------------------


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31


def _is_number(value: object) -> bool:
    # The bound keeps out what is no float: JSON's 1e999 reads as inf, and its whole numbers have no end.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= 1e300


def _is_list_of(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and len(value) <= 100_000 and all(map(fits, value))


def _is_annealing(value: object) -> bool:
    names = {"start", "decay", "floor"}
    return isinstance(value, dict) and set(value) == names and all(map(_is_number, value.values()))


def _is_scalar(value: object) -> bool:
    return value is None or isinstance(value, (bool, str)) or _is_number(value)


_Kind = tuple[str, Callable[[object], bool]]
_TEXT: _Kind = ("a string", lambda value: isinstance(value, str))
_TEXT_OR_NULL: _Kind = ("a string or null", lambda value: value is None or isinstance(value, str))
_SIZE: _Kind = ("a whole number from 1 to 2³¹ − 1", _is_size)
_SIZES: _Kind = ("a list of whole numbers from 1 to 2³¹ − 1", _is_list_of(_is_size))
_SIZE_PAIR: _Kind = (
    "two whole numbers from 1 to 2³¹ − 1",
    lambda value: isinstance(value, list) and len(value) == 2 and all(map(_is_size, value)),
)
_NUMBER: _Kind = ("a number", _is_number)
_NUMBER_OR_NULL: _Kind = ("a number or null", lambda value: value is None or _is_number(value))
_FLAG: _Kind = ("true or false", lambda value: isinstance(value, bool))
_PAIR: _Kind = (
    'null, "learned" or two numbers',
    lambda value: (
        value in (None, "learned") or (isinstance(value, list) and len(value) == 2 and all(map(_is_number, value)))
    ),
)
_SCALAR: _Kind = ("a number, a string, true, false or null", _is_scalar)

_ARGUMENTS: dict[str, _Kind] = {
    "name": _TEXT, "num_classes": _SIZE, "operator": _TEXT_OR_NULL, "k": _NUMBER_OR_NULL, "loss": _TEXT,
    "loss_options": ("an object", lambda value: isinstance(value, dict)), "k_sharing": _TEXT, "rescale": _PAIR,
    "eps": _NUMBER, "batch_norm": _FLAG, "relu": _FLAG, "widths": _SIZES, "in_channels": _SIZE,
    "input_size": _SIZE_PAIR, "shortcut": _TEXT, "head_bias": _FLAG,
}  # fmt: skip
_LOSS_OPTIONS: dict[str, _Kind] = {
    "annealing": ("null or an object of start, decay and floor", lambda value: value is None or _is_annealing(value)),
    "class_weight": ("null or a list of numbers", lambda value: value is None or _is_list_of(_is_number)(value)),
}
"""What JSON may hold for each argument; any other argument is a scalar."""


def _checked(config: object, source: str) -> dict[str, Any]:
    """The arguments of `create_model` in a JSON value, each of a type that it takes."""
    if not isinstance(config, dict):
        raise ModelError(f"{source} must hold an object with the arguments of create_model, got {_short(config)}.")
    allowed = inspect.signature(create_model).parameters
    for name, value in config.items():
        if name not in allowed:
            raise ModelError(f"{source} has the unknown argument {_short(name)}; allowed: {', '.join(allowed)}.")
        _require_kind(source, name, value, _ARGUMENTS.get(name, _SCALAR))
    if "name" not in config:
        raise ModelError(f"{source} names no network.")
    arguments = dict(config)
    if isinstance(arguments.get("rescale"), list):
        arguments["rescale"] = tuple(arguments["rescale"])
    options = dict(arguments.get("loss_options", {}))
    for name, value in options.items():
        _require_kind(source, f"loss_options.{name}", value, _LOSS_OPTIONS.get(name, _SCALAR))
    if options.get("annealing") is not None:
        try:
            options["annealing"] = Annealing(**options["annealing"])
        except ValueError as error:
            raise ModelError(f"{source} has a wrong annealing: {error}") from error
    if options.get("class_weight") is not None:
        options["class_weight"] = _vector(options["class_weight"])
    # A config without an operator means plain convolutions, whatever the default of create_model.
    return {"operator": None} | arguments | {"loss_options": options}


def _vector(values: list[float]) -> Tensor:
    """A tensor of class weights: float32 where that holds every value exactly."""
    wide = torch.tensor(values, dtype=torch.float64)
    return wide.float() if torch.equal(wide.float().double(), wide) else wide


def _require_kind(source: str, name: str, value: object, kind: _Kind) -> None:
    allowed, fits = kind
    if not fits(value):
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


def shipped_model() -> Path:
    """Return the folder of the shipped model, for `load_model`, `load_metadata` and `spherenet predict`.

    Its model card says how it was trained and how well it does; its classes are CIFAR-10's ten.
    """
    return Path(__file__).with_name("cifar10-cnn-9-cosine")
