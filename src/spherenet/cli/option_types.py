"""Types of options: conversion of text and YAML values, and what is allowed in help texts and errors."""

from __future__ import annotations

import argparse
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from spherenet._util.text import short
from spherenet.errors import InvalidArgument

__all__ = ["MAX_THREADS", "OptionType", "add_max_megapixels", "add_option", "add_threads"]

INTEGER_LIMIT = 2**63  # torch stores integers in 64 bits
METAVARS = {int: "N", float: "X", str: "NAME"}


class OptionType:
    """Converter of an option's text, or of its value in a YAML file; the `type` of an argument.

    Args:
        hint: `bool`, `int`, `float`, `str`, `Literal[…]` or a union of these with None. For a list of values, the type
            of one element.
        at_least: The smallest number allowed.
        at_most: The largest number allowed.
    """

    def __init__(self, hint: Any, at_least: float | None = None, at_most: float | None = None) -> None:
        self.types = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        self.at_least, self.at_most = at_least, at_most

    def __call__(self, value: object) -> Any:
        """Return the value as the option's type; ArgumentTypeError with what is allowed if that is impossible."""
        for expected in self.types:
            try:
                converted = _convert(value, expected)
            except (ValueError, OverflowError):
                continue
            if isinstance(converted, int) and abs(converted) >= INTEGER_LIMIT:
                raise argparse.ArgumentTypeError(f"must be below 2^63 in magnitude, got {short(str(converted))}")
            if self.at_least is not None and converted is not None and not converted >= self.at_least:
                raise argparse.ArgumentTypeError(f"must be at least {self.at_least}, got {converted}")
            if self.at_most is not None and converted is not None and not converted <= self.at_most:
                raise argparse.ArgumentTypeError(f"must be at most {self.at_most}, got {converted}")
            return converted
        allowed = " or ".join(map(_description, self.types))
        raise argparse.ArgumentTypeError(f"must be {allowed}, got {short(repr(value))}")


def _convert(value: object, expected: Any) -> Any:
    """Return a value as the expected type; ValueError if it is not of that type."""
    text = value.lower() if isinstance(value, str) else None
    if get_origin(expected) is Literal:
        if value in get_args(expected):
            return value
    elif expected is NoneType:
        if value is None or text in ("none", "null"):
            return None
    elif expected is bool:
        if isinstance(value, bool) or text in ("true", "yes", "false", "no"):
            return value if isinstance(value, bool) else text in ("true", "yes")
    elif expected is str:
        if isinstance(value, str):
            return value
    elif isinstance(value, (int, str) if expected is int else (int, float, str)) and not isinstance(value, bool):
        return expected(value)
    raise InvalidArgument("value", f"must be of type {expected}.")


def _description(expected: Any) -> str:
    if get_origin(expected) is Literal:
        return " or ".join(get_args(expected))
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", NoneType: "none"}
    return names[expected]


MAX_THREADS = 1_024
"""Largest number of threads, as for training."""


def add_option(
    container: argparse._ActionsContainer,
    *names: str,
    type: Any = str,
    default: Any = None,
    help: str,
    at_least: float | None = None,
    at_most: float | None = None,
    metavar: str | None = None,
) -> None:
    """Add an option with a type to a parser or a group of one, and show its default in the help text.

    Args:
        container: The parser or group.
        *names: The option's name, such as `--rounds`, after a short one if it has one.
        type: What `OptionType` accepts, or a list of it (`list[int]`), optionally in a union with None.
        default: Value without the option. None is not shown: the help text says what happens then.
        help: A noun phrase.
        at_least: The smallest number allowed.
        at_most: The largest number allowed, for values that would exhaust the machine.
        metavar: Name of the value in the help text.
    """
    element, is_list = _element_type(type)
    if default is not None:
        shown = " ".join(map(str, default)) if isinstance(default, (list, tuple)) else default
        help = f"{help} (default: {f'{shown:.4g}' if isinstance(shown, float) else shown})"
    converter = OptionType(element, at_least, at_most)
    if metavar is None:
        base = converter.types[0]
        metavar = "{" + ",".join(get_args(base)) + "}" if get_origin(base) is Literal else METAVARS.get(base)
    container.add_argument(
        *names,
        type=converter,
        nargs="+" if is_list else None,
        default=default,
        metavar=metavar,
        help=help.replace("%", "%%"),
    )


def add_threads(container: argparse._ActionsContainer) -> None:
    """Add the option --threads."""
    text = "number of CPU threads per process; by default torch's choice"
    add_option(container, "--threads", type=int, at_least=1, at_most=MAX_THREADS, help=text)


def add_max_megapixels(container: argparse._ActionsContainer) -> None:
    """Add the option --max-megapixels of verbs that read image files."""
    text = "largest image file in millions of pixels, each of which takes 3 MB; by default 89"
    add_option(container, "--max-megapixels", type=float, at_least=0.001, at_most=1e4, help=text)


def _element_type(hint: Any) -> tuple[Any, bool]:
    """Return the type of one value and whether the option takes a list of them."""
    choices = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if get_origin(choices[0]) is list:
        return get_args(choices[0])[0], True
    return hint, False
