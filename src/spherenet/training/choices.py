"""Options with options of their own: `cosface:m=0.2,s=30` names a loss and its margin and scale.

Losses, operators, magnitudes and optimizers have the same form: a text on the command line, in Python and in
config.json, or a mapping with the key `name` in a YAML file. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TypeAlias

from spherenet._util.text import short
from spherenet.errors import InvalidArgument

__all__ = ["OPTIMIZERS", "Choice", "Value", "parse_choice"]

Value: TypeAlias = bool | int | float | str | None

OPTIMIZERS: dict[str, dict[str, float]] = {
    "adam": {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8},
    "adamw": {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8},
    "sgd": {"momentum": 0.9},
    "muon": {"momentum": 0.9, "rest_momentum": 0.85, "rest_learning_rate": 0.053, "head_learning_rate": 0.67 / 256},
}
"""Options of the optimizers with their defaults.

The learning rates of muon for all but the filters are per image of a batch; that of class weights is also divided by
the number of features: 0.67 for logits that are divided by 256, the number of features of the public record.
"""

WORDS: dict[str, Value] = {"none": None, "true": True, "false": False}
MAX_TEXT = 500


@dataclass(frozen=True)
class Choice:
    """A name with options."""

    name: str
    options: Mapping[str, Value] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the text from which it is parsed, with the options in alphabetical order."""
        options = [f"{key}={_as_text(value)}" for key, value in sorted(self.options.items())]
        return self.name + (f":{','.join(options)}" if options else "")

    def as_yaml(self) -> str | dict[str, Value]:
        """Return the name, or a mapping with the name and the options."""
        return {"name": self.name, **self.options} if self.options else self.name

    def require_options(self, argument: str, allowed: Collection[str]) -> None:
        """Raise InvalidArgument, with the most similar option, if the name has no such option."""
        for key in self.options:
            if key not in allowed:
                similar = get_close_matches(key, allowed, n=1)
                others = f"it has {', '.join(allowed)}" if allowed else "it has none"
                hint = f"did you mean {similar[0]!r}?" if similar else f"{others}."
                raise InvalidArgument(argument, f"{self.name} has no option {short(repr(key))}, {hint}")


def parse_choice(argument: str, value: str | Mapping[str, Value]) -> Choice:
    """Return a name with options from `NAME:KEY=VALUE,…`, or from a mapping with the key `name`.

    Raises:
        InvalidArgument: If it has another form, with `argument` as the argument.
    """
    if isinstance(value, Mapping):
        return _from_mapping(argument, value)
    name, colon, text = value[:MAX_TEXT].partition(":")
    options: dict[str, Value] = {}
    for pair in text.split(",") if colon else ():
        key, equals, word = pair.partition("=")
        if not (name.strip() and key.strip() and equals and word.strip()) or key.strip() in options:
            problem = f"must be NAME or NAME:OPTION=VALUE,… with each option once, got {short(repr(value))}."
            raise InvalidArgument(argument, problem)
        options[key.strip()] = _from_text(word.strip())
    return _within_limits(argument, Choice(name.strip(), options))


def _from_mapping(argument: str, values: Mapping[str, Value]) -> Choice:
    options = {str(key): _from_text(value) if isinstance(value, str) else value for key, value in values.items()}
    name = options.pop("name", None)
    texts = [text for text in (name, *options, *options.values()) if isinstance(text, str)]
    is_text = isinstance(name, str) and ":" not in name and not any(set(",=") & set(text) for text in texts)
    if not is_text or not all(isinstance(value, (bool, int, float, str, type(None))) for value in options.values()):
        problem = f"must have a name and options that are numbers or words, got {short(repr(dict(values)))}."
        raise InvalidArgument(argument, problem)
    return _within_limits(argument, Choice(str(name), options))


def _within_limits(argument: str, choice: Choice) -> Choice:
    for key, value in choice.options.items():
        if isinstance(value, int) and abs(value) >= 1 << 63:
            problem = f"{choice.name}: {short(key)} must be below 2^63 in magnitude, got {short(str(value))}."
            raise InvalidArgument(argument, problem)
    return choice


def _from_text(word: str) -> Value:
    if word.lower() in WORDS:
        return WORDS[word.lower()]
    for number in (int, float):
        try:
            return number(word)
        except ValueError:
            continue
    return word


def _as_text(value: Value) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value)
