"""Parsers of the command line: options in two tiers, errors in one sentence, configurations in layers."""

from __future__ import annotations

import argparse
import os
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from difflib import get_close_matches
from typing import Any, NoReturn, TypeVar, get_type_hints

from spherenet._util.text import short
from spherenet.cli.option_types import add_option, add_switch, from_yaml
from spherenet.cli.output import print_message
from spherenet.errors import InvalidArgument

__all__ = ["ConfigParser", "Parser", "config_from", "require_ending", "require_folder", "suggestion"]

MAX_MESSAGE = 500

T = TypeVar("T")


def suggestion(word: str, allowed: Iterable[str]) -> str:
    """Return ", did you mean …?" with the most similar of the allowed words, nothing if none is similar."""
    similar = get_close_matches(word, list(allowed), n=1)
    return f", did you mean {similar[0] if similar[0].startswith('-') else repr(similar[0])}?" if similar else ""


class Parser(argparse.ArgumentParser):
    """Parser of a verb: help with examples, errors in one sentence on stderr.

    Args:
        verb: The verb.
        summary: What it does; shown above the options.
        examples: Lines shown below the options.
    """

    def __init__(self, verb: str, summary: str, *, examples: str) -> None:
        super().__init__(
            prog=f"spherenet {verb}",
            description=summary,
            epilog=f"examples:\n{examples}",
            formatter_class=_Formatter,
            allow_abbrev=False,
            add_help=False,
        )
        self.add_argument("-h", "--help", action=_Help, help="show the common options and examples")
        self.add_argument("--help-all", action=_Help, help="show all options")

    def help_text(self, *, all_options: bool) -> str:
        """Return the help text, with or without the advanced options."""
        forms = {"?": "[{}]", "+": "{} ..."}
        inputs = [action for action in self._actions if not action.option_strings]
        shown = [forms.get(str(action.nargs), "{}").format(action.metavar) for action in inputs]
        self.usage = " ".join([self.prog, *shown, "[OPTIONS]"])
        advanced = [action for action in self._actions if getattr(action, "is_advanced", False)]
        concealed = advanced if not all_options else []
        if not advanced:  # then both texts are the same
            concealed = [self._option_string_actions["--help-all"]]
        hidden = {action: action.help for action in concealed}
        for action in hidden:
            action.help = argparse.SUPPRESS
        try:
            return self.format_help()
        finally:
            for action, text in hidden.items():
                action.help = text

    def option_names(self) -> list[str]:
        """Return the long names of all options."""
        return [name for name in self._option_string_actions if name.startswith("--")]

    def option_of(self, argument: str) -> str:
        """Return the option that sets an argument of the library, or the argument itself if there is none."""
        option = _option_of(argument)
        return option if option in self.option_names() else argument

    def alternative(self, name: str) -> str:
        """Return the end of the sentence about an unknown option: the most similar one."""
        return suggestion(name, self.option_names())

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse arguments; exit with one sentence if an option is unknown or a value is empty."""
        parsed, unknown = super().parse_known_args(args, namespace)
        for argument in unknown:
            name = argument.partition("=")[0]
            if name.startswith("--") and name != "--" and name not in self._option_string_actions:
                self.error(f"unknown option {short(name)}{self.alternative(name)}")
        for action in self._actions:  # an empty shell variable as a path would be the current folder
            value = getattr(parsed, action.dest, None)
            for entry in value if isinstance(value, list) else [value]:
                if isinstance(entry, str) and not entry.strip():
                    name = max(action.option_strings, key=len, default=action.metavar or action.dest)
                    self.error(f"{name} must not be empty, got {entry!r}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """Print what is wrong in one line and exit with code 2."""
        sentence = " ".join(message.split()).rstrip(".")
        if sentence.startswith("argument "):  # of argparse: "argument -o/--output: must be …"
            name, _, problem = sentence.removeprefix("argument ").partition(": ")
            long_name = max(name.partition(", --no-")[0].split("/"), key=len)
            sentence = f"{long_name}{' ' if problem.startswith('must be') else ': '}{problem}"
        ending = "" if sentence.endswith("?") else ";"
        print_message(f"{self.prog}: {short(sentence, MAX_MESSAGE)}{ending} see {self.prog} --help.")
        raise SystemExit(2)


class ConfigParser(Parser):
    """Parser of a verb whose options are the fields of a configuration class.

    The field `batch_size` is the option `--batch-size` and the key `batch_size` of a YAML file. A field's metadata
    contain its help text, its group and its tier: "basic" for --help, "advanced" for --help-all, and "file" for fields
    without an option, which a file or --set sets. Later layers replace earlier ones: defaults, those of a subclass
    (`base_layers`), --config, --set, options.

    Args:
        verb: The verb.
        summary: What it does; shown above the options.
        config: A dataclass.
        examples: Lines shown below the options.
        exclusive: Pairs of fields of which only one can be set.
        hidden: Fields that help does not show, because the verb refuses other values than the defaults.
    """

    def __init__(
        self,
        verb: str,
        summary: str,
        config: type,
        *,
        examples: str,
        exclusive: Sequence[tuple[str, str]] = (),
        hidden: Container[str] = (),
    ) -> None:
        super().__init__(verb, summary, examples=examples)
        self.config, self.exclusive, self.hints = config, exclusive, get_type_hints(config)
        add_option(self, "--config", metavar="FILE", help="YAML file of options; options of the command override it")
        text = "values of any key of such a file, e.g. --set relu=false"
        add_option(self, "--set", type=list[str], metavar="KEY=VALUE", action="extend", help=text, advanced=True)
        add_switch(self, "--print-config", "print all options as YAML for --config, and exit")
        groups: dict[str, Any] = {}
        for field in fields(config):
            tier = field.metadata["tier"]
            if tier == "file":
                continue
            title = field.metadata["group"].title
            if title not in groups:
                groups[title] = self.add_argument_group(title)
            hint, name = self.hints[field.name], _option_of(field.name)
            add_option(
                groups[title],
                name,
                type=hint,
                default=field.default,
                help=argparse.SUPPRESS if field.name in hidden else field.metadata["help"],
                metavar="DIR" if field.name.endswith("_dir") else None,
                keep_default=False,
                advanced=tier == "advanced",
            )

    def help_text(self, *, all_options: bool) -> str:
        """Return the help text; with all options also the keys that only a file or --set has."""
        text = super().help_text(all_options=all_options)
        if not all_options:
            return text
        file_only = [field for field in fields(self.config) if field.metadata["tier"] == "file"]
        return f"{text}\nkeys of --config and --set without an option of their own:\n" + "".join(
            f"  {field.name:<22} {field.metadata['help']}\n" for field in file_only
        )

    def alternative(self, name: str) -> str:
        """Return the end of the sentence about an unknown option: how to set the key, or the most similar option."""
        key = name.removeprefix("--").removeprefix("no-").replace("-", "_")
        return f", did you mean --set {key}=VALUE?" if key in self.hints else super().alternative(name)

    def base_layers(self, parsed: argparse.Namespace) -> list[Mapping[str, Any]]:
        """Return values that replace the defaults, before those of --config."""
        return []

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse arguments into a namespace with the value of every field; exit with one sentence if one is wrong."""
        parsed = super().parse_args(args, namespace)
        typed = {field.name: vars(parsed).pop(field.name) for field in fields(self.config) if field.name in parsed}
        layers = [*self.base_layers(parsed), self._of_file(parsed.config), self._of_set(parsed.set), typed]
        values: dict[str, Any] = {field.name: _default(field) for field in fields(self.config)}
        for layer in layers:
            for first, second in self.exclusive:
                given = [name for name in (first, second) if layer.get(name) is not None]
                if len(given) == 2:
                    self.error(f"{_option_of(second)} must be left out with {_option_of(first)}")
                for name in given:  # it replaces the other one of an earlier layer
                    other = second if name == first else first
                    values[other] = next(_default(field) for field in fields(self.config) if field.name == other)
            values.update(layer)
        for name, value in values.items():
            setattr(parsed, name, value)
        if parsed.print_config:
            import yaml  # type: ignore[import-untyped]

            from spherenet.training import require_valid_choices

            chosen: Any = config_from(parsed, self.config)
            require_valid_choices(chosen)
            print(yaml.safe_dump(chosen.as_yaml(), sort_keys=False, allow_unicode=True), end="")
            raise SystemExit(0)
        return parsed

    def _of_file(self, path: str | None) -> dict[str, Any]:
        from spherenet.cli.options_file import read_options

        return {} if path is None else self._checked(read_options(path), f"--config {path}")

    def _of_set(self, words: Sequence[str] | None) -> dict[str, Any]:
        from spherenet.cli.options_file import parse_yaml

        values: dict[str, Any] = {}
        for word in words or ():
            key, equals, text = word.partition("=")
            if not equals:
                self.error(f"--set must be KEY=VALUE, got {short(repr(word))}")
            values[key] = parse_yaml(text.encode(), f"--set {key}")
        return self._checked(values, "--set")

    def _checked(self, values: Mapping[Any, Any], source: str) -> dict[str, Any]:
        """Return values of YAML as those of fields; exit with one sentence if a key is unknown or a value wrong."""
        checked: dict[str, Any] = {}
        for key, value in values.items():
            if key not in self.hints:
                self.error(f"{source} has the unknown key {short(repr(key))}{suggestion(str(key), self.hints)}")
            try:
                checked[key] = value if isinstance(value, dict) else from_yaml(value, self.hints[key])
            except argparse.ArgumentTypeError as error:
                self.error(f"{self.option_of(key)} {error}")
        return checked


def _option_of(field_name: str) -> str:
    return f"--{field_name.replace('_', '-')}"


def _default(field: Any) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


class _Help(argparse.Action):
    """The options --help and --help-all."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> NoReturn:
        print(parser.help_text(all_options=option_string == "--help-all"), end="")
        raise SystemExit(0)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Help text that keeps the lines of the examples and shows a switch as `--[no-]name`."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, **{"max_help_position": 30, **options})

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            return f"--[no-]{action.option_strings[0][2:]}"
        return super()._format_action_invocation(action)


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
