"""Conversion of models between plain and sphere layers: `to_sphere` and `to_plain`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar, cast

from torch import Tensor, nn

from spherenet._util.text import first_line
from spherenet._util.validation import require_memory, require_module, suggest_options
from spherenet.angles import AngleFunction
from spherenet.convert.attention import make_attention_plain, make_attention_spherical
from spherenet.convert.plan import Rules, Selection, make_plan
from spherenet.convert.record import finish_conversion
from spherenet.convert.summary import record_reason, recorded_drop, restore_attributes
from spherenet.convert.swap import (
    can_be_centered,
    check_options,
    find_batch_norms,
    make_plain,
    make_spherical,
    require_revertible,
)
from spherenet.errors import InvalidArgument, ModelError
from spherenet.layers import SphereLayer, SphereMultiheadAttention, SphereOptions
from spherenet.layers.options import NetworkKeywords
from spherenet.models import Classifier

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["to_plain", "to_sphere"]

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
    finish_conversion(model, drop)
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
    require_memory(*model.parameters(), *model.buffers())
    try:
        return copy.deepcopy(model)
    except Exception as error:  # torch cannot copy non-leaf tensors, and a module may hold any object
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ModelError(f"the model cannot be copied ({reason}): pass inplace=True.") from error
