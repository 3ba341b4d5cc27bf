"""Any network to a spherical one and back."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TypeVar, cast

from torch import Tensor, nn

from spherenet.angles import DEFAULT_LEARNED_K, AngleFunction, LearnableSigmoidAngle
from spherenet.convert.plan import Choices, Rules, make_plan
from spherenet.convert.summary import give_back, put_note, read_note
from spherenet.convert.swap import (
    SphereOptions,
    become_plain,
    become_sphere,
    drop_batch_norms,
    droppable_batch_norms,
    leave_fast_paths,
    refuse_way_back,
    write_out_of_place,
)
from spherenet.errors import ModelError
from spherenet.layers import SphereLayer
from spherenet.ops.norms import DEFAULT_EPS
from spherenet.validation import require_one_of

__all__ = ["to_plain", "to_sphere"]

M = TypeVar("M", bound=nn.Module)


def to_sphere(
    model: M,
    operator: str | AngleFunction = "sigmoid",
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
    shortcuts: bool = True,
    drop_batch_norm: bool = False,
) -> M:
    """Return a model whose convolutions and linear layers answer with angles, a copy unless `inplace` (SPEC 6).

        sphere = sn.to_sphere(model, "sigmoid", k=0.3, skip="stem.*")
        print(sn.sphere_summary(sphere))

    Each nn.Conv1d/2d/3d and nn.Linear becomes a SphereConv1d/2d/3d or SphereLinear with its weight, bias, geometry,
    device, dtype, `requires_grad`, mode and hooks; lazy layers become lazy sphere layers. A layer stays the object it
    was, so optimisers, tied weights and layers with several names survive. The outputs are other ones: train after it.

    operator, k, rescale, eps: as in `SphereConv2d`. k_sharing: as there, or "network" for one learned k in all layers.
    skip: layers to leave; only: layers to look at. Each is a pattern of the dotted name ("layer4", "*.conv1"), a module
        type, a predicate (name, module) -> bool, or a list of these. Patterns and types also name what is inside.
    classifier: convert what makes the model's output too: layers named fc, classifier, head, …, the last layer, a layer
        that shares its weight with an embedding. attention: the projections of attention. shortcuts: 1×1
        convolutions on shortcuts. `roles` says how they are told. nn.MultiheadAttention is never converted, since
        it applies its weights itself; a layer of yours whose weight is used without calling it must be skipped.
    drop_batch_norm: put nn.Identity for each BatchNorm that certainly follows a converted layer (SphereNorm).

    A subclass of torch's layers with methods of its own stays plain. An in-place activation that would overwrite what a
    sphere layer keeps becomes an ordinary one, where an nn.Sequential shows it; elsewhere the layer computes again.

    Raises ModelError for a layer that is parametrised or quantised and not skipped, for scripted, compiled or DDP/FSDP
    models, and where no layer is left to convert; ValueError or TypeError for a wrong argument or a pattern or type
    that names no layer. After an error the model is as it was, with `inplace` too.
    """
    _require_module(model)
    require_one_of("k_sharing", k_sharing, ("filter", "layer", "network"))
    plan = make_plan(model, Choices(only, skip, classifier, attention, shortcuts))
    converted = list(plan.convert.values())
    if k_sharing == "network":
        operator, k, k_sharing = _one_for_all(operator, k, converted), None, "layer"
    options = SphereOptions(operator, k, k_sharing, rescale, eps)
    for layer in converted:
        options.check(layer)
    drop, keep = droppable_batch_norms(model, converted) if drop_batch_norm else ({}, {})

    # Everything is decided by name on the model itself, so that a predicate may ask which module it is; from here on
    # nothing can fail.
    model = model if inplace else _copy(model)
    for name in plan.convert:
        layer = model.get_submodule(name)
        note = f"converted from {type(layer).__name__}"
        become_sphere(layer, options)
        put_note(layer, note)
    for name, reason in plan.left.items():
        layer = model.get_submodule(name)
        if not isinstance(layer, SphereLayer):
            put_note(layer, reason)
    for name, reason in keep.items():
        put_note(model.get_submodule(name), f"BatchNorm kept: {reason}")
    drop_batch_norms(model, drop)
    write_out_of_place(model)
    leave_fast_paths(model)
    return model


def to_plain(model: nn.Module, *, inplace: bool = False) -> nn.Module:
    """Return a model whose sphere layers are torch's again, a copy unless `inplace`; the way back from `to_sphere`.

    Weights and biases are kept. k, β and γ have no plain counterpart and are dropped, as `sphere_summary` then says; a
    BatchNorm that was dropped does not come back. In-place activations and fast paths are as they were.

    Raises ModelError for a subclass of the sphere layers, a parametrised one, and a scripted, compiled or DDP/FSDP
    model.
    """
    _require_module(model)
    refuse_way_back(model)
    model = model if inplace else _copy(model)
    for module in list(model.modules()):
        note = read_note(module)
        give_back(module)
        if isinstance(module, SphereLayer):
            was = type(module).__name__
            dropped = become_plain(module)
            put_note(module, f"back from {was}" + (f"; {', '.join(dropped)} dropped" if dropped else ""))
        elif note is not None and isinstance(module, nn.Identity):
            put_note(module, note.split(";")[0] + "; not brought back")
        else:
            put_note(module, None)
    return model


def _one_for_all(operator: str | AngleFunction, k: float | None, layers: Sequence[nn.Module]) -> AngleFunction:
    """The learned k of a whole network."""
    if operator != "learnable":
        raise ValueError(f'k_sharing must not be "network" unless operator is "learnable", got {operator!r}.')
    weights = [cast(Tensor, layer.weight) for layer in layers]
    devices = {str(weight.device) for weight in weights}
    if len(devices) > 1:
        raise ValueError(f'k_sharing must not be "network" for a model on several devices, got {sorted(devices)}.')
    start = DEFAULT_LEARNED_K if k is None else k
    return LearnableSigmoidAngle(k=start, device=weights[0].device, dtype=weights[0].dtype)


def _copy(model: M) -> M:
    try:
        return copy.deepcopy(model)
    except Exception as error:  # torch refuses tensors that are not leaves, and a module may hold anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
        raise ModelError(f"the model cannot be copied ({reason}): pass inplace=True.") from error


def _require_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {model!r} of type {type(model).__name__}.")
