"""Which weights of a model are scale-invariant, and the layout of their kernels.

A module can declare `scale_invariant = True` or `False`, on its class or on the instance. Otherwise, sphere layers are
scale-invariant, and so is an `AngularHead` if no loss next to it in the model uses the norms of the class weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from spherenet._util.validation import require_memory
from spherenet.errors import InvalidArgument
from spherenet.layers import AngularHead, SphereLayer
from spherenet.losses import AngularLoss
from spherenet.ops.norms import working_dtype

__all__ = ["Kernels", "invariant_kernels", "is_dtensor", "num_kernels", "require_initialized", "scale_invariance"]


@dataclass(frozen=True)
class Kernels:
    """Weight of a scale-invariant module and the layout of its kernels.

    The kernels lie along dimension 0, or, in a transposed convolution with `groups` groups, along dimension 1 within
    each group of dimension 0.
    """

    weight: nn.Parameter
    groups: int | None = None

    def local(self) -> Tensor:
        """Return the values that this process owns, with kernels along dimension 0, or along 0 and 2 if transposed."""
        require_memory(self.weight)
        values: Any = self.weight.detach()
        if is_dtensor(values):
            values = values.to_local()
        local: Tensor = values if self.groups is None else values.unflatten(0, (self.groups, -1))
        return local

    def norms(self, values: Tensor) -> Tensor:
        """Return ‖w‖ of each kernel of `values` (see `local`) in float32 or float64, with dimensions of size 1."""
        first = 1 if self.groups is None else 3
        dims = (*(() if self.groups is None else (1,)), *range(first, values.dim()))
        norms: Tensor = torch.linalg.vector_norm(values, dim=dims, keepdim=True, dtype=working_dtype(values.dtype))
        return norms

    def norms_of(self, weight: Tensor) -> Tensor:
        """Return ‖w‖ of each kernel of a whole weight, in a shape that multiplies the weight."""
        if self.groups is None:
            return self.norms(weight)
        values: Tensor = torch.unflatten(weight, 0, (self.groups, -1))
        return self.norms(values).expand(-1, values.shape[1], *[-1] * (values.dim() - 2)).flatten(0, 1)

    def gather(self, norms: Tensor) -> Tensor:
        """Return the norms of all processes, [kernels]."""
        weight: Any = self.weight
        if not is_dtensor(weight):
            return norms.flatten().clone()
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            norms.flatten(), weight.device_mesh, weight.placements, shape=weight.shape[:1], stride=(1,)
        ).full_tensor()

    def scatter(self, norms: Tensor, like: Tensor) -> Tensor:
        """Return the norms of this process from those of all processes, with the shape of `like`."""
        weight: Any = self.weight
        norms = norms.detach().to(like.device, like.dtype)
        if is_dtensor(weight):
            from torch.distributed.tensor import distribute_tensor

            norms = distribute_tensor(norms, weight.device_mesh, weight.placements).to_local()
        return norms.reshape(like.shape).clone()


def scale_invariance(model: nn.Module) -> dict[nn.Module, bool]:
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


def invariant_kernels(model: nn.Module) -> dict[str, Kernels]:
    """Return the scale-invariant weights of a model by name, shared ones once, without those other modules use, too.

    A weight that a layer and a transposed layer share has other kernels in each of them and is left out as well.

    Raises ValueError for a weight that is lazy, parametrized, or sharded along a dimension other than the first one.
    """
    invariant = scale_invariance(model)
    kernels: dict[str, Kernels] = {}
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
            raise InvalidArgument(
                "model", f"must own its scale-invariant weights, but a parametrization computes {name}."
            )
        if weight is None or id(weight) in owners or len(layouts[id(weight)]) > 1:
            continue
        require_initialized(name, weight)
        owners.add(id(weight))
        if weight.dim() < 2:  # a vector of scales has no kernels
            continue
        groups = _transposed_groups(module)
        if is_dtensor(weight):
            sharded = [placement for placement in weight.placements if not placement.is_replicate()]
            if any(not placement.is_shard(0) for placement in sharded) or (sharded and groups is not None):
                raise InvalidArgument(
                    "model",
                    f"must have its scale-invariant weights sharded by kernels, but {name} has the placements "
                    f"{tuple(weight.placements)}.",
                )
        kernels[name] = Kernels(weight, groups)
    return kernels


def _transposed_groups(module: nn.Module) -> int | None:
    """Return the groups of a transposed convolution, whose kernels lie along the second dimension; None for others."""
    return int(getattr(module, "groups", 1)) if getattr(module, "transposed", False) else None


def num_kernels(kernels: Kernels) -> int:
    """Return the number of kernels of a weight, over all processes."""
    shape = kernels.weight.shape
    return int(shape[0]) if kernels.groups is None else kernels.groups * int(shape[1])


def is_dtensor(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, without importing torch.distributed."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def require_initialized(name: str, parameter: nn.Parameter) -> None:
    """Raise ValueError if a parameter of a lazy module has no shape yet."""
    if isinstance(parameter, UninitializedParameter):
        raise InvalidArgument(
            "model", f"must be initialized, but {name} is lazy and has no shape yet: run one batch through it first."
        )
