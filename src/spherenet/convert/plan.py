"""Rules that name layers: a pattern, a type, a predicate, or several of these.

What happens to each layer of a model, decided before anything is changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TypeAlias

from torch import nn

from spherenet.convert import layers as roles
from spherenet.convert.layers import CONVERTIBLE, Layer, find_layers, owners, weight_modules
from spherenet.convert.swap import own_methods, refuse_layer
from spherenet.errors import ModelError
from spherenet.layers import AngularHead, SphereLayer

__all__ = ["Choices", "Plan", "Rule", "Rules", "make_plan", "read_rules"]

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


@dataclass(frozen=True)
class Choices:
    """Which layers the user wants to have converted; see `to_sphere`."""

    only: Rules = None
    skip: Rules = None
    classifier: bool = False
    attention: bool = False
    shortcuts: bool = True


@dataclass
class Plan:
    """The layers to convert by name, and why each of the others is left."""

    convert: dict[str, nn.Module] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)


def make_plan(model: nn.Module, choices: Choices) -> Plan:
    """Decide about every layer.

    Raises ModelError where a layer that nothing spares cannot be converted, or where none is left to convert;
    ValueError or TypeError for a wrong rule.
    """
    plan = Plan()
    layers = find_layers(model)
    only = read_rules("only", choices.only, layers)
    skip = read_rules("skip", choices.skip, layers)
    outputs = {} if choices.classifier else roles.classifiers(model)
    embeddings = {} if choices.classifier else roles.tied_embeddings(model)
    for layer in layers:
        skipped = next((rule for rule in skip if rule.holds(layer)), None)
        if skipped is not None:
            reason: str | None = f"skipped by rule {skipped.text}"
        elif choices.only is not None and not any(rule.holds(layer) for rule in only):
            reason = "left out by only"
        else:
            reason = _role(layer, choices, outputs, embeddings)
        if reason is None:
            refuse_layer(layer.name, layer.module)
            extra = own_methods(layer.module)
            reason = f"not converted: {type(layer.module).__name__} has its own {extra[0]}" if extra else None
        if reason is None:
            plan.convert[layer.name] = layer.module
        else:
            plan.left[layer.name] = reason
    if not plan.convert:
        counts = Counter(plan.left.values()).most_common()
        listed = ", ".join(f"{count} {reason}" for reason, count in counts)
        kinds = ", ".join(cls.__name__ for cls in CONVERTIBLE)
        raise ModelError(f"no layer of the model was converted: {listed or f'it has no {kinds}'}.")
    for name, module in weight_modules(model):
        if name not in plan.convert and not isinstance(module, (AngularHead, SphereLayer)):
            inherited = [plan.left[owner] for owner in owners(name) if owner in plan.left]  # of a skipped, sealed part
            plan.left.setdefault(name, inherited[0] if inherited else _without_twin(module))
    return plan


def _without_twin(module: nn.Module) -> str:
    itself = isinstance(module, nn.MultiheadAttention)
    why = "applies its weights itself" if itself else "has no spherical counterpart"
    return f"not converted: {type(module).__name__} {why}"


def _role(layer: Layer, choices: Choices, outputs: dict[int, str], embeddings: dict[int, str]) -> str | None:
    """Return why a layer stays as it is if the user says nothing about it, None where it does not."""
    if isinstance(layer.module, SphereLayer):
        return "already spherical"
    owner = roles.applied_by_owner(layer)
    if owner is not None:
        projection = "attention projection: " if "Attention" in owner else "not converted: "
        return f"{projection}{owner} applies its weight itself"
    weight = getattr(layer.module, "weight", None)
    if id(weight) in embeddings:
        return f"classifier (weight tied to the embedding {embeddings[id(weight)]!r})"
    if id(layer.module) in outputs:
        return outputs[id(layer.module)]
    if not choices.attention and roles.is_attention_projection(layer):
        return "attention projection"
    if not choices.shortcuts and roles.is_shortcut(layer):
        return "shortcut"
    return None
