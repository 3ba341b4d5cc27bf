"""Parameter groups and norm keeping for the optimizers of torch.

The output of a sphere layer depends on the directions of its kernels only, and so do losses that normalize the class
weights of an `AngularHead`. Weight decay of such scale-invariant weights regularizes nothing; it only changes the
effective learning rate. `param_groups` leaves it out.

The gradient of a scale-invariant kernel is orthogonal to it. A step of SGD therefore makes the kernel longer,
‖w'‖² = ‖w‖² + lr²‖∇‖², and because ‖∇‖ ∝ 1/‖w‖, the angle by which later steps rotate it decreases as lr/‖w‖². This is
an implicit decay of the learning rate. `keep_norms` removes it.

A module can declare `scale_invariant = True` or `False`, on its class or on the instance. Otherwise, sphere layers are
scale-invariant, and so is an `AngularHead` if no loss next to it in the model uses the norms of the class weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from spherenet._util.validation import require_number, require_one_of
from spherenet.angles import AngleFunction
from spherenet.layers import AngularHead, SphereLayer
from spherenet.losses import AngularLoss
from spherenet.magnitudes import Magnitude
from spherenet.ops.norms import working_dtype

__all__ = ["KeptNorms", "keep_norms", "param_groups"]

MODES = ("renormalize", "project")

_NEVER_DECAYED = (
    AngleFunction,  # k: decay of the parameter behind it would pull every k toward 0.7
    Magnitude,  # a radius, likewise
    _NormBase,  # BatchNorm, InstanceNorm and related layers
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.Embedding,  # decay would shrink rows that no batch has used
    nn.EmbeddingBag,
)


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the groups "decay" and "no_decay", which contain every trainable parameter of a model once.

    Decayed are weights with two dimensions or more: those of convolutions, linear layers, attention and recurrent
    layers, your own parameters, and an `AngularHead` under plain softmax. Not decayed are all parameters of sphere
    layers (weight, k, β, γ, radius, bias), of an `AngularHead` under a loss that normalizes its weights, of modules
    with `scale_invariant = True`, of angle and magnitude functions, normalization layers and embeddings, and all
    parameters with fewer than two dimensions (biases, scales). A parameter that several modules share is decayed only
    if each of them would decay it.

    The loss of a head is found in the model: the nearest module that contains both of them. If the loss is not part of
    the model, pass both together, e.g. `param_groups(nn.ModuleList([model, criterion]), 5e-4)`.

    Both groups always exist, even if they are empty, so that the saved state of an optimizer fits when parameters are
    frozen. Frozen parameters (`requires_grad=False`) are left out; freeze them before this call.

    Args:
        model: The model.
        weight_decay: Weight decay of the first group, at least 0.

    Returns:
        Two dictionaries with the keys name, params and weight_decay.

    Raises:
        TypeError: If `model` is not a module, or `weight_decay` not a number.
        ValueError: If `weight_decay` is out of range, or a parameter is lazy and has no shape yet.

    Example:
        >>> optimizer = torch.optim.Adam(sn.param_groups(model, 5e-4), lr=1e-3)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {model!r} of type {type(model).__name__}.")
    weight_decay = require_number("weight_decay", weight_decay)
    if weight_decay < 0:
        raise ValueError(f"weight_decay must be at least 0, got {weight_decay!r}.")
    invariant = _scale_invariance(model)
    decayed: dict[nn.Parameter, bool] = {}

    def collect(module: nn.Module, prefix: str, exempt: bool) -> None:
        # A module exempts its children: a learned k belongs to the angle of a layer, a parametrized weight to a list.
        exempt = exempt or invariant[module] or isinstance(module, _NEVER_DECAYED)
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if parameter.requires_grad:
                _require_initialized(name, parameter)
                decayed[parameter] = not exempt and parameter.dim() >= 2 and decayed.get(parameter, True)
        for name, child in module.named_children():
            collect(child, f"{prefix}.{name}" if prefix else name, exempt)

    collect(model, "", False)
    return [
        {"name": "decay", "params": [p for p, yes in decayed.items() if yes], "weight_decay": weight_decay},
        {"name": "no_decay", "params": [p for p, yes in decayed.items() if not yes], "weight_decay": 0.0},
    ]


def keep_norms(optimizer: Optimizer, model: nn.Module, mode: str = "renormalize") -> KeptNorms:
    """Keep each scale-invariant kernel of a model at its current norm r in every step of the optimizer.

    Let Δ be the update of the optimizer, ŵ = w/‖w‖, and Δ_⊥ = Δ − ŵ(ŵᵀΔ) its component along the sphere.

    - "renormalize": w ← r·(w + Δ)/‖w + Δ‖. The kernel rotates by about ‖Δ_⊥‖/r per step. With SGD, whose gradient is
      proportional to 1/r, this is proportional to lr/r²; with Adam, to lr/r.
    - "project" (Eq. 20): w ← r·(ŵ + Δ_⊥)/‖ŵ + Δ_⊥‖. The radial component, which momentum, adaptive step sizes and
      weight decay add, has no effect, and the update is relative to the norm: the kernel rotates by arctan ‖Δ_⊥‖
      whatever r is. With Adam this is about lr·√n for kernels with n entries, e.g. 1.4° for lr = 1e-3 and n = 576.

    Without `keep_norms`, norms grow and rotations decrease during training. With it, the learning rate schedule alone
    decides how fast they decrease: a run that relied on growing norms needs a schedule or a smaller learning rate.
    Neither mode changes the function that the model computes, or the state of the optimizer.

    Call it after the weights are initialized or loaded and the optimizer has all of its parameter groups. It keeps
    those scale-invariant weights that the optimizer updates; see `param_groups` for which weights these are. A weight
    that is tied to a module that is not scale-invariant, such as an embedding, is left alone, because its norm matters
    there. A model without any is left alone, so that a plain CNN trains in the same loop. All processes of a DDP run
    compute the same update. Weights of FSDP2 (DTensor) must be sharded along their first dimension, which is its
    default.

    Args:
        optimizer: The optimizer that updates the model.
        model: The model.
        mode: "renormalize" or "project".

    Returns:
        A handle. `remove()` or leaving a `with` block ends it; `state_dict()` makes resuming exact.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If the mode is unknown, the optimizer updates none of the model's trainable scale-invariant weights,
            or one of them is lazy, parametrized or sharded along another dimension.

    Example:
        >>> kept = sn.keep_norms(optimizer, model, mode="project")
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch optimizer, got {type(optimizer).__name__}.")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {model!r} of type {type(model).__name__}.")
    require_one_of("mode", mode, MODES)
    weights = {name: kernels for name, kernels in _invariant_kernels(model).items() if kernels.weight.requires_grad}
    updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    kept = {name: kernels for name, kernels in weights.items() if id(kernels.weight) in updated}
    if weights and not kept:
        raise ValueError(
            f"optimizer must update the scale-invariant weights of the model, but has none of the {len(weights)}, of "
            f"which the first is {next(iter(weights))!r}; was it created for another model?"
        )
    return KeptNorms(optimizer, kept, mode)


