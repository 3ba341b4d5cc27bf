"""What a package needs to add verbs to `spherenet`, as its study does.

A `Verb` names a parser and a function. Here are parsers whose errors are one sentence, output that fits the terminal,
files that are complete or unchanged, checks of arguments, and text without control characters.

The package registers a `Verb` for each name in the entry point group `spherenet.verbs`:

    [project.entry-points."spherenet.verbs"]
    count = "my_package.verbs:COUNT"

`spherenet --help` lists it, and `spherenet count --help` shows its options. The module of the `Verb` should import
nothing else, because `spherenet --help` imports it. An exception of `spherenet.errors` ends the verb with one sentence.
"""

from collections.abc import Iterable
from typing import TypeVar

from spherenet._util.atomic import atomic_file, require_writable, write_text
from spherenet._util.files import APPEND, open_handle, open_regular
from spherenet._util.text import as_number, csv_cell, first_line, markdown, plain
from spherenet.cli.option_types import add_max_megapixels, add_option
from spherenet.cli.options import ConfigParser, Parser, config_from
from spherenet.cli.output import print_json, print_message, progress_bar, stdout_console, text_width
from spherenet.cli.verbs import Verb

__all__ = [
    "APPEND",
    "ConfigParser",
    "Parser",
    "Verb",
    "add_max_megapixels",
    "add_option",
    "as_number",
    "atomic_file",
    "config_from",
    "csv_cell",
    "first_line",
    "markdown",
    "open_handle",
    "open_regular",
    "plain",
    "print_json",
    "print_message",
    "progress_bar",
    "require_one_of",
    "require_writable",
    "stdout_console",
    "text_width",
    "write_text",
]

T = TypeVar("T")


def require_one_of(name: str, value: T, allowed: Iterable[T]) -> T:
    """Return a value that is allowed; otherwise raise ValueError with the allowed values and the most similar one."""
    from spherenet._util import validation  # imports torch, which help texts do not need

    return validation.require_one_of(name, value, allowed)
