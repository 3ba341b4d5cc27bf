"""Values of a file of unknown source that become arguments of a class: only those that load neither code nor files.

The caller of `load_model` selects the class or function. A file may set sizes and switches of it, never a name, path or
switch that makes it download or import something.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from spherenet._util.text import first_line, short
from spherenet.errors import ModelError

__all__ = ["build_configuration", "checked_arguments", "require_arguments"]

MAX_VALUES = 100_000

LOADING_WORDS = {
    "code", "download", "files", "hub", "load", "path", "pickle", "plugin", "pretrained", "remote", "repo", "revision",
    "safetensors", "trust", "unsafe", "url", "weights",
}  # fmt: skip
"""Words in names of arguments that select what is loaded, also as numbers and switches: pretrained=True."""

LOADING_NAMES = {"token", "use_auth_token"}
"""Names of arguments that send credentials; cls_token and others are harmless."""

SKIPPED_CONFIGURATION = (
    "attn_implementation",
    "auto_map",
    "custom_pipelines",
    "experts_implementation",
    "name_or_path",
    "quantization_config",
    "use_pretrained_backbone",
)
"""Entries of a transformers configuration that can select code or files, also by a name on a hub."""

_NAME_WITHOUT_SOURCE = re.compile(r"[\w.-]{1,200}", re.ASCII)


def require_arguments(arguments: Mapping[str, Any], source: str) -> None:
    """Raise ModelError if an argument has a name or value that `load_model` does not take from a file.

    Args:
        arguments: Arguments as JSON values.
        source: Subject of the message.
    """
    for name, value in arguments.items():
        is_loading = name in LOADING_NAMES or not LOADING_WORDS.isdisjoint(name.lower().split("_"))
        if is_loading or not name.isidentifier():
            raise ModelError(
                f"{source} must not contain {short(repr(name))}, which may select code or files to load: "
                "set it in a function that you pass as model to load_model."
            )
        if not _is_number(value):
            raise ModelError(
                f"{source} must have a number, true, false, null or a list of these for {short(name)!r}, got "
                f"{short(repr(value))}: set other values in a function that you pass as model to load_model."
            )


def checked_arguments(factory: Callable[..., object], arguments: object, source: str) -> dict[str, Any]:
    """Return the arguments of a file for a class or function. Raises ModelError if it may not be called with them.

    Arguments must be named in the signature: what `**options` would accept is not known.
    """
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise ModelError(f"{source} must be an object, got {short(repr(arguments))}.")
    require_arguments(arguments, source)
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        parameters = {}.values()
    named = {item.name for item in parameters if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)}
    unknown = [name for name in arguments if name not in named]
    if unknown:
        raise ModelError(f"model cannot be called with the arguments in {source}: it names no {short(unknown[0])!r}.")
    return dict(arguments)


def build_configuration(config_class: Any, values: Mapping[str, Any], source: str) -> Any:
    """Return the configuration of a transformers class, without the entries that can select code or files.

    Raises ModelError, which starts with `source`, if the class does not accept the values.
    """
    try:
        return config_class.from_dict(_checked_entries(values))
    except Exception as error:  # the validators raise exceptions of several libraries
        raise ModelError(f"{source} is not a configuration of {config_class.__name__}: {first_line(error)}.") from error


def _checked_entries(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _checked_value(value) for name, value in values.items() if _is_harmless(name, value)}


def _checked_value(value: Any) -> Any:
    if isinstance(value, dict):
        return _checked_entries(value)
    return [_checked_value(item) for item in value] if isinstance(value, list) else value


def _is_harmless(name: str, value: object) -> bool:
    if name == "backbone":  # a name without a source is one of an installed package
        return isinstance(value, str) and _NAME_WITHOUT_SOURCE.fullmatch(value) is not None
    return not name.startswith("_") and name not in SKIPPED_CONFIGURATION


def _is_number(value: object) -> bool:
    """Return whether a JSON value is a number, a switch, null or a nested list of these."""
    if isinstance(value, list):
        return len(value) <= MAX_VALUES and all(map(_is_number, value))
    return value is None or isinstance(value, (bool, int, float))