@dataclass(frozen=True)
class _Kernels:
    """Weight of a scale-invariant module and the layout of its kernels.

    The kernels lie along dimension 0, or, in a transposed convolution with `groups` groups, along dimension 1 within
    each group of dimension 0.
    """

    weight: nn.Parameter
    groups: int | None = None

    def local(self) -> Tensor:
        """Return the values that this process owns, with kernels along dimension 0, or along 0 and 2 if transposed."""
        values: Any = self.weight.detach()
        if _is_dtensor(values):
            values = values.to_local()
        local: Tensor = values if self.groups is None else values.unflatten(0, (self.groups, -1))
        return local

    def norms(self, values: Tensor) -> Tensor:
        """Return ‖w‖ of each kernel of `values` (see `local`) in float32 or float64, with dimensions of size 1."""
        first = 1 if self.groups is None else 3
        dims = (*(() if self.groups is None else (1,)), *range(first, values.dim()))
        norms: Tensor = torch.linalg.vector_norm(values, dim=dims, keepdim=True, dtype=working_dtype(values.dtype))
        return norms

    def gather(self, norms: Tensor) -> Tensor:
        """Return the norms of all processes, [kernels]."""
        weight: Any = self.weight
        if not _is_dtensor(weight):
            return norms.flatten().clone()
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            norms.flatten(), weight.device_mesh, weight.placements, shape=weight.shape[:1], stride=(1,)
        ).full_tensor()

    def scatter(self, norms: Tensor, like: Tensor) -> Tensor:
        """Return the norms of this process from those of all processes, with the shape of `like`."""
        weight: Any = self.weight
        norms = norms.detach().to(like.device, like.dtype)
        if _is_dtensor(weight):
            from torch.distributed.tensor import distribute_tensor

            norms = distribute_tensor(norms, weight.device_mesh, weight.placements).to_local()
        return norms.reshape(like.shape).clone()


