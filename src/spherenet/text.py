"""Other people's words where they are shown: in a terminal, in Markdown, in a table for a spreadsheet.

Names of classes and runs come from folders and files that anybody may have written. A terminal obeys escape sequences,
Markdown makes links of brackets, and a spreadsheet computes what begins with an equals sign.

Other people's words in our error messages: on one line, and never longer than a sentence should be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

__all__ = ["as_number", "csv_cell", "finite", "first_line", "first_names", "markdown", "plain", "short"]


def plain(text: object) -> str:
    """Return a text on one line in which control characters, also those that turn the writing around, are spelled."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in str(text))


def markdown(text: object) -> str:
    """Return a text that Markdown shows as it is: no cell ends, no link, no HTML, no code."""
    shown = plain(text).replace("\\", "\\\\").replace("&", "&amp;").replace("<", "&lt;")
    for character in "|[]`":
        shown = shown.replace(character, f"\\{character}")
    return shown


def csv_cell(value: Any) -> Any:
    """Return a cell that no spreadsheet takes for a formula; numbers stay numbers."""
    if not isinstance(value, str):
        return value
    shown = plain(value)
    return f"'{shown}" if shown.startswith(("=", "+", "-", "@")) else shown


def as_number(value: Any) -> float | None:
    """Return a finite number as a float, and None for anything else that a file may hold in its place."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= 1e300:
        return None
    return float(value)


def finite(value: Any) -> Any:
    """Return a value in which None stands for what JSON has no number for: NaN and the infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(entry) for entry in value]
    return value


def first_line(error: BaseException) -> str:
    """The gist of another library's error, without its final stop."""
    lines = str(error).strip().split("\n")
    return short(lines[0].rstrip(" .:") or type(error).__name__, 300)


def first_names(names: Iterable[str], count: int = 3) -> str:
    """The first few names, and dots where there are more."""
    found = [short(name, 160) for name in names]
    return ", ".join(found[:count]) + (", …" if len(found) > count else "")


def short(text: str, length: int = 60) -> str:
    """The beginning of a text of any length."""
    return text if len(text) <= length else f"{text[: length - 1]}…"
