"""Parsers of the command line: hidden aliases, YAML files of options, errors in one sentence."""

from __future__ import annotations

import argparse
import os
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

import jsonargparse

from spherenet._util.files import read_regular
from spherenet._util.text import short
from spherenet.cli.option_types import OptionType, add_option
from spherenet.cli.output import print_message
from spherenet.errors import InvalidArgument
from spherenet.training.config import option_name

__all__ = ["ConfigParser", "Parser", "config_from", "option_name", "require_ending", "require_folder", "suggestion"]

MAX_FILE_BYTES, MAX_NESTING = 100_000, 10  # a file of options has about 2 KB and one level of lists
MAX_MESSAGE = 500

T = TypeVar("T")


def suggestion(word: str, allowed: Iterable[str]) -> str:
    """Return ", did you mean …?" if an allowed word is similar, else the list of allowed words."""
    choices = list(allowed)
    similar = get_close_matches(word, choices, n=1)
    return f", did you mean {similar[0]!r}?" if similar else f", allowed are {', '.join(choices)}"


def _sentence(error: argparse.ArgumentError) -> str:
    """Return the message of an argparse error without the word "argument"."""
    if error.argument_name is None:
        return error.message
    name = error.argument_name.partition("/--no-")[0]
    return f"{name}{' ' if error.message.startswith('must be') else ': '}{error.message}"


class _Sentences(argparse.ArgumentParser):
    """Common part of both parsers: help with examples, hidden aliases and errors in one sentence on stderr."""

    aliases: Mapping[str, str] = {}
    """Earlier names of options, accepted but not shown, with the current names."""

    def renamed(self, arguments: Sequence[str]) -> list[str]:
        """Return arguments in which earlier names of options are replaced by the current ones."""
        split = [argument.partition("=") for argument in arguments]
        return [self.aliases.get(name, name) + equals + value for name, equals, value in split]

    def option_names(self) -> list[str]:
        """Return the long names of all options that the help text shows."""
        shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
        return [name for action in shown for name in action.option_strings if name.startswith("--")]

    def option_of(self, argument: str) -> str:
        """Return the option that sets an argument of the library, or the argument itself if there is none."""
        option = option_name(argument)
        return option if option in self.option_names() else argument

    def refuse_unknown(self, arguments: Sequence[str]) -> None:
        """Exit with a suggestion if an argument is an option that does not exist."""
        for argument in arguments:
            name = argument.partition("=")[0]
            if name.startswith("--") and name != "--" and name not in self._option_string_actions:
                similar = get_close_matches(name, self.option_names(), n=1)
                self.fail(f"unknown option {short(name)}{f', did you mean {similar[0]}?' if similar else ''}")

    def fail(self, message: str) -> NoReturn:
        """Print what is wrong in one line and exit with code 2."""
        sentence = " ".join(message.split()).rstrip(".")
        ending = "" if sentence.endswith("?") else ";"
        print_message(f"{self.prog}: {short(sentence, MAX_MESSAGE)}{ending} see {self.prog} --help.")
        raise SystemExit(2)