class KeptNorms:
    """Handle of `keep_norms`: it holds the norms and ends the keeping.

    A norm is ‖w‖ of one kernel, without eps. After a step the kernel has this norm again up to the rounding of its
    dtype. Rounding errors do not accumulate, because each step compares with the stored norm. A kernel that was zero at
    the start, or is zero or not finite before or after a step, has no direction and is left as the optimizer set it.

    A new handle on loaded weights measures their norms, which differ from the original ones by rounding. Save
    `state_dict()` with the model and load it, and a resumed run is bit-identical to an uninterrupted one.

    Args:
        optimizer: The optimizer.
        weights: Weights to keep by name. Their norms are measured now.
        mode: "renormalize" or "project".
    """

    def __init__(self, optimizer: Optimizer, weights: Mapping[str, _Kernels], mode: str = "renormalize") -> None:
        self.mode = mode
        self._weights = dict(weights)
        self._norms = {name: kernels.norms(kernels.local()) for name, kernels in self._weights.items()}
        self._before: dict[str, Tensor] = {}
        self._handles = [optimizer.register_step_post_hook(self._after_step)]
        if mode == "project":
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))

    @torch.no_grad()
    def rescale(self) -> None:
        """Scale every kernel to its norm now, as each step in the mode "renormalize" does."""
        values = {name: kernels.local() for name, kernels in self._weights.items()}
        by_device: dict[torch.device, list[str]] = {}
        for name, value in values.items():
            by_device.setdefault(value.device, []).append(name)
        for device, names in by_device.items():
            # All kernels of a device in one vector: the arithmetic runs once instead of once per layer.
            now = [self._weights[name].norms(values[name]) for name in names]
            factor = torch.cat([self._norms[name].to(device).flatten() for name in names])
            factor /= torch.cat([norms.flatten() for norms in now])
            factor.masked_fill_(~(factor.isfinite() & (factor > 0)), 1)
            factors = torch.split(factor, [norms.numel() for norms in now])
            shaped = [part.view(norms.shape) for part, norms in zip(factors, now, strict=True)]
            torch._foreach_mul_([values[name] for name in names], shaped)

    def remove(self) -> None:
        """Stop keeping the norms; calling it again does nothing."""
        for handle in self._handles:
            handle.remove()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the kept norms by the name of the weight, each [kernels]. All processes of FSDP2 must call it."""
        return {name: kernels.gather(self._norms[name]) for name, kernels in self._weights.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the norms of a `state_dict`.

        Raises:
            ValueError: If they belong to other weights.
        """
        expected = {name: [_num_kernels(kernels)] for name, kernels in self._weights.items()}
        actual = {name: list(norms.shape) for name, norms in state.items()}
        for name in {**expected, **actual}:
            if expected.get(name) != actual.get(name):
                raise ValueError(
                    f"state must hold the norms of the kept weights, but {name!r} has shape "
                    f"{actual.get(name, 'none')} there and {expected.get(name, 'none')} here."
                )
        self._norms = {name: self._weights[name].scatter(state[name], norms) for name, norms in self._norms.items()}

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._before = {name: kernels.local().clone() for name, kernels in self._weights.items()}

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.mode == "project":
            self._project()
        else:
            self.rescale()

    @torch.no_grad()
    def _project(self) -> None:
        """Replace the update of the last step by the projected one (Eq. 20)."""
        for name, before in self._before.items():
            kernels, values, kept = self._weights[name], self._weights[name].local(), self._norms[name]
            start = before.to(kept.dtype)
            direction = start / kernels.norms(start)
            update = values.to(kept.dtype) - start
            dims = [dim for dim, size in enumerate(kept.shape) if size == 1]
            radial = (direction * update).sum(dims, keepdim=True)
            direction = torch.addcmul(direction + update, direction, radial, value=-1)
            kept = kept.to(values.device)
            projected = direction * (kept / kernels.norms(direction))
            usable = projected.isfinite().all(dims, keepdim=True) & (kept > 0)
            values.copy_(torch.where(usable, projected, values.to(projected.dtype)))
        self._before = {}

    def __enter__(self) -> KeptNorms:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        count = sum(map(_num_kernels, self._weights.values()))
        return f"KeptNorms({count} kernels of {len(self._weights)} weights, mode={self.mode!r})"


