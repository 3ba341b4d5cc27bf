"""Griffe extension: stars of shapes, and the options of sphere layers in signatures."""

import re
from dataclasses import fields
from typing import get_type_hints

import griffe

from spherenet.layers import options

__all__ = ["EscapeStars"]

IN_BRACKETS = re.compile(r"\[[^\[\]`]*\]")
TORCH_HOOKS = ("extra_repr",)  # called by torch only


UNPACKED = re.compile(r"(?:\w+\.)*Unpack\[(SphereKeywords|NetworkKeywords)\]")


class EscapeStars(griffe.Extension):
    """Escapes stars in brackets, shows options one by one and removes methods that only torch calls."""

    def on_function(self, *, func: griffe.Function, **_: object) -> None:
        """Replace `**options: Unpack[SphereKeywords]` by the options, with types and defaults of `SphereOptions`."""
        for parameter in list(func.parameters):
            match = UNPACKED.fullmatch(str(parameter.annotation or ""))
            if match is None:
                continue
            names = get_type_hints(getattr(options, match[1]))
            del func.parameters[parameter.name]
            for field in fields(options.SphereOptions):
                if field.name in names:
                    kind, default = griffe.ParameterKind.keyword_only, repr(field.default)
                    func.parameters.add(griffe.Parameter(field.name, annotation=field.type, kind=kind, default=default))

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
