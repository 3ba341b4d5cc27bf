"""Rules that name layers: a pattern, a type, a predicate, or several of these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TypeAlias

from torch import nn

from spherenet.convert.survey import Layer

__all__ = ["Rule", "Rules", "read_rules"]

Rule: TypeAlias = str | type[nn.Module] | Callable[[str, nn.Module], bool]
Rules: TypeAlias = Rule | Sequence[Rule] | None
"""What `only` and `skip` take."""


@dataclass(frozen=True)
class NamedRule:
    """One rule as the user wrote it, and as the summary calls it.

    A pattern or a type holds for a layer also if it holds for a module around it: "layer4" means the whole stage. A
    predicate is asked about the layers alone, since "not a Conv2d" is true of every container.
    """

    rule: Rule
    text: str

    def holds(self, layer: Layer) -> bool:
        """Return whether the rule names this layer."""
        if isinstance(self.rule, str):
            return any(fnmatchcase(name, self.rule) for name in (*layer.names, *filter(None, layer.around)))
        if isinstance(self.rule, type):
            return any(isinstance(module, self.rule) for module in (layer.module, *layer.around.values()))
        return any(self.rule(name, layer.module) for name in layer.names)


def read_rules(argument: str, rules: Rules, layers: Sequence[Layer]) -> list[NamedRule]:
    """Return the rules of one argument.

    Raises TypeError for what is no rule, ValueError for a pattern or type that names no layer (with the near ones).
    """
    several = rules if isinstance(rules, (list, tuple)) else [] if rules is None else [rules]
    named = [_read_rule(argument, rule) for rule in several]
    for rule in named:
        if isinstance(rule.rule, (str, type)) and not any(rule.holds(layer) for layer in layers):
            raise ValueError(
                f"{argument} must name layers of the model, but {rule.text} names none; {_near(rule.rule, layers)}."
            )
    return named


def _read_rule(argument: str, rule: object) -> NamedRule:
    if isinstance(rule, str):
        return NamedRule(rule, repr(rule))
    if isinstance(rule, type):
        if issubclass(rule, nn.Module):
            return NamedRule(rule, rule.__name__)
    elif callable(rule) and not isinstance(rule, nn.Module):
        return NamedRule(rule, getattr(rule, "__name__", type(rule).__name__))
    raise TypeError(
        f"{argument} must be a name pattern, a module type, a predicate (name, module) -> bool, or a list of these, "
        f"got {rule!r}."
    )


def _near(rule: str | type[nn.Module], layers: Sequence[Layer]) -> str:
    """What the user may have meant: the layers nearest in name, or the types there are."""
    if isinstance(rule, type):
        types = sorted({type(layer.module).__name__ for layer in layers})
        return f"its layers are of type {', '.join(types)}" if types else "it has no layers"
    names = [name for layer in layers for name in (*layer.names, *layer.around) if name]
    near = get_close_matches(rule, dict.fromkeys(names), n=3, cutoff=0.4) or list(dict.fromkeys(names))[:3]
    return f"near names: {', '.join(map(repr, near))}" if near else "its layers have no names"
