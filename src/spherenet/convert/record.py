"""Conversion records: which layers of a model are spherical and how, as JSON, and their application to a new model.

A record is read from the modules themselves, so that it also describes a model that was converted in several steps. It
names layers and options of this library, never code.

The configuration of a converted model of transformers is that of a plain one, so `from_pretrained` would build plain
layers and load the weights of sphere layers into them without a word. A conversion therefore replaces the method
`save_pretrained` of the model, which the `Trainer` calls too, by one that adds the record to config.json, and two
entries that make `from_pretrained` raise an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized

from spherenet._util.text import first_line, short
from spherenet._util.validation import require_module
from spherenet.angles import ANGLES, LearnedAngle
from spherenet.convert.attention import attention_options, attention_problem, make_attention_spherical
from spherenet.convert.layers import ATTENTION, CONVERTIBLE, TRANSPOSED, num_filters
from spherenet.convert.summary import record_reason, recorded_drop
from spherenet.convert.swap import (
    check_options,
    disable_fast_paths,
    disable_inplace,
    drop_batch_norms,
    is_convertible_back,
    make_spherical,
    overridden_methods,
    require_convertible,
    set_up,
    weight_problem,
)
from spherenet.errors import ModelError
from spherenet.layers import SphereLayer, SphereMultiheadAttention, SphereOptions
from spherenet.magnitudes import MAGNITUDES

__all__ = [
    "LOCKS",
    "RECORD_ENTRY",
    "apply_conversion",
    "conversion_record",
    "finish_conversion",
    "is_pretrained_model",
    "record_on_save",
    "save_with_record",
]

FORMAT, FORMAT_VERSION = "spherenet-conversion", 1
LARGEST_NAME = 1000
MAX_LAYERS = 100_000
_OWN = ("weight", "bias")
_ATTENTION_OPTIONS = ("scale", "max_scale", "eps")
OPTIONS = tuple(field.name for field in fields(SphereOptions))


def conversion_record(model: nn.Module) -> dict[str, Any]:
    """Return which layers of a model are spherical, with their options, as JSON values.

    `apply_conversion` makes a new model of the same structure spherical in the same way. Weights are not part of it.

    Args:
        model: Any module, e.g. one that `to_sphere` converted.

    Raises:
        ModelError: If a layer has an operator or magnitude that is not one of this library's, since a record contains
            no code, shares learned parameters in a way that options do not express, or computes its weight.
        TypeError: If model is not a module.
    """
    require_module("model", model)
    layers: dict[str, Any] = {}
    first_with: dict[object, str] = {}
    dropped: dict[str, str] = {}
    attention: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, SphereLayer) and (is_convertible_back(module) or is_parametrized(module)):
            problem = weight_problem(module)
            if problem is not None:
                raise ModelError(f"layer {name!r} of type {type(module).__name__} {problem}.")
        if isinstance(module, SphereLayer) and is_convertible_back(module):
            layers[name] = _options_of(name, module)
            if next(module.angle.parameters(), None) is not None:
                owner = first_with.setdefault(module.angle, name)
                if owner != name:
                    layers[name]["angle_of"] = owner
            magnitude = module.magnitude
            has_radii = magnitude is not None and magnitude.raw_radius is not None
            if has_radii and first_with.setdefault(magnitude, name) != name:
                raise ModelError(f"layer {name!r} must not share the learned radii of {first_with[magnitude]!r}.")
        if type(module) is SphereMultiheadAttention:
            attention[name] = attention_options(module)
        drop = recorded_drop(module)
        if drop is not None:
            dropped[name] = drop[1]
    record = {"format": FORMAT, "format_version": FORMAT_VERSION, "layers": layers, "dropped_batch_norms": dropped}
    return record | ({"attention": attention} if attention else {})


def _options_of(name: str, layer: Any) -> dict[str, Any]:
    """Return the options of a sphere layer. Raises ModelError if they do not reproduce it."""
    angle, magnitude = layer.angle, layer.magnitude
    if type(angle) is not ANGLES.get(angle.name):
        raise ModelError(
            f"layer {name!r} must have one of the operators {', '.join(ANGLES)} to be recorded, got an object of type "
            f"{type(angle).__name__}."
        )
    if magnitude is not None and type(magnitude) is not MAGNITUDES.get(magnitude.name):
        raise ModelError(
            f"layer {name!r} must have one of the magnitudes {', '.join(MAGNITUDES)} to be recorded, got an object of "
            f"type {type(magnitude).__name__}."
        )
    k = (angle.initial if isinstance(angle, LearnedAngle) else angle.k) if angle.has_k() else None
    learned_radius = magnitude is not None and magnitude.raw_radius is not None
    radius = magnitude.initial_radius if magnitude is not None and magnitude.has_radius else None
    options = {
        "operator": angle.name,
        "k": k,
        "k_sharing": layer.k_sharing,
        "rescale": list(layer.rescale) if isinstance(layer.rescale, tuple) else layer.rescale,
        "eps": layer.eps,
        "center": layer.center,
        "magnitude": None if magnitude is None else magnitude.name,
        "radius": f"learned:{radius!r}" if learned_radius else radius,
    }
    probe: Any = SphereLayer()
    set_up(probe, SphereOptions(**options), layer)
    if _description(probe) != _description(layer):
        raise ModelError(
            f"layer {name!r} must have options that to_sphere accepts by name to be recorded, got an operator or "
            "magnitude object with others."
        )
    return options


def _description(layer: Any) -> list[object]:
    """Return what a sphere layer computes, apart from the values of its parameters."""
    parameters = {name: tuple(value.shape) for name, value in layer.named_parameters() if not name.endswith(_OWN)}
    return [layer.saved_options(), parameters]


def apply_conversion(model: nn.Module, record: object) -> None:
    """Make the layers of a new model spherical as a record states, in place.

    Layers that are already spherical with the same options stay as they are. After an error the model is unchanged.

    Args:
        model: Model of the same structure as the one that was recorded, before its conversion.
        record: Value of `conversion_record`, which may come from a file of an unknown source.

    Raises:
        ModelError: If the record is invalid, or names a layer that the model does not have or that cannot be converted.
        TypeError: If model is not a module.
    """
    require_module("model", model)
    layers, dropped = _checked(record)
    attention = _checked_attention(record)
    modules = dict(model.named_modules())
    convert: dict[str, SphereOptions] = {}
    for name, options in layers.items():
        layer = modules.get(name)
        with _naming(name):
            choice = SphereOptions(**{option: options[option] for option in OPTIONS})
        if "angle_of" in options:
            _require_owner(name, options, layers, modules)
        if _is_as_recorded(name, layer, choice):
            continue
        if not isinstance(layer, (*CONVERTIBLE, *TRANSPOSED)):
            got = "none" if layer is None else f"a {type(layer).__name__}"
            raise ModelError(f"the model must have a convolution or linear layer {short(name)!r}, got {got}.")
        require_convertible(name, layer)
        if overridden_methods(layer):
            raise ModelError(f"layer {short(name)!r} overrides {overridden_methods(layer)[0]} and cannot be converted.")
        with _naming(name):
            check_options(choice, layer)
        convert[name] = choice
    compare = [name for name, options in attention.items() if _is_plain_attention(name, modules.get(name), options)]
    for name in dropped:
        if not isinstance(modules.get(name), (_BatchNorm, nn.Identity)):
            raise ModelError(f"the model must have a BatchNorm {short(name)!r} to drop, got another module or none.")
    for name in compare:
        make_attention_spherical(modules[name], **attention[name])
        record_reason(modules[name], "converted from MultiheadAttention")
    for name, choice in convert.items():
        layer = modules[name]
        reason = f"converted from {type(layer).__name__}"
        make_spherical(layer, choice)
        record_reason(layer, reason)
    for name in convert:
        owner = layers[name].get("angle_of")
        if owner is not None:
            modules[name].angle = modules[owner].angle
    finish_conversion(model, {name: after for name, after in dropped.items() if isinstance(modules[name], _BatchNorm)})


def finish_conversion(model: nn.Module, drop: dict[str, str]) -> None:
    """Change what surrounds the converted layers: BatchNorms after them, in-place activations, fast paths, saving.

    Args:
        model: The model, whose layers are converted.
        drop: Name of each BatchNorm to drop, and of the layer before it.
    """
    drop_batch_norms(model, drop)
    disable_inplace(model)
    disable_fast_paths(model)
    record_on_save(model)


def _is_plain_attention(name: str, module: nn.Module | None, options: dict[str, Any]) -> bool:
    """Return whether an attention layer is still to be converted.

    Raises ModelError if it cannot be, or is spherical with other options.
    """
    if isinstance(module, SphereMultiheadAttention):
        if attention_options(module) != options:
            raise ModelError(f"layer {short(name)!r} is already spherical, with other options than the record.")
        return False
    if not isinstance(module, ATTENTION):
        got = "none" if module is None else f"a {type(module).__name__}"
        raise ModelError(f"the model must have a MultiheadAttention {short(name)!r}, got {got}.")
    problem = attention_problem(module)
    if problem is not None:
        raise ModelError(f"layer {short(name)!r} cannot be converted: {problem}.")
    with _naming(name):
        SphereMultiheadAttention(module.embed_dim, module.num_heads, **options, device="meta")
    return True


def _require_owner(
    name: str, options: dict[str, Any], layers: dict[str, dict[str, Any]], modules: dict[str, nn.Module]
) -> None:
    """Raise ModelError if a layer cannot share the learned parameters of the layer that its record names."""
    owner = options["angle_of"]
    fits = isinstance(owner, str) and owner in layers and "angle_of" not in layers[owner]
    fits = fits and all(options[option] == layers[owner][option] for option in ("operator", "k_sharing"))
    if fits and options["k_sharing"] == "filter":
        convertible = (*CONVERTIBLE, *TRANSPOSED)
        filters = [num_filters(modules[key]) for key in (name, owner) if isinstance(modules.get(key), convertible)]
        fits = len(filters) == 2 and filters[0] == filters[1]
    if not fits:
        raise ModelError(f"the conversion record has no layer {short(str(owner))!r} whose k {short(name)!r} can share.")


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Raise errors of options as a ModelError that names the layer."""
    try:
        yield
    except (ValueError, TypeError, OverflowError) as error:
        raise ModelError(
            f"the conversion record has invalid options for {short(name)!r}: {first_line(error)}."
        ) from None


