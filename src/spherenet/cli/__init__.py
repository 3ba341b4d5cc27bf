"""Command line. `verbs.VERBS` lists the verbs with their modules, which are imported only when a verb is called."""

from spherenet.cli.main import main

__all__ = ["main"]
