"""The parser every verb uses: help with examples, errors in one line.

Options of a typed configuration: each field an option, YAML files with --config, --print-config.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

import jsonargparse

from spherenet.cli.output import say
from spherenet.files import read_regular

__all__ = ["ConfigParser", "Parser", "suggestion"]


def suggestion(word: str, allowed: Iterable[str]) -> str:
    """Return ", did you mean …?" for a near miss, else what is allowed."""
    choices = list(allowed)
    near = get_close_matches(word, choices, n=1)
    return f", did you mean {near[0]!r}?" if near else f", allowed are {', '.join(choices)}"


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence on stderr and whose help ends in examples."""

    def __init__(self, verb: str, summary: str, *, examples: str) -> None:
        super().__init__(
            prog=f"spherenet {verb}",
            description=summary,
            epilog=f"examples:\n{examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line and leave with code 2."""
        say(f"{self.prog}: {message}; see {self.prog} --help.")
        raise SystemExit(2)


# A file of options is some 2 KB of names and numbers, at most a list deep.
LARGEST_FILE, DEEPEST = 100_000, 10
LONGEST_MESSAGE = 500
LARGEST_NUMBER = 2**63


class ConfigParser(jsonargparse.ArgumentParser):
    """A parser of a dataclass's fields whose errors are one sentence and whose help ends in examples.

    A field `batch_size` is the option `--batch-size` and the key `batch_size` of a YAML file. Options given after
    --config override the file. Fields carry their help and the heading it stands under in their metadata.
    """

    def __init__(self, verb: str, summary: str, config: type, *, examples: str) -> None:
        super().__init__(
            prog=f"spherenet {verb}",
            usage=f"spherenet {verb} [OPTIONS]",
            description=summary,
            epilog=f"examples:\n{examples}",
            formatter_class=_Formatter,
            print_config="--print-config",
            default_env=False,
            allow_abbrev=False,
        )
        self.fields = fields(config)
        self.add_argument("--config", action="config", help="a YAML file of options, as --print-config shows them")
        hints = get_type_hints(config)
        groups: dict[str, Any] = {}
        for field in self.fields:
            title = field.metadata["group"].title
            if title not in groups:
                groups[title] = self.add_argument_group(title)
            kind: dict[str, Any] = {"type": hints[field.name]}
            if hints[field.name] == list[int] | None:
                kind = {"type": int, "nargs": "+"}  # --widths 64 96 128
            option = f"--{field.name.replace('_', '-')}"
            groups[title].add_argument(option, default=field.default, help=field.metadata["help"], **kind)

    def parse_args(self, args: Sequence[str] | None = None, *more: Any, **options: Any) -> Any:  # type: ignore[override]
        """Parse the options; files of them are looked at first, for no reader of YAML bears all that can be in one."""
        for path in _files_of_options(args or []):
            if problem := _problem_of(path):
                self.error(f"{path} {problem}")
        try:
            return super().parse_args(args, *more, **options)
        except OverflowError:
            self.error("a number is too large for its option")
        except ValueError as error:  # of the reader of YAML, about what was given
            self.error(str(error).splitlines()[0] if str(error) else "the options cannot be read")

    def values(self, arguments: Any) -> dict[str, Any]:
        """The configuration's part of what was parsed; the word none stands for None.

        Raises ValueError for a whole number that torch cannot hold.
        """
        given = {field.name: getattr(arguments, field.name) for field in self.fields}
        for name, value in given.items():
            for number in value if isinstance(value, list) else [value]:
                if isinstance(number, int) and abs(number) >= LARGEST_NUMBER:
                    raise ValueError(f"--{name.replace('_', '-')} must be below 2^63 in size.")
        return {name: None if value == "none" else value for name, value in given.items()}

    def start_with(self, values: Mapping[str, Any]) -> None:
        """Take other defaults than the configuration's own."""
        self.set_defaults(dict(values))

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Say what is wrong in one line and leave with code 2."""
        unknown = re.search(r"Option '(\w+)' is not accepted", message)
        if unknown:
            names = [field.name for field in self.fields]
            message = f"the configuration has the unknown key {unknown[1]!r}{suggestion(unknown[1], names)}"
        sentence = _one_sentence(message)
        if len(sentence) > LONGEST_MESSAGE:
            sentence = f"{sentence[:LONGEST_MESSAGE]} …"
        say(f"{self.prog}: {sentence}; see {self.prog} --help.")
        raise SystemExit(2)


def _files_of_options(args: Sequence[str]) -> Iterator[Path]:
    for option, value in zip(args, [*args[1:], ""], strict=False):
        if option == "--config" or option.startswith("--config="):
            path = Path(option.partition("=")[2] or value)
            try:
                exists = path.exists() and not path.is_dir()
            except (OSError, ValueError):  # no path at all
                continue
            if exists:
                yield path


def _problem_of(path: Path) -> str | None:
    """What would take a reader of YAML more memory or stack than a file of options is worth."""
    import yaml  # type: ignore[import-untyped]

    try:
        content = read_regular(path, LARGEST_FILE, follow_links=True)
    except PermissionError:
        return None  # the parser says it
    except OSError as error:
        return str(error.strerror)
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return f"must be UTF-8 text, got the byte 0x{content[error.start]:02x} at {error.start}"
    try:
        depth = 0
        for event in yaml.parse(content, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                return f"has the alias *{event.anchor[:50]}, which a file of options may not have"
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                return f"is nested more than {DEEPEST} deep, which no option is"
    except (ValueError, yaml.YAMLError):
        return None  # the parser says it
    return None


class _Formatter(jsonargparse.DefaultHelpFormatter):
    """Help that keeps the lines of its examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "".join(indent + line for line in text.splitlines(keepends=True))

    def _expand_help(self, action: argparse.Action) -> str:
        text = super()._expand_help(action)
        # The help says already what happens without a value.
        return re.sub(r"( \| null)?, default: null\)$", ")", text)


def _one_sentence(message: str) -> str:
    """What jsonargparse says over several lines, as "--option must be …, got …"."""
    key = re.search(r'[Kk]ey "([^"]+)"', message)
    given = re.search(r"(?:Given value|Got value|got): (.+)$", message, re.MULTILINE)
    expected = re.findall(r"(?:Expected a|Expected) (.+?)(?:\. |$)", message, re.MULTILINE)
    if key and given and expected:
        option = f"--{key[1].replace('_', '-')}"
        allowed = " or ".join(dict.fromkeys(_readable(found) for found in expected))
        return f"{option} must be {allowed}, got {given[1].strip()!r}"
    message = re.sub(r'^Parser key "([^"]+)":', r"--\1:", message)
    return re.sub(r"\s*\n\s*", " ", message).strip().rstrip(".")


def _readable(expected: str) -> str:
    """A type as a person says it."""
    names = {"int": "a whole number", "float": "a number", "str": "a word", "bool": "true or false"}
    plain = re.sub(r"<class '(\w+)'>", r"\1", expected)
    if plain == "NoneType":
        return "none"
    if choices := re.fullmatch(r"typing\.Literal\[(.+)\]", plain):
        return choices[1].replace("'", "")
    return names.get(plain, plain)
