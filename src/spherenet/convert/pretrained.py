"""Conversion records in the configuration of transformers models, written by every `save_pretrained`.

A converted model has the configuration of a plain one, so `from_pretrained` would build plain layers and load the
weights of sphere layers into them without a word. A conversion therefore replaces the method `save_pretrained` of the
model, which the `Trainer` calls too, by one that adds the record to config.json, and two entries that make
`from_pretrained` raise an error.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from spherenet.errors import ModelError
from spherenet.layers import SphereLayer, SphereMultiheadAttention

__all__ = ["LOCKS", "RECORD_ENTRY", "is_pretrained_model", "record_on_save", "save_with_record"]

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
    from spherenet.convert.record import conversion_record  # which imports this module

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
