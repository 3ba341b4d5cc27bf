"""The parser every verb uses: help with examples, errors in one line."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from difflib import get_close_matches
from typing import NoReturn

from spherenet.cli.output import say

__all__ = ["Parser", "suggestion"]


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
