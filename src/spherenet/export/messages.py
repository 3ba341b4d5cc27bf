"""Other people's words in our error messages: on one line, and never longer than a sentence should be."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["first_line", "first_names", "short"]


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
