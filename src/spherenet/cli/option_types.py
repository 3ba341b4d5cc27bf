"""Types of options: conversion of texts and YAML values, and what is allowed in help texts and errors."""

from __future__ import annotations

import argparse
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from spherenet._util.text import short

__all__ = [
    "OptionType",
    "add_checkpoint",
    "add_inference",
    "add_max_megapixels",
    "add_option",
    "add_switch",
    "add_threads",
    "add_tta",
    "add_workers",
    "from_yaml",
]

INTEGER_LIMIT = 2**63  # torch stores integers in 64 bits
METAVARS = {int: "N", float: "X", str: "NAME"}
NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false", NoneType: "none"}
WORDS = {"none": None, "null": None, "true": True, "yes": True, "false": False, "no": False}


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
        raise argparse.ArgumentTypeError(f"must be {self.description}, got {short(repr(value))}")

    @property
    def choices(self) -> list[str]:
        """The words that the option accepts, none if it accepts any text or number."""
        return [word for expected in self.types if get_origin(expected) is Literal for word in get_args(expected)]

    @property
    def description(self) -> str:
        """What is allowed."""
        return " or ".join(self.choices + [NAMES[expected] for expected in self.types if expected in NAMES])


def _convert(value: object, expected: Any) -> Any:
    """Return a value as the expected type; ValueError if it is not of that type."""
    if get_origin(expected) is Literal:
        is_valid = value in get_args(expected)
    elif expected in (NoneType, bool):
        value = WORDS.get(value.lower(), value) if isinstance(value, str) else value
        is_valid = isinstance(value, expected)
    elif expected is str:
        is_valid = isinstance(value, str)
    else:
        is_valid = isinstance(value, (str, int, expected)) and not isinstance(value, bool)
        value = expected(value) if is_valid else value
    if not is_valid:
        raise ValueError
    return value


def from_yaml(value: Any, hint: Any) -> Any:
    """Return a value of a YAML file as the type of a field; ArgumentTypeError with what is allowed otherwise."""
    element, is_list = _element_type(hint)
    if not is_list:
        return OptionType(hint)(value)
    if value is None and NoneType in get_args(hint):
        return None
    if not isinstance(value, list):
        raise argparse.ArgumentTypeError(f"must be a list, got {short(repr(value))}")
    return [OptionType(element)(entry) for entry in value]


MAX_THREADS, MAX_WORKERS, MAX_BATCH = 1024, 256, 1 << 20
"""Largest numbers of threads, of processes that decode images, and of images per batch, as for training."""


def add_option(
    container: argparse._ActionsContainer,
    *names: str,
    type: Any = str,
    default: Any = None,
    help: str,
    at_least: float | None = None,
    at_most: float | None = None,
    metavar: str | None = None,
    action: str | None = None,
    keep_default: bool = True,
    advanced: bool = False,
) -> None:
    """Add an option with a type to a parser or a group of one, and show its default in the help text.

    Args:
        container: The parser or group.
        *names: The option's name, such as `--rounds`, after a short one if it has one.
        type: What `OptionType` accepts, or a list of it (`list[int]`), optionally in a union with None. `bool` adds a
            switch with a negation, `--no-rounds`.
        default: Value without the option. None is not shown: the help text says what happens then.
        help: A noun phrase.
        at_least: The smallest number allowed.
        at_most: The largest number allowed, for values that would exhaust the machine.
        metavar: Name of the value in the help text.
        action: Action of argparse, if it is not that of the type.
        keep_default: Whether the parsed arguments contain the default; otherwise only what is typed.
        advanced: Whether only --help-all shows it.
    """
    element, is_list = _element_type(type)
    if default is not None and help != argparse.SUPPRESS:
        help = f"{help} (default: {_shown(default)})"
    options: dict[str, Any] = {
        "help": help.replace("%", "%%"),
        "default": default if keep_default else argparse.SUPPRESS,
    }
    if type is bool:
        options["action"] = argparse.BooleanOptionalAction
    else:
        converter = OptionType(element, at_least, at_most)
        if metavar is None:
            words = converter.choices
            metavar = "{" + ",".join(words) + "}" if words else METAVARS.get(converter.types[0])
        options |= {"type": converter, "nargs": "+" if is_list else None, "metavar": metavar, "action": action}
    added = container.add_argument(*names, **{key: value for key, value in options.items() if value is not None})
    added.is_advanced = advanced  # type: ignore[attr-defined]


def add_switch(container: argparse._ActionsContainer, name: str, help: str, *, advanced: bool = False) -> None:
    """Add an option without a value or a negation."""
    added = container.add_argument(name, action="store_true", help=help)
    added.is_advanced = advanced  # type: ignore[attr-defined]


def add_threads(container: argparse._ActionsContainer) -> None:
    """Add the option --threads."""
    text = "number of CPU threads per process; by default torch's choice"
    add_option(container, "--threads", type=int, at_least=1, at_most=MAX_THREADS, help=text, advanced=True)


def add_max_megapixels(container: argparse._ActionsContainer) -> None:
    """Add the option --max-megapixels of verbs that read image files."""
    text = "largest image file in millions of pixels, each of which takes 3 MB; by default 89"
    add_option(container, "--max-megapixels", type=float, at_least=0.001, at_most=1e4, help=text, advanced=True)


def add_workers(container: argparse._ActionsContainer) -> None:
    """Add the option --workers of verbs that read image files."""
    text = "processes that decode images"
    add_option(container, "--workers", type=int, default=0, at_least=0, at_most=MAX_WORKERS, help=text, advanced=True)


def add_checkpoint(container: argparse._ActionsContainer) -> None:
    """Add the option --checkpoint of verbs that read a run."""
    text = "checkpoint to use: the last one, or the one most accurate on the validation or test images"
    add_option(container, "--checkpoint", type=Literal["last", "best"], default="last", help=text)


def add_inference(container: argparse._ActionsContainer, *, batch_size: int) -> None:
    """Add the options of verbs that compute what a trained network returns for image files."""
    add_checkpoint(container)
    add_option(container, "--device", help="cpu, cuda, cuda:1, …; by default cuda if available")
    text = "images per batch"
    add_option(container, "--batch-size", type=int, default=batch_size, at_least=1, at_most=MAX_BATCH, help=text)
    add_max_megapixels(container)


def add_tta(container: argparse._ActionsContainer, use: str) -> None:
    """Add the option --tta; `use` says what happens to the mean score of the views."""
    text = f"views of each image whose mean score {use}; shift: by one pixel"
    add_option(container, "--tta", type=Literal["none", "mirror", "mirror-shift"], default="none", help=text)


def _shown(default: Any) -> str:
    """Return a default as it would be typed."""
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, (list, tuple)):
        return " ".join(map(str, default))
    return f"{default:.4g}" if isinstance(default, float) else str(default)


def _element_type(hint: Any) -> tuple[Any, bool]:
    """Return the type of one value and whether the option takes a list of them."""
    choices = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if get_origin(choices[0]) is list:
        return get_args(choices[0])[0], True
    return hint, False
