"""Docstrings as they are meant: the star of a shape such as [*, C] is a star, not the beginning of emphasis."""

import re

import griffe

__all__ = ["AsMeant"]

IN_BRACKETS = re.compile(r"\[[^\[\]`]*\]")
TORCH_HOOKS = ("extra_repr",)  # what torch asks of a module is of no use to a reader


class AsMeant(griffe.Extension):
    """Escapes stars in brackets, and leaves out what torch alone calls."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Called once for every object that is loaded."""
        if obj.docstring is not None:
            obj.docstring.value = with_literal_stars(obj.docstring.value)
        if obj.is_class:
            for name in TORCH_HOOKS:
                obj.members.pop(name, None)


def with_literal_stars(text: str) -> str:
    """Return Markdown in which stars between brackets are stars; indented lines are code and stay."""
    return "\n".join(
        line if line.startswith("    ") else IN_BRACKETS.sub(lambda match: match[0].replace("*", r"\*"), line)
        for line in text.split("\n")
    )
