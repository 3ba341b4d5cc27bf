"""Other people's words where they are shown: in a terminal, in Markdown, in a table for a spreadsheet.

Names of classes and runs come from folders and files that anybody may have written. A terminal obeys escape sequences,
Markdown makes links of brackets, and a spreadsheet computes what begins with an equals sign.
"""

from __future__ import annotations

import math
from typing import Any

__all__ = ["as_number", "csv_cell", "finite", "markdown", "plain"]


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
