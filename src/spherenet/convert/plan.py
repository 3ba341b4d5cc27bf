"""Decide which layers of a model to convert, before anything is changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TypeAlias

from torch import nn

from spherenet.convert.layers import (
    CONVERTIBLE,
    TRANSPOSED,
    Layer,
    ancestor_names,
    find_classifiers,
    find_embeddings,
    find_layers,
    is_attention_projection,
    is_shortcut,
    owner_applying_weight,
    weight_modules,
)
from spherenet.convert.swap import overridden_methods, require_convertible
from spherenet.errors import ModelError
from spherenet.layers import AngularHead, SphereLayer

__all__ = ["Plan", "Rule", "Rules", "Selection", "make_plan"]

Rule: TypeAlias = str | type[nn.Module] | Callable[[str, nn.Module], bool]
Rules: TypeAlias = Rule | Sequence[Rule] | None
"""Type of `only` and `skip`: a name pattern, a module type, a predicate, or several of these."""


@dataclass(frozen=True)
class _NamedRule:
    """A rule and its name in error messages and in the summary."""

    rule: Rule
    name: str

    def matches(self, layer: Layer) -> bool:
        """Return whether the rule selects a layer.

        A pattern or type that matches an ancestor selects the layer too, so that "layer4" means a whole stage. A
        predicate is called for layers only, since e.g. "is not a Conv2d" holds for every container.
        """
        if isinstance(self.rule, str):
            return any(fnmatchcase(name, self.rule) for name in (*layer.names, *filter(None, layer.ancestors)))
        if isinstance(self.rule, type):
            return any(isinstance(module, self.rule) for module in (layer.module, *layer.ancestors.values()))
        return any(self.rule(name, layer.module) for name in layer.names)


def _read_rules(argument: str, rules: Rules, layers: Sequence[Layer]) -> list[_NamedRule]:
    """Return the rules of an argument.

    Raises TypeError for an invalid rule, and ValueError for a pattern or type that matches no layer.
    """
    several = rules if isinstance(rules, (list, tuple)) else [] if rules is None else [rules]
    named_rules = [_read_rule(argument, rule) for rule in several]
    for named in named_rules:
        if isinstance(named.rule, (str, type)) and not any(named.matches(layer) for layer in layers):
            raise ValueError(
                f"{argument} must match layers of the model, got {named.name}, which matches none; "
                f"{_alternatives(named.rule, layers)}."
            )
    return named_rules


def _read_rule(argument: str, rule: object) -> _NamedRule:
    if isinstance(rule, str):
        return _NamedRule(rule, repr(rule))
    if isinstance(rule, type):
        if issubclass(rule, nn.Module):
            return _NamedRule(rule, rule.__name__)
    elif callable(rule) and not isinstance(rule, nn.Module):
        return _NamedRule(rule, getattr(rule, "__name__", type(rule).__name__))
    raise TypeError(
        f"{argument} must be a name pattern, a module type, a predicate (name, module) -> bool, or a list of these, "
        f"got {rule!r}."
    )


def _alternatives(rule: str | type[nn.Module], layers: Sequence[Layer]) -> str:
    """Return the most similar layer names for a pattern, or the layer types for a type."""
    if isinstance(rule, type):
        types = sorted({type(layer.module).__name__ for layer in layers})
        return f"its layers are of type {', '.join(types)}" if types else "it has no layers"
    names = [name for layer in layers for name in (*layer.names, *layer.ancestors) if name]
    similar = get_close_matches(rule, dict.fromkeys(names), n=3, cutoff=0.4) or list(dict.fromkeys(names))[:3]
    return f"similar names: {', '.join(map(repr, similar))}" if similar else "its layers have no names"


@dataclass(frozen=True)
class Selection:
    """Arguments of `to_sphere` that select layers."""

    only: Rules = None
    skip: Rules = None
    classifier: bool = False
    attention: bool = False
    shortcuts: bool = False
    transposed: bool = False


@dataclass
class Plan:
    """Layers to convert as {name: layer}, and the other layers as {name: reason}."""

    convert: dict[str, nn.Module] = field(default_factory=dict)
    keep: dict[str, str] = field(default_factory=dict)


def make_plan(model: nn.Module, selection: Selection) -> Plan:
    """Decide for every layer of a model whether to convert it.

    Raises:
        ModelError: If a selected layer cannot be converted, or if no layer is selected.
        ValueError: If a pattern or type matches no layer.
        TypeError: If a rule is neither a pattern, a type nor a predicate.
    """
    plan = Plan()
    layers = find_layers(model)
    only = _read_rules("only", selection.only, layers)
    skip = _read_rules("skip", selection.skip, layers)
    classifiers = {} if selection.classifier else find_classifiers(model)
    embeddings = {} if selection.classifier else find_embeddings(model)
    for layer in layers:
        skipped_by = next((rule for rule in skip if rule.matches(layer)), None)
        if skipped_by is not None:
            reason: str | None = f"skipped by rule {skipped_by.name}"
        elif selection.only is not None and not any(rule.matches(layer) for rule in only):
            reason = "not selected by only"
        else:
            reason = _reason_to_keep(layer, selection, classifiers, embeddings)
        if reason is None:
            require_convertible(layer.name, layer.module)
            methods = overridden_methods(layer.module)
            reason = f"not converted: {type(layer.module).__name__} overrides {methods[0]}" if methods else None
        if reason is None:
            plan.convert[layer.name] = layer.module
        else:
            plan.keep[layer.name] = reason
    if not plan.convert:
        counts = Counter(plan.keep.values()).most_common()
        reasons = ", ".join(f"{count} {reason}" for reason, count in counts)
        types = ", ".join(cls.__name__ for cls in CONVERTIBLE)
        raise ModelError(f"no layer of the model was converted: {reasons or f'it has no {types}'}.")
    for name, module in weight_modules(model):
        if name not in plan.convert and not isinstance(module, (AngularHead, SphereLayer)):
            inherited = [plan.keep[ancestor] for ancestor in ancestor_names(name) if ancestor in plan.keep]
            plan.keep.setdefault(name, inherited[0] if inherited else _without_counterpart(module))
    return plan


def _without_counterpart(module: nn.Module) -> str:
    """Return the reason for a module that is neither a convolution nor a linear layer."""
    is_attention = isinstance(module, nn.MultiheadAttention)
    problem = "applies its weights itself" if is_attention else "has no spherical counterpart"
    return f"not converted: {type(module).__name__} {problem}"


def _reason_to_keep(
    layer: Layer, selection: Selection, classifiers: dict[int, str], embeddings: dict[int, str]
) -> str | None:
    """Return why a layer that the rules select stays plain by default, or None if it does not."""
    if isinstance(layer.module, SphereLayer):
        return "already spherical"
    owner = owner_applying_weight(layer)
    if owner is not None:
        prefix = "attention projection" if "Attention" in owner else "not converted"
        return f"{prefix}: {owner} applies its weight itself"
    weight = getattr(layer.module, "weight", None)
    if id(weight) in embeddings:
        return f"classifier (weight tied to the embedding {embeddings[id(weight)]!r})"
    if id(layer.module) in classifiers:
        return classifiers[id(layer.module)]
    if not selection.attention and is_attention_projection(layer):
        return "attention projection"
    if not selection.shortcuts and is_shortcut(layer):
        return "shortcut"
    if not selection.transposed and isinstance(layer.module, TRANSPOSED):
        return "transposed convolution"
    return None
