"""Describe models as JSON: the arguments of `create_model`, checked before they are used.

A description may come from anyone, so each value is checked. Nothing in it names code.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from spherenet._util.text import first_line, short
from spherenet.convert import apply_conversion, conversion_record
from spherenet.convert.layers import CONVERTIBLE, TRANSPOSED
from spherenet.errors import InvalidArgumentType, ModelError
from spherenet.layers import SphereLayer
from spherenet.losses import Annealing, MarginLoss
from spherenet.models import Classifier, create_model

__all__ = ["build_on_meta", "metadata_as_json", "model_description", "to_json"]


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
        raise InvalidArgumentType(
            "metadata", f"must be None or a mapping of JSON values, got {type(metadata).__name__}."
        )
    converted: dict[str, Any] = to_json("metadata", metadata or {})
    return converted


def model_description(model: Classifier) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the arguments of `create_model` that reproduce this model, and its conversion record, as JSON.

    If the annealing or the class weights were replaced later, their current values are used. The record is None if the
    model was not converted after its creation. Raises ModelError if the arguments contain objects, or if the model is
    not what they describe, e.g. because it has another loss.
    """
    if not model.config.get("name"):
        raise ModelError("model must be created by create_model to be saved as a folder, got a config without a name.")
    config = {name: to_json(name, value) for name, value in model.config.items()}
    if "loss_options" in config and (weight := getattr(model.criterion, "class_weight", None)) is not None:
        config["loss_options"] = {**config["loss_options"], "class_weight": to_json("class_weight", weight)}
    described = build_on_meta(config, "the model's config")
    if isinstance(model.criterion, MarginLoss) and isinstance(described.criterion, MarginLoss):
        if model.criterion.annealing != described.criterion.annealing:
            options = {**config.get("loss_options", {}), "annealing": to_json("annealing", model.criterion.annealing)}
            config["loss_options"] = options
        described.criterion.annealing = model.criterion.annealing
    conversion = _conversion_of(model, described)
    if conversion is not None:
        apply_conversion(described, conversion)
    _require_same_modules(model, described)
    return config, conversion


def _conversion_of(model: Classifier, described: Classifier) -> dict[str, Any] | None:
    """Return the record of the layers that are spherical in a model but not in the model of its arguments."""
    plain = {name for name, module in described.named_modules() if isinstance(module, (*CONVERTIBLE, *TRANSPOSED))}
    plain -= {name for name, module in described.named_modules() if isinstance(module, SphereLayer)}
    spherical = {name for name, module in model.named_modules() if isinstance(module, SphereLayer)}
    return conversion_record(model) if plain & spherical else None


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
