"""Griffe extension: stars of shapes, and the options of typed dictionaries in signatures."""

import inspect
import pkgutil
import re

import griffe

__all__ = ["EscapeStars"]

IN_BRACKETS = re.compile(r"\[[^\[\]`]*\]")
SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Shape|Yields):$")
TORCH_HOOKS = ("extra_repr",)  # called by torch only


class EscapeStars(griffe.Extension):
    """Escapes stars in brackets, shows options one by one and removes methods that only torch calls."""

    def on_function(self, *, func: griffe.Function, **_: object) -> None:
        """Replace `**options: Unpack[...]` by the options of the signature at run time, with types and defaults.

        Options that the docstring describes as a whole (`**options: …`) stay together.
        """
        owner = func.parent if func.name == "__init__" else func
        text = "" if owner.docstring is None else owner.docstring.value
        unpacked = [
            parameter
            for parameter in func.parameters
            if "Unpack[" in str(parameter.annotation or "") and f"**{parameter.name}:" not in text
        ]
        if not unpacked:
            return
        signature = inspect.signature(pkgutil.resolve_name(owner.path))
        for parameter in unpacked:
            del func.parameters[parameter.name]
        for option in signature.parameters.values():
            if option.name in func.parameters or option.kind is option.VAR_KEYWORD:
                continue
            default = None if option.default is option.empty else repr(option.default)
            annotation = None if option.annotation is option.empty else inspect.formatannotation(option.annotation)
            kind = griffe.ParameterKind.keyword_only
            func.parameters.add(griffe.Parameter(option.name, annotation=annotation, kind=kind, default=default))

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Process one loaded object."""
        if obj.docstring is not None:
            obj.docstring.value = with_literal_stars(obj.docstring.value)
        if obj.is_class:
            for name in TORCH_HOOKS:
                obj.members.pop(name, None)


def with_literal_stars(text: str) -> str:
    """Return Markdown with escaped stars between brackets; indented lines outside of sections are code."""
    lines, in_section = [], False
    for line in text.split("\n"):
        if line and not line.startswith(" "):
            in_section = SECTION.match(line) is not None
        is_code = line.startswith("    ") and not in_section
        lines.append(line if is_code else IN_BRACKETS.sub(lambda match: match[0].replace("*", r"\*"), line))
    return "\n".join(lines)