class Parser(_Sentences):
    """Parser of a verb without a configuration.

    Args:
        verb: The verb.
        summary: What it does; shown above the options.
        examples: Lines shown below the options.
        aliases: Earlier names of options.
    """

    def __init__(self, verb: str, summary: str, *, examples: str, aliases: Mapping[str, str] | None = None) -> None:
        super().__init__(
            prog=f"spherenet {verb}",
            description=summary,
            epilog=f"examples:\n{examples}",
            formatter_class=_Formatter,
            allow_abbrev=False,
            exit_on_error=False,
        )
        self.aliases = aliases or {}

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse arguments; exit with one sentence if one is wrong."""
        try:
            parsed, unknown = super().parse_known_args(self.renamed(args or []), namespace)
        except argparse.ArgumentError as error:
            self.fail(_sentence(error))
        self.refuse_unknown(unknown)
        self._refuse_empty(parsed)
        return parsed, unknown

    def _refuse_empty(self, parsed: argparse.Namespace) -> None:
        """Exit if a value is empty, e.g. that of a shell variable: as a path it would be the current folder."""
        for action in self._actions:
            value = getattr(parsed, action.dest, None)
            for entry in value if isinstance(value, list) else [value]:
                if isinstance(entry, str) and not entry.strip():
                    name = max(action.option_strings, key=len, default=action.metavar or action.dest)
                    self.fail(f"{name} must not be empty, got {entry!r}")

    def error(self, message: str) -> NoReturn:
        """Print what is wrong in one line and exit with code 2."""
        self.fail(message)


class ConfigParser(_Sentences, jsonargparse.ArgumentParser):
    """Parser of a verb whose options are the fields of a configuration class.

    The field `batch_size` is the option `--batch-size` and the key `batch_size` of a YAML file. Options after --config
    override the file. A field's metadata contain its help text and the title of its group.

    Args:
        verb: The verb.
        summary: What it does; shown above the options.
        config: A dataclass.
        examples: Lines shown below the options.
        renamed_fields: Earlier names of fields with the current names, accepted as options and as keys of files.
        exclusive: Pairs of fields of which only one can be typed.
        hidden: Fields that help does not show, because the verb refuses other values than the defaults.
    """

    def __init__(
        self,
        verb: str,
        summary: str,
        config: type,
        *,
        examples: str,
        renamed_fields: Mapping[str, str] | None = None,
        exclusive: Sequence[tuple[str, str]] = (),
        hidden: Container[str] = (),
    ) -> None:
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
        self.exclusive = exclusive
        self.renamed_fields = dict(renamed_fields or {})
        self.aliases = {option_name(old): option_name(new) for old, new in self.renamed_fields.items()}
        self.aliases |= {f"--no-{old[2:]}": f"--no-{new[2:]}" for old, new in self.aliases.items()}
        self.add_argument("--config", action=_OptionsFile, metavar="FILE", help="YAML file of options")
        print_config = self._option_string_actions["--print-config"]
        print_config.help, print_config.metavar = "print all options as YAML for --config, and exit", ""
        hints = get_type_hints(config)
        groups: dict[str, Any] = {}
        for field in fields(config):
            title = field.metadata["group"].title
            if title not in groups:
                groups[title] = self.add_argument_group(title)
            name, text = option_name(field.name), field.metadata["help"]
            if bool in (hints[field.name], *get_args(hints[field.name])):
                _add_switch(groups[title], name, field.default, text, hints[field.name])
            else:
                metavar = "DIR" if field.name.endswith("_dir") else None
                hint = hints[field.name]
                add_option(groups[title], name, type=hint, default=field.default, help=text, metavar=metavar)
            if field.name in hidden:
                self._option_string_actions[name].help = argparse.SUPPRESS

    def parse_args(self, args: Sequence[str] | None = None, *more: Any, **options: Any) -> Any:  # type: ignore[override]
        """Parse arguments; exit with one sentence if one is wrong."""
        arguments = self.renamed(args or [])
        self.refuse_unknown(arguments)
        parsed = super().parse_args(arguments, *more, **options)
        typed = {argument.partition("=")[0] for argument in arguments}
        for first, second in self.exclusive:
            both = {option_name(first), option_name(second)} <= typed
            if both and getattr(parsed, first) is not None and getattr(parsed, second) is not None:
                self.fail(f"{option_name(second)} must be left out with {option_name(first)}")
        return parsed

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print what is wrong in one line and exit with code 2."""
        self.fail(_sentence(ex) if isinstance(ex, argparse.ArgumentError) else message)


def require_ending(option: str, path: str | None, ending: str, *, inputs: Iterable[str] = ()) -> None:
    """Check the name of a file that a verb writes, if it is given: its ending, and that it is none of the inputs.

    The ending protects the file that follows an option whose value was forgotten.
    """
    if path is None:
        return
    if not path.lower().endswith(ending):
        raise InvalidArgument(option, f"must end in {ending}, got {path!r}.")
    if any(os.path.exists(path) and os.path.exists(other) and os.path.samefile(path, other) for other in inputs):
        raise InvalidArgument(option, f"must not be a file that is read, got {path!r}.")


def require_folder(option: str, path: str | None) -> None:
    """Check before a long computation that a file can be written: its folder exists, and no folder has its name."""
    if path is not None and (
        os.path.isdir(path) or not os.path.isdir(os.path.dirname(os.path.expanduser(path)) or ".")
    ):
        raise InvalidArgument(option, f"must be a file in an existing folder, got {path!r}.")


