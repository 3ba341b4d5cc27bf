"""What a package needs to add verbs to `spherenet`: `Verb`, parsers whose errors are one sentence, and output.

The package registers a `Verb` for each name in the entry point group `spherenet.verbs`:

    [project.entry-points."spherenet.verbs"]
    count = "my_package.verbs:COUNT"

`spherenet --help` lists it, and `spherenet count --help` shows its options. The module of the `Verb` should import
nothing else, because `spherenet --help` imports it. An exception of `spherenet.errors` ends the verb with one sentence.
"""

from spherenet.cli.option_types import add_max_megapixels, add_option
from spherenet.cli.options import ConfigParser, Parser, config_from
from spherenet.cli.output import print_json, print_message, progress_bar, stdout_console, text_width
from spherenet.cli.verbs import Verb

__all__ = [
    "ConfigParser",
    "Parser",
    "Verb",
    "add_max_megapixels",
    "add_option",
    "config_from",
    "print_json",
    "print_message",
    "progress_bar",
    "stdout_console",
    "text_width",
]
