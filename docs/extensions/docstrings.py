"""Griffe extension: escape the star of shapes such as [*, C], which Markdown would read as emphasis."""

import re

import griffe

__all__ = ["EscapeStars"]

IN_BRACKETS = re.compile(r"\[[^\[\]`]*\]")
TORCH_HOOKS = ("extra_repr",)  # called by torch only


class EscapeStars(griffe.Extension):
    """Escapes stars in brackets and removes methods that only torch calls."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Process one loaded object."""
        if obj.docstring is not None:
            obj.docstring.value = with_literal_stars(obj.docstring.value)
        if obj.is_class:
            for name in TORCH_HOOKS:
                obj.members.pop(name, None)


def with_literal_stars(text: str) -> str:
    """Return Markdown with escaped stars between brackets; indented lines are code and stay unchanged."""
    return "\n".join(
        line if line.startswith("    ") else IN_BRACKETS.sub(lambda match: match[0].replace("*", r"\*"), line)
        for line in text.split("\n")
    )
