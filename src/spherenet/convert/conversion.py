"""Convert the layers of any model to sphere layers and back."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TypeVar, cast

from torch import Tensor, nn

from spherenet.angles import AngleFunction, make_shared_angle
from spherenet.convert.neighbors import disable_fast_paths, disable_inplace, drop_batch_norms, find_batch_norms
from spherenet.convert.plan import Rules, Selection, make_plan
from spherenet.convert.summary import record_reason, recorded_reason, restore_attributes
from spherenet.convert.swap import SphereOptions, can_be_centered, make_plain, make_spherical, require_revertible
from spherenet.errors import ModelError
from spherenet.layers import SphereLayer
from spherenet.magnitudes import Magnitude
from spherenet.ops.norms import DEFAULT_EPS
from spherenet.ops.sphere_conv import CENTERS
from spherenet.validation import require_one_of, suggest_options

__all__ = ["to_plain", "to_sphere"]

M = TypeVar("M", bound=nn.Module)


@suggest_options
def to_sphere(
    model: M,
    operator: str | AngleFunction = "cosine",
    k: float | None = None,
    *,
    k_sharing: str = "filter",
    rescale: str | Sequence[float] | None = None,
    eps: float = DEFAULT_EPS,
    inplace: bool = False,
    only: Rules = None,
    skip: Rules = None,
    classifier: bool = False,
    attention: bool = False,
    shortcuts: bool = False,
    transposed: bool = False,
    drop_batch_norm: bool = False,
    center: str | None = "auto",
    magnitude: str | Magnitude | None = None,
    radius: float | str | None = None,
) -> M:
    """Return a model whose convolutions and linear layers are sphere layers.

    Each nn.Conv1d/2d/3d and nn.Linear becomes a SphereConv1d/2d/3d or SphereLinear and keeps its weight, bias,
    geometry, device, dtype, `requires_grad`, mode and hooks. Lazy layers become lazy sphere layers. Layers remain the
    same objects, so that optimizers, tied weights and layers with several names stay valid. The outputs of the model
    change, so train it afterwards.

    Some layers stay plain: subclasses of torch's layers that override methods; children of nn.MultiheadAttention,
    which uses their weights without calling them; and, unless selected, classifiers, attention projections,
    shortcuts and transposed convolutions. Such roles are recognized by names and order, see `spherenet.convert.layers`.
    `sphere_summary` lists the decision for each layer. Skip any other layer whose weight is used without calling the
    layer.

    If an in-place activation in an nn.Sequential would overwrite an output that a sphere layer saves for backward, its
    `inplace` is set to False. Elsewhere the layer notices and recomputes its output.

    After an error the model is unchanged, even if `inplace` is True.

    Args:
        model: Any module. It is copied unless `inplace` is True.
        operator: Operator as in `SphereConv2d`. None and "none" are errors: a plain model needs no conversion, and
            `to_plain` converts a SphereNet to a plain model.
        k: Parameter of the sigmoid, as in `SphereConv2d`.
        k_sharing: "filter" or "layer" as in `SphereConv2d`, or "network" for one learned k in all layers.
        rescale: As in `SphereConv2d`.
        eps: As in `SphereConv2d`.
        inplace: Whether to change the model itself instead of a copy.
        only: Layers that may be converted: a pattern of the dotted name ("layer4", "*.conv1"), a module type, a
            predicate (name, module) -> bool, or a list of these. Patterns and types select the layers inside of a
            matching module too.
        skip: Layers that stay as they are, in the same form. `skip` takes precedence over `only`.
        classifier: Whether to convert the layers that compute the model's output too: those named fc, classifier,
            head, …, the last layer, and a layer that shares its weight with an embedding.
        attention: Whether to convert the projections of attention modules too.
        shortcuts: Whether to convert 1×1 convolutions on shortcuts too.
        transposed: Whether to convert transposed convolutions too, to `SphereConvTranspose1d/2d/3d`.
        drop_batch_norm: Whether to replace each BatchNorm that certainly follows a converted layer by nn.Identity.
        center: None or "none", "weight" or "patch" as in `SphereConv2d`. "auto" is "patch" if `drop_batch_norm` is
            True, otherwise None: after a ReLU all patches lie in one orthant and share a large common component, which
            BatchNorm removes, or else centering. Kernels with a single entry are not centered.
        magnitude: As in `SphereConv2d`.
        radius: As in `SphereConv2d`.

    Returns:
        The converted copy, or the model itself if `inplace` is True.

    Raises:
        ModelError: If a selected layer is parametrized or quantized, the model is scripted, compiled or wrapped by DDP
            or FSDP, or no layer is selected.
        ValueError: If an argument is out of range, or a pattern or type matches no layer.
        TypeError: If an argument is unknown or has a wrong type.

    Example:
        >>> sphere = sn.to_sphere(model, "sigmoid", k=0.3, skip="stem.*")
        >>> print(sn.sphere_summary(sphere))
    """
    _require_module(model)
    if operator is None or operator == "none":
        raise ValueError(
            f"operator must be the name of an operator or an AngleFunction, got {operator!r}; "
            "use to_plain to convert a SphereNet to a plain model."
        )
    require_one_of("k_sharing", k_sharing, ("filter", "layer", "network"))
    require_one_of("center", center, (None, "none", "auto", *CENTERS))
    if center == "auto":
        center = "patch" if drop_batch_norm else None
    elif center == "none":
        center = None
    plan = make_plan(model, Selection(only, skip, classifier, attention, shortcuts, transposed))
    selected = list(plan.convert.values())
    if k_sharing == "network":
        operator, k, k_sharing = _shared_angle(operator, k, selected), None, "layer"
    options = SphereOptions(operator, k, k_sharing, rescale, eps, center, magnitude, radius)
    for layer in selected:
        options.check(layer)
    drop, keep = find_batch_norms(model, selected) if drop_batch_norm else ({}, {})

    # Decisions refer to modules of the original model by name, so that predicates can compare modules by identity.
    # Only the copy can fail from here on.
    model = model if inplace else _copy(model)
    for name in plan.convert:
        layer = model.get_submodule(name)
        reason = f"converted from {type(layer).__name__}"
        if center is not None and not can_be_centered(layer):
            reason += "; not centered: kernels have a single entry"
        make_spherical(layer, options)
        record_reason(layer, reason)
    for name, reason in plan.keep.items():
        layer = model.get_submodule(name)
        if not isinstance(layer, SphereLayer):
            record_reason(layer, reason)
    for name, reason in keep.items():
        record_reason(model.get_submodule(name), f"BatchNorm kept: {reason}")
    drop_batch_norms(model, drop)
    disable_inplace(model)
    disable_fast_paths(model)
    return model


def to_plain(model: M, *, inplace: bool = False) -> M:
    """Return a model whose sphere layers are plain torch layers; the inverse of `to_sphere`.

    Weights and biases are kept. k, β, γ, centering and magnitude functions have no plain counterpart and are dropped,
    which `sphere_summary` reports.
    In-place activations and fast paths that `to_sphere` disabled are restored, but a dropped BatchNorm is not.

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
    _require_module(model)
    require_revertible(model)
    model = model if inplace else _copy(model)
    for module in list(model.modules()):
        reason = recorded_reason(module)
        restore_attributes(module)
        if isinstance(module, SphereLayer):
            class_name = type(module).__name__
            dropped = make_plain(module)
            suffix = f"; {', '.join(dropped)} dropped" if dropped else ""
            record_reason(module, f"converted back from {class_name}{suffix}")
        elif reason is not None and isinstance(module, nn.Identity):
            record_reason(module, reason.split(";")[0] + "; not restored")
        else:
            record_reason(module, None)
    return model


def _shared_angle(operator: str | AngleFunction, k: float | None, layers: Sequence[nn.Module]) -> AngleFunction:
    """Return the angle function with the learned k that all layers share."""
    weights = [cast(Tensor, layer.weight) for layer in layers]
    devices = {str(weight.device) for weight in weights}
    if len(devices) > 1:
        raise ValueError(f'k_sharing must not be "network" for a model on several devices, got {sorted(devices)}.')
    return make_shared_angle(operator, k, weights[0].device, weights[0].dtype)


def _copy(model: M) -> M:
    try:
        return copy.deepcopy(model)
    except Exception as error:  # torch cannot copy non-leaf tensors, and a module may hold any object
        reason = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
        raise ModelError(f"the model cannot be copied ({reason}): pass inplace=True.") from error


def _require_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {model!r} of type {type(model).__name__}.")
