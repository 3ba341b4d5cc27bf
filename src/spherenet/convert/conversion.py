"""Conversion of models between plain and sphere layers: `to_sphere`, `to_plain`, rules, and the conversion plan."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, TypeAlias, TypeVar, cast

from torch import Tensor, nn

from spherenet._util.text import first_line
from spherenet._util.validation import require_module, suggest_options
from spherenet.angles import AngleFunction
from spherenet.convert.attention import (
    attention_problem,
    is_attention_output,
    make_attention_plain,
    make_attention_spherical,
)
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
from spherenet.convert.pretrained import record_on_save
from spherenet.convert.summary import record_reason, recorded_drop, restore_attributes
from spherenet.convert.swap import (
    can_be_centered,
    check_options,
    computed_weight,
    disable_fast_paths,
    disable_inplace,
    drop_batch_norms,
    find_batch_norms,
    make_plain,
    make_spherical,
    overridden_methods,
    require_convertible,
    require_revertible,
)
from spherenet.errors import InvalidArgument, InvalidArgumentType, ModelError
from spherenet.layers import AngularHead, SphereLayer, SphereMultiheadAttention, SphereOptions
from spherenet.layers.options import NetworkKeywords
from spherenet.models import Classifier

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Plan", "Rule", "Rules", "Selection", "make_plan", "to_plain", "to_sphere"]

M = TypeVar("M", bound=nn.Module)


@suggest_options
def to_sphere(
    model: M,
    operator: str | AngleFunction | SphereOptions = "cosine",
    k: float | None = None,
    *,
    select: Rules = None,
    inplace: bool = False,
    only: Rules = None,
    skip: Rules = None,
    classifier: bool = False,
    attention: bool = False,
    shortcuts: bool = False,
    transposed: bool = False,
    drop_batch_norm: bool = False,
    center: str | None = "auto",
    **options: Unpack[NetworkKeywords],
) -> M:
    """Return a model whose convolutions and linear layers are sphere layers.

    Each nn.Conv1d/2d/3d and nn.Linear becomes a SphereConv1d/2d/3d or SphereLinear and keeps its weight, bias,
    geometry, device, dtype, `requires_grad`, mode and hooks. Lazy layers become lazy sphere layers. Layers remain the
    same objects, so that optimizers, tied weights and layers with several names stay valid. The outputs of the model
    change, so train it afterwards.

    If attention is selected, each nn.MultiheadAttention becomes a SphereMultiheadAttention with the same projections
    and a new temperature per head, also inside torch's transformer layers. The operator has no effect on it.

    Some layers stay plain: subclasses of torch's layers that override methods; an nn.MultiheadAttention with
    `add_bias_kv` or `add_zero_attn`, and the output projection of any; and, unless selected, classifiers, attention,
    shortcuts and transposed convolutions. Such roles are recognized by names and order, see `spherenet.convert.layers`.
    `sphere_summary` lists the decision for each layer. Skip any other layer whose weight is used without calling the
    layer.

    If an in-place activation in an nn.Sequential would overwrite an output that a sphere layer saves for backward, its
    `inplace` is set to False. Elsewhere the layer notices and recomputes its output.

    After an error the model is unchanged, even if `inplace` is True.

    Args:
        model: Any module. It is copied unless `inplace` is True.
        operator: Operator as in `SphereConv2d`, or all options of the layers as a `SphereOptions` object. None and
            "none" are errors: a plain model needs no conversion, and `to_plain` converts a SphereNet to a plain model.
        k: Parameter of the sigmoid, as in `SphereConv2d`.
        select: Layers to convert, whatever their role: a pattern of the dotted name ("layer4", "*.conv1"), a module
            type, a predicate (name, module) -> bool, or a list of these. Patterns and types select the layers inside
            of a matching module too. Layers that cannot be converted stay plain.
        inplace: Whether to change the model itself instead of a copy.
        only: Layers that may be converted unless their role is excluded, in the form of `select`.
        skip: Layers that stay as they are, in the same form. `skip` takes precedence over `select` and `only`.
        classifier: Whether to convert the layers that compute the model's output too: those named fc, classifier,
            head, …, the last layer, and a layer that shares its weight with an embedding.
        attention: Whether to convert nn.MultiheadAttention, and the projections of other attention modules, too. The
            latter become `SphereLinear`; how such a module compares queries and keys is its own code and stays.
        shortcuts: Whether to convert 1×1 convolutions on shortcuts too.
        transposed: Whether to convert transposed convolutions too, to `SphereConvTranspose1d/2d/3d`.
        drop_batch_norm: Whether to replace each BatchNorm that certainly follows a converted layer by nn.Identity.
        center: None or "none", "weight" or "patch" as in `SphereConv2d`. "auto" is "patch" if `drop_batch_norm` is
            True, otherwise None: after a ReLU all patches lie in one orthant and share a large common component, which
            BatchNorm removes, or else centering. Kernels with a single entry are not centered.
        k_sharing: "filter" or "layer" as in `SphereConv2d`, or "network" for one learned k in all layers.
        rescale: As in `SphereConv2d`.
        eps: As in `SphereConv2d`.
        magnitude: As in `SphereConv2d`.
        radius: As in `SphereConv2d`.

    Returns:
        The converted copy, or the model itself if `inplace` is True.

    Raises:
        ModelError: If a layer is quantized, or parametrized and selected by `only`, the model is scripted, compiled or
            wrapped by DDP or FSDP, or no layer is selected.
        ValueError: If an argument is out of range, or a pattern or type matches no layer.
        TypeError: If an argument is unknown or has a wrong type.

    Example:
        >>> sphere = sn.to_sphere(model, "sigmoid", k=0.3, skip="stem.*")
        >>> print(sn.sphere_summary(sphere))
    """
    require_module("model", model)
    if operator is None or operator == "none":
        raise InvalidArgument(
            "operator",
            f"must be the name of an operator or an AngleFunction, got {operator!r}; "
            "use to_plain to convert a SphereNet to a plain model.",
        )
    chosen = SphereOptions.collect(operator, k, center, options).for_network("patch" if drop_batch_norm else None)
    plan = make_plan(model, Selection(select, only, skip, classifier, attention, shortcuts, transposed))
    selected = list(plan.convert.values())
    if chosen.k_sharing == "network" and selected:
        chosen = _share_angle(chosen, model, selected)
    for layer in selected:
        check_options(chosen, layer)
    drop, keep = find_batch_norms(model, selected) if drop_batch_norm else ({}, {})

    # Decisions refer to modules of the original model by name, so that predicates can compare modules by identity.
    # Only the copy can fail from here on.
    model = model if inplace else _copy(model)
    for name in plan.attention:
        layer = model.get_submodule(name)
        make_attention_spherical(layer, chosen.eps)
        record_reason(layer, "converted from MultiheadAttention")
    for name in plan.convert:
        layer = model.get_submodule(name)
        reason = f"converted from {type(layer).__name__}"
        if name in plan.projections:
            reason += "; the scores of the attention stay products"
        if chosen.center is not None and not can_be_centered(layer):
            reason += "; not centered: kernels have a single entry"
        make_spherical(layer, chosen)
        record_reason(layer, reason)
    for name, reason in plan.keep.items():
        layer = model.get_submodule(name)
        if not isinstance(layer, (SphereLayer, SphereMultiheadAttention)):
            record_reason(layer, reason)
    for name, reason in keep.items():
        record_reason(model.get_submodule(name), f"BatchNorm kept: {reason}")
    drop_batch_norms(model, drop)
    disable_inplace(model)
    disable_fast_paths(model)
    record_on_save(model)
    return model


def to_plain(model: M, *, inplace: bool = False) -> M:
    """Return a model whose sphere layers are plain torch layers; the inverse of `to_sphere`.

    Weights and biases are kept. k, β, γ, centering, magnitude functions and temperatures of attention have no plain
    counterpart and are dropped, which `sphere_summary` reports. The `config` of a model of `create_model` describes the
    plain network then. In-place activations and fast paths that `to_sphere` disabled are restored, but a dropped
    BatchNorm is not.

    Args:
        model: Any module. It is copied unless `inplace` is True.
        inplace: Whether to change the model itself instead of a copy.

    Returns:
        The converted copy, or the model itself if `inplace` is True.

    Raises:
        ModelError: If a sphere layer is parametrized or of a subclass, or the model is scripted, compiled or wrapped by
            DDP or FSDP.
        TypeError: If model is not a module.
    """
    require_module("model", model)
    require_revertible(model)
    model = model if inplace else _copy(model)
    for module in list(model.modules()):
        drop = recorded_drop(module)
        restore_attributes(module)
        if isinstance(module, SphereLayer):
            class_name = type(module).__name__
            dropped = make_plain(module)
            suffix = f"; {', '.join(dropped)} dropped" if dropped else ""
            record_reason(module, f"converted back from {class_name}{suffix}")
        elif isinstance(module, SphereMultiheadAttention):
            make_attention_plain(module)
            record_reason(module, "converted back from SphereMultiheadAttention; temperatures dropped")
        elif drop is not None:
            record_reason(module, f"{drop[0]} dropped after {drop[1]}; not restored")
        else:
            record_reason(module, None)
    if isinstance(model, Classifier):
        model.config |= dict.fromkeys(("operator", "k", "rescale", "center", "magnitude", "radius"))
    return model


def _share_angle(options: SphereOptions, model: nn.Module, layers: Sequence[nn.Module]) -> SphereOptions:
    """Return the options with one angle function for all layers, frozen if they are."""
    weights = [cast(Tensor, layer.weight) for layer in layers]
    devices = {str(weight.device) for weight in weights}
    if len(devices) > 1:
        raise InvalidArgument(
            "k_sharing", f'must not be "network" for a model on several devices, got {sorted(devices)}.'
        )
    options = options.share_angle(weights[0].device, weights[0].dtype)
    angle = cast(AngleFunction, options.operator).train(model.training)
    if not any(weight.requires_grad for weight in weights):
        angle.requires_grad_(False)  # as the k of a frozen layer
    return options


def _copy(model: M) -> M:
    try:
        return copy.deepcopy(model)
    except Exception as error:  # torch cannot copy non-leaf tensors, and a module may hold any object
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ModelError(f"the model cannot be copied ({reason}): pass inplace=True.") from error


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