def _is_as_recorded(name: str, layer: nn.Module | None, options: SphereOptions) -> bool:
    """Return whether a layer is already spherical. Raises ModelError if it is with other options."""
    if not isinstance(layer, SphereLayer):
        return False
    with _naming(name):
        check_options(options, layer)
    probe: Any = SphereLayer()
    set_up(probe, options, layer)
    if probe.saved_options() != layer.saved_options():
        raise ModelError(f"layer {short(name)!r} is already spherical, with other options than the conversion record.")
    return True


def _checked(record: object) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return the layers and dropped BatchNorms of a record after checking its form; options are checked by layers."""
    if not isinstance(record, Mapping) or record.get("format") != FORMAT:
        raise ModelError(f'the conversion record must be an object with "format": "{FORMAT}".')
    version = record.get("format_version")
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise ModelError(
            f"the conversion record must have format_version {FORMAT_VERSION}, got {short(repr(version))}."
        )
    layers, dropped = record.get("layers"), record.get("dropped_batch_norms")
    if not isinstance(layers, dict) or not isinstance(dropped, dict) or len(layers) + len(dropped) > MAX_LAYERS:
        raise ModelError(f"the conversion record must have objects of at most {MAX_LAYERS} layers.")
    for name, options in layers.items():
        allowed = {*OPTIONS, "angle_of"}
        if not isinstance(options, dict) or not set(OPTIONS) <= set(options) <= allowed:
            raise ModelError(
                f"the conversion record must have the options {', '.join(OPTIONS)} for {short(str(name))!r}."
            )
        texts = [options[option] for option in ("operator", "k_sharing")]
        if not all(isinstance(text, str) for text in texts) or any(
            isinstance(value, (dict, str)) and len(value) > LARGEST_NAME for value in options.values()
        ):
            raise ModelError(f"the conversion record has invalid options for {short(str(name))!r}.")
    if not all(isinstance(text, str) for pair in dropped.items() for text in pair):
        raise ModelError("the conversion record must have names of layers as dropped_batch_norms.")
    return layers, dropped


def _checked_attention(record: Any) -> dict[str, dict[str, Any]]:
    """Return the attention layers of a record, which records without them lack, after checking their form."""
    attention = record.get("attention", {})
    if not isinstance(attention, dict) or len(attention) > MAX_LAYERS:
        raise ModelError(f"the conversion record must have an object of at most {MAX_LAYERS} layers as attention.")
    for name, options in attention.items():
        is_complete = isinstance(options, dict) and set(options) == set(_ATTENTION_OPTIONS)
        if not is_complete or any(type(value) not in (int, float) for value in options.values()):
            raise ModelError(
                f"the conversion record must have the numbers {', '.join(_ATTENTION_OPTIONS)} for {short(str(name))!r}."
            )
    return attention


RECORD_ENTRY = "spherenet_conversion"

LOCKS = ("attn_implementation", "experts_implementation")
"""Entries of config.json whose values transformers checks when it builds any model: two, since callers may set one."""

_MESSAGE = "this model was converted by spherenet: load it by spherenet.load_pretrained"


def is_pretrained_model(module: nn.Module) -> bool:
    """Return whether a module is a model of transformers, without importing transformers."""
    has_configuration = callable(getattr(getattr(module, "config", None), "to_diff_dict", None))
    return has_configuration and callable(getattr(type(module), "save_pretrained", None))


def record_on_save(model: nn.Module) -> None:
    """Let each transformers model in a converted module save its conversion record."""
    for module in model.modules():
        if is_pretrained_model(module):
            # Of the object, since its class belongs to plain models too. A copy of the model copies it.
            module.__dict__["save_pretrained"] = partial(save_with_record, module)


def save_with_record(model: Any, *arguments: Any, **options: Any) -> Any:
    """Call the `save_pretrained` of a model's class, with the conversion record in its configuration.

    Raises:
        ModelError: If the conversion cannot be recorded, or layers share a learned k.
    """
    save = type(model).save_pretrained
    if not any(
        isinstance(module, (SphereLayer, SphereMultiheadAttention)) for module in model.modules()
    ):  # converted back
        return save(model, *arguments, **options)
    entries = {RECORD_ENTRY: conversion_record(model), **dict.fromkeys(LOCKS, _MESSAGE)}
    if shared := _shared_parameter(model):
        raise ModelError(f"{shared} belongs to several layers, which transformers does not save; use save_model.")
    values = vars(model.config)
    before = {name: values[name] for name in entries if name in values}
    values.update(entries)
    try:
        return save(model, *arguments, **options)
    finally:
        for name in entries:
            del values[name]
        values.update(before)


def _shared_parameter(model: nn.Module) -> str | None:
    """Return the name of a parameter of angle functions that several layers share (`k_sharing`), or None."""
    names: dict[nn.Parameter, str] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, SphereLayer):
            for own, parameter in layer.angle.named_parameters():
                if parameter in names:
                    return names[parameter]
                names[parameter] = f"{name}.angle.{own}"
    return None