def _scale_invariance(model: nn.Module) -> dict[nn.Module, bool]:
    """Return for each module of a model whether its output depends on the directions of its kernels only."""
    invariant: dict[nn.Module, bool] = {}

    def collect(module: nn.Module, normalizing: bool) -> None:
        losses = [child for child in module.modules() if isinstance(child, AngularLoss)]
        if losses:
            normalizing = not any(loss.uses_weight_norm for loss in losses)
        declared: object = getattr(module, "scale_invariant", None)
        if declared is None:
            declared = isinstance(module, SphereLayer) or (isinstance(module, AngularHead) and normalizing)
        invariant[module] = declared is True and invariant.get(module, True)
        for child in module.children():
            collect(child, normalizing)

    collect(model, False)
    return invariant


def _invariant_kernels(model: nn.Module) -> dict[str, _Kernels]:
    """Return the scale-invariant weights of a model by name, shared ones once, without those other modules use, too.

    A weight that a layer and a transposed layer share has other kernels in each of them and is left out as well.

    Raises ValueError for a weight that is lazy, parametrized, or sharded along a dimension other than the first one.
    """
    invariant = _scale_invariance(model)
    kernels: dict[str, _Kernels] = {}
    others = (module for module, is_invariant in invariant.items() if not is_invariant)
    owners = {id(parameter) for module in others for parameter in module._parameters.values()}  # their norms matter
    layouts: dict[int, set[int | None]] = {}
    for module in model.modules():
        layouts.setdefault(id(module._parameters.get("weight")), set()).add(_transposed_groups(module))
    for prefix, module in model.named_modules():
        if not invariant[module]:
            continue
        name = f"{prefix}.weight" if prefix else "weight"
        weight: Any = module._parameters.get("weight")
        if weight is None and getattr(module, "weight", None) is not None:
            raise ValueError(f"model must own its scale-invariant weights, but a parametrization computes {name}.")
        if weight is None or id(weight) in owners or len(layouts[id(weight)]) > 1:
            continue
        _require_initialized(name, weight)
        owners.add(id(weight))
        if weight.dim() < 2:  # a vector of scales has no kernels
            continue
        groups = _transposed_groups(module)
        if _is_dtensor(weight):
            sharded = [placement for placement in weight.placements if not placement.is_replicate()]
            if any(not placement.is_shard(0) for placement in sharded) or (sharded and groups is not None):
                raise ValueError(
                    f"model must have its scale-invariant weights sharded by kernels, but {name} has the placements "
                    f"{tuple(weight.placements)}."
                )
        kernels[name] = _Kernels(weight, groups)
    return kernels


def _transposed_groups(module: nn.Module) -> int | None:
    """Return the groups of a transposed convolution, whose kernels lie along the second dimension; None for others."""
    return int(getattr(module, "groups", 1)) if getattr(module, "transposed", False) else None


def _num_kernels(kernels: _Kernels) -> int:
    shape = kernels.weight.shape
    return int(shape[0]) if kernels.groups is None else kernels.groups * int(shape[1])


def _is_dtensor(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, without importing torch.distributed."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def _require_initialized(name: str, parameter: nn.Parameter) -> None:
    """Raise ValueError if a parameter of a lazy module has no shape yet."""
    if isinstance(parameter, UninitializedParameter):
        raise ValueError(
            f"model must be initialized, but {name} is lazy and has no shape yet: run one batch through it first."
        )
