"""The command line: one small module a verb, imported only when that verb is called."""

from spherenet.cli.main import main

__all__ = ["main"]