def config_from(arguments: Any, config: type[T]) -> T:
    """Return the configuration among parsed arguments."""
    values = {field.name: getattr(arguments, field.name) for field in fields(config)}  # type: ignore[arg-type]
    return config.from_dict(values)  # type: ignore[attr-defined, no-any-return]


def _add_switch(container: Any, name: str, default: Any, help: str, hint: Any) -> None:
    """Add `--name`, `--no-name` and, for use in scripts, `--name true` and `--name false`."""
    action = container.add_argument(
        name,
        action=jsonargparse.ActionYesNo(no_prefix="no-"),
        nargs="?",
        default=default,
        help=(help if default is None else f"{help} (default: {'on' if default else 'off'})").replace("%", "%%"),
    )
    action.type = OptionType(hint)


class _OptionsFile(jsonargparse.ActionConfigFile):  # type: ignore[misc, name-defined]
    """The option --config: a YAML file is checked completely before anything is taken from it."""

    @staticmethod
    def apply_config(parser: Any, cfg: Any, dest: str, value: str) -> None:
        actions = {action.dest: action for action in parser._actions if action.default != argparse.SUPPRESS}
        del actions[dest]
        converted: dict[str, Any] = {}
        for key, content in _read_options(Path(value)).items():
            name = parser.renamed_fields.get(key, key)
            if name not in actions:
                similar = get_close_matches(str(name), actions, n=1)
                hint = f", did you mean {similar[0]!r}?" if similar else ""
                raise argparse.ArgumentError(None, f"--config {value} has the unknown key {short(repr(key))}{hint}")
            action = actions[name]
            convert = action.type or OptionType(bool)
            try:
                if action.nargs == "+" and content is not None:
                    if not isinstance(content, list):
                        raise argparse.ArgumentTypeError(f"must be a list, got {short(repr(content))}")
                    converted[name] = [convert(element) for element in content]
                else:
                    converted[name] = None if content is action.default is None else convert(content)
            except argparse.ArgumentTypeError as error:
                raise argparse.ArgumentError(None, f"{option_name(name)} {error}") from None
        for name, content in converted.items():
            cfg[name] = content


def _read_options(path: Path) -> dict[Any, Any]:
    """Return the keys and values of a YAML file, without aliases or deep nesting, which could exhaust the memory."""
    import yaml  # type: ignore[import-untyped]

    def problem(text: str) -> argparse.ArgumentError:
        return argparse.ArgumentError(None, f"--config {path} {text}")

    try:
        content = read_regular(path, MAX_FILE_BYTES, follow_links=True)
        depth = 0
        for event in yaml.parse(content.decode(), Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise problem(f"must not contain aliases, got *{short(event.anchor, 50)}")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_NESTING:
                raise problem(f"must be nested at most {MAX_NESTING} levels deep")
        if repeated := _repeated_key(yaml.compose(content, Loader=yaml.SafeLoader)):
            key, line = repeated
            raise problem(f"must have each key once, got {short(repr(key))} again in line {line}")
        values = yaml.safe_load(content)
    except UnicodeDecodeError as error:
        raise problem(f"must be UTF-8 text, got byte 0x{error.object[error.start]:02x} at {error.start}") from None
    except OSError as error:
        raise problem(f"cannot be read: {error.strerror}") from None
    except (ValueError, yaml.YAMLError) as error:
        raise problem(f"is not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise problem(f"must contain lines of the form 'option: value', got {short(repr(values))}")
    return values


def _repeated_key(node: Any) -> tuple[str, int] | None:
    """Return the first key that a mapping of a YAML document has twice, with its line; None if there is none."""
    children = list(getattr(node, "value", ())) if not isinstance(getattr(node, "value", ""), str) else []
    keys = set()
    for child in children:
        key, value = child if isinstance(child, tuple) else (None, child)  # pairs of a mapping, elements of a list
        if key is not None and isinstance(key.value, str):
            if (key.tag, key.value) in keys:
                return key.value, key.start_mark.line + 1
            keys.add((key.tag, key.value))
        if inside := _repeated_key(value):
            return inside
    return None


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Help text that keeps the lines of the examples and shows a switch as `--[no-]name`."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, **{"max_help_position": 30, **options})

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, jsonargparse.ActionYesNo):
            return f"--[no-]{action.option_strings[0][2:]}"
        return super()._format_action_invocation(action)
