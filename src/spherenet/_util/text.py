"""Text for display: safe in terminals, Markdown and spreadsheets, and short enough for error messages.

Names of classes and runs come from files that anyone may have written. Terminals interpret escape sequences, Markdown
interprets brackets, and spreadsheets evaluate cells that start with an equals sign.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

__all__ = [
    "FORMULA",
    "as_number",
    "csv_cell",
    "finite",
    "first_line",
    "first_names",
    "is_utf8",
    "markdown",
    "plain",
    "short",
]


FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")
"""Characters with which formulas of spreadsheets start, also in full width, as in Japanese versions."""


def plain(text: object) -> str:
    """Return a text on one line, with control and bidirectional characters replaced by escape sequences."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in str(text))


def is_utf8(text: object) -> bool:
    """Return whether UTF-8 can encode a text, unlike a file name in another encoding."""
    try:
        str(text).encode()
    except UnicodeEncodeError:
        return False
    return True


def markdown(text: object) -> str:
    """Return a text that Markdown displays literally, without cells, links, HTML or code."""
    shown = plain(text).replace("\\", "\\\\").replace("&", "&amp;").replace("<", "&lt;")
    for character in "|[]`":
        shown = shown.replace(character, f"\\{character}")
    return shown


def csv_cell(value: Any) -> Any:
    """Return a cell that spreadsheets do not interpret as a formula. Numbers are unchanged."""
    if not isinstance(value, str):
        return value
    shown = plain(value)
    return f"'{shown}" if shown.startswith(FORMULA) else shown


def as_number(value: Any) -> float | None:
    """Return a finite number as a float, None for any other value."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= 1e300:
        return None
    return float(value)


def finite(value: Any) -> Any:
    """Return a JSON value with NaN and infinities, which JSON does not have, replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(entry) for entry in value]
    return value


_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
"""Escape sequences of terminals for colors, cursors and titles, with which some libraries decorate their messages."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error message of any library, without its final period and without escapes."""
    lines = _ESCAPE.sub("", str(error)).strip().splitlines() or [""]
    return short(plain(lines[0]).rstrip(" .:") or type(error).__name__, 300)


def first_names(names: Iterable[str], count: int = 3) -> str:
    """Return the first few names, with an ellipsis if there are more."""
    shortened = [short(name, 160) for name in names]
    return ", ".join(shortened[:count]) + (", …" if len(shortened) > count else "")


def short(text: str, length: int = 60) -> str:
    """Return a text, truncated with an ellipsis if it is too long."""
    return text if len(text) <= length else f"{text[: length - 1]}…"
