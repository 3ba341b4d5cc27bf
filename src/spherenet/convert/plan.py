"""The plan of a conversion: which layers the rules of the caller and the roles of layers select, and why not others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TypeAlias

from torch import nn

from spherenet.convert.attention import attention_problem, is_attention_output
from spherenet.convert.layers import (
    ATTENTION,
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
from spherenet.convert.swap import computed_weight, overridden_methods, require_convertible
from spherenet.errors import InvalidArgument, InvalidArgumentType, ModelError
from spherenet.layers import AngularHead, SphereLayer, SphereMultiheadAttention

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
            raise InvalidArgument(
                argument,
                f"must match layers of the model, got {named.name}, which matches none; "
                f"{_alternatives(named.rule, layers)}.",
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
    raise InvalidArgumentType(
        argument,
        f"must be a name pattern, a module type, a predicate (name, module) -> bool, or a list of these, got {rule!r}.",
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

    select: Rules = None
    only: Rules = None
    skip: Rules = None
    classifier: bool = False
    attention: bool = False
    shortcuts: bool = False
    transposed: bool = False


@dataclass
class Plan:
    """Layers to convert as {name: layer}, attention likewise, and the other layers as {name: reason}.

    Projections are the layers to convert of attention that is computed by code of other libraries.
    """

    convert: dict[str, nn.Module] = field(default_factory=dict)
    attention: dict[str, nn.Module] = field(default_factory=dict)
    keep: dict[str, str] = field(default_factory=dict)
    projections: set[str] = field(default_factory=set)


def make_plan(model: nn.Module, selection: Selection) -> Plan:
    """Decide for every layer of a model whether to convert it.

    Raises:
        ModelError: If a selected layer cannot be converted, or if no layer is selected.
        ValueError: If a pattern or type matches no layer.
        TypeError: If a rule is neither a pattern, a type nor a predicate.
    """
    plan = Plan()
    layers = find_layers(model)
    if selection.select is not None and selection.only is not None:
        raise InvalidArgumentType("only", f"must be left out if select is given, got {selection.only!r}.")
    select = _read_rules("select", selection.select, layers)
    only = _read_rules("only", selection.only, layers)
    skip = _read_rules("skip", selection.skip, layers)
    if selection.select is not None:  # an explicit choice, so that roles do not matter
        selection = replace(selection, classifier=True, attention=True, shortcuts=True, transposed=True)
    classifiers = {} if selection.classifier else find_classifiers(model)
    embeddings = {} if selection.classifier else find_embeddings(model)
    for layer in layers:
        skipped_by = next((rule for rule in skip if rule.matches(layer)), None)
        if skipped_by is not None:
            reason: str | None = f"skipped by rule {skipped_by.name}"
        elif selection.only is not None and not any(rule.matches(layer) for rule in only):
            reason = "not selected by only"
        elif selection.select is not None and not any(rule.matches(layer) for rule in select):
            reason = "not selected"
        else:
            reason = _reason_to_keep(layer, selection, classifiers, embeddings)
        if reason is None and isinstance(layer.module, ATTENTION):
            problem = attention_problem(layer.module)
            if problem is None:
                plan.attention[layer.name] = layer.module
            else:
                plan.keep[layer.name] = f"not converted: {problem}"
            continue
        if reason is None:
            computed = computed_weight(layer.module) if selection.only is None else None
            if computed is None:
                require_convertible(layer.name, layer.module)
            methods = overridden_methods(layer.module)
            override = f"{type(layer.module).__name__} overrides {methods[0]}" if methods else None
            problem = f"{type(layer.module).__name__} {computed}" if computed else override
            reason = None if problem is None else f"not converted: {problem}"
        if reason is None:
            plan.convert[layer.name] = layer.module
            if is_attention_projection(layer):
                plan.projections.add(layer.name)
        else:
            plan.keep[layer.name] = reason
    for name in plan.attention:
        output = f"{name}.out_proj" if name else "out_proj"
        plan.keep[output] = _ATTENTION_OUTPUT
    if not plan.convert and not plan.attention:
        counts = Counter(plan.keep.values()).most_common()
        reasons = ", ".join(f"{count} {reason}" for reason, count in counts)
        types = ", ".join(cls.__name__ for cls in CONVERTIBLE)
        raise ModelError(f"no layer of the model was converted: {reasons or f'it has no {types}'}.")
    for name, module in weight_modules(model):
        is_spherical = isinstance(module, (AngularHead, SphereLayer, SphereMultiheadAttention))
        if name not in plan.convert and name not in plan.attention and not is_spherical:
            inherited = [plan.keep[ancestor] for ancestor in ancestor_names(name) if ancestor in plan.keep]
            plan.keep.setdefault(name, inherited[0] if inherited else _without_counterpart(module))
    return plan


_ATTENTION_OUTPUT = "attention projection: output of SphereMultiheadAttention"


def _without_counterpart(module: nn.Module) -> str:
    """Return the reason for a module that is neither a convolution nor a linear layer."""
    return f"not converted: {type(module).__name__} has no spherical counterpart"


def _reason_to_keep(
    layer: Layer, selection: Selection, classifiers: dict[int, str], embeddings: dict[int, str]
) -> str | None:
    """Return why a layer that the rules select stays plain by default, or None if it does not."""
    if isinstance(layer.module, SphereLayer):
        return "already spherical"
    if isinstance(layer.module, ATTENTION):
        return None if selection.attention else "attention"
    if any(is_attention_output(layer.module, parent) for parent in layer.ancestors.values()):
        return _ATTENTION_OUTPUT
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
