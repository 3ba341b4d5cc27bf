"""The verb `completion`: scripts that complete verbs, options and their choices in a shell."""

from __future__ import annotations

import argparse
from typing import Literal

from spherenet.cli.option_types import OptionType
from spherenet.cli.options import Parser
from spherenet.cli.verbs import all_verbs

__all__ = ["completion_parser", "run_completion"]


def completion_parser() -> Parser:
    """Return the parser of `spherenet completion`."""
    parser = Parser(
        "completion",
        "Print a script that completes verbs, options and their choices in a shell.",
        examples="""\
  spherenet completion bash > ~/.local/share/bash-completion/completions/spherenet
  spherenet completion zsh >> ~/.zshrc
  spherenet completion fish > ~/.config/fish/completions/spherenet.fish""",
    )
    shells = OptionType(Literal["bash", "zsh", "fish"])
    parser.add_argument("shell", type=shells, metavar="SHELL", help="bash, zsh or fish")
    return parser


def run_completion(arguments: argparse.Namespace) -> None:
    """Print the script of a shell."""
    if arguments.shell == "fish":
        print(_fish_script())
        return
    if arguments.shell == "zsh":
        print("autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit")
    print(_bash_script())


def _bash_script() -> str:
    words, choices = [], []
    verbs = all_verbs()
    for verb in verbs:
        options = _options(verbs[verb].create_parser())
        words.append(f'    {verb}) words="{" ".join([*options, "--debug"])}" ;;')
        choices += [
            f'    "{verb} {option}") words="{" ".join(values)}" ;;' for option, (_, values) in options.items() if values
        ]
    lines = [
        "_spherenet() {",
        '  local words current="${COMP_WORDS[COMP_CWORD]}" verb="${COMP_WORDS[1]}"',
        '  case "$verb" in',
        *words,
        "  esac",
        '  case "$verb ${COMP_WORDS[COMP_CWORD-1]}" in',
        *choices,
        "  esac",
        f'  if [ "$COMP_CWORD" -eq 1 ]; then words="{" ".join(verbs)} --help --version"; fi',
        '  COMPREPLY=($(compgen -W "$words" -- "$current"))',
        "}",
        "complete -o default -F _spherenet spherenet",
    ]
    return "\n".join(lines)


def _fish_script() -> str:
    lines = []
    for name, verb in all_verbs().items():
        lines.append(f"complete -c spherenet -n __fish_use_subcommand -f -a {name} -d {_quoted(verb.summary)}")
        for option, (text, values) in _options(verb.create_parser()).items():
            line = f"complete -c spherenet -n '__fish_seen_subcommand_from {name}'"
            line += f" -l {option[2:]}" if option.startswith("--") else f" -f -a {option}"
            line += f" -x -a {_quoted(' '.join(values))}" if values else ""
            lines.append(f"{line} -d {_quoted(text)}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _options(parser: argparse.ArgumentParser) -> dict[str, tuple[str, list[str]]]:
    """Return the options and demonstrations of a parser with their help text and choices."""
    completions: dict[str, tuple[str, list[str]]] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, subparser in action.choices.items():
                completions[name] = ((subparser.description or "").split("\n")[0], [])
                completions |= _options(subparser)
        elif action.help != argparse.SUPPRESS:
            text = (action.help or "").replace("%%", "%")
            names = [name for name in action.option_strings if name.startswith("--")]
            words = action.type.choices if isinstance(action.type, OptionType) else []
            completions |= dict.fromkeys(names, (text, words))
    return completions
