"""Hyperball: the norm of each weight and of its update are fixed, and a step rotates the weight by the learning rate.

Let R = ‖w‖ at the start, u the update of any other optimizer and t its component orthogonal to w. A step is

    w ← R·(cos(lr)·w/R − sin(lr)·t/‖t‖)                                                             docs/choosing.md

so that the weight moves on the sphere of radius R by the angle lr, along the great circle in the direction of −t. The
optimizer inside only chooses the direction. "Hyperball" (arXiv 2606.16899) fixes both norms with the retraction
R·normalize(w − lr·R·u/‖u‖); both agree to first order in lr if u has no component along w.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from spherenet._util.validation import require_number, require_one_of
from spherenet.errors import InvalidArgument
from spherenet.ops.norms import working_dtype
from spherenet.optim.groups import ALGORITHMS
from spherenet.optim.kernels import is_dtensor
from spherenet.optim.muon import require_matrices
from spherenet.optim.step import SteppingOptimizer, as_list

__all__ = ["Hyperball"]

SCOPES = ("weight", "filter")
RADIUS = "radius"


class Hyperball(SteppingOptimizer):
    """Rotate each weight by the angle `lr` per step, in the direction that another optimizer chooses.

    **Learning rate.** It is the angle in radians by which each weight (or each filter) rotates per step: 0.01 is 0.6°.
    It has the same meaning in every layer, for every optimizer inside and for every scale of the loss. Without a
    schedule the weights never come to rest, so let it fall to 0.

    The norms are those of the weights at the first step. Weight decay has no effect, and neither has the learning rate
    of the optimizer inside. Use it only for weights whose norm does not matter, such as those of sphere layers or
    before a normalization. All processes of DDP make the same step; weights of FSDP2 must be sharded along their first
    dimension, which is its default.

    Args:
        params: Parameters with two dimensions or more, or groups of them.
        inner: The optimizer that chooses the direction: "sgd", "adam", "adamw", "muon" or an optimizer class.
        lr: Angle per step in radians.
        scope: What has a fixed norm and rotates by the angle: each "weight" as a whole, or each "filter" of it.
        **options: Options of the optimizer inside, e.g. `momentum=0.9`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, or a parameter has fewer than two dimensions or the norm 0.

    Example:
        >>> optimizer = sn.optim.Hyperball(model.features.parameters(), "adam", lr=0.01)
    """

    def __init__(
        self,
        params: Iterable[Any],
        inner: str | type[Optimizer] = "adam",
        lr: float = 0.01,
        *,
        scope: str = "weight",
        **options: Any,
    ) -> None:
        if not (isinstance(inner, type) and issubclass(inner, Optimizer)):
            inner = ALGORITHMS[require_one_of("inner", inner, ALGORITHMS)]
        groups = as_list("params", params)
        groups = [dict(group) if isinstance(group, dict) else group for group in groups]
        self._inner = inner([dict(group) if isinstance(group, dict) else group for group in groups], **options)
        super().__init__(groups, {**self._inner.defaults, "lr": lr, "scope": scope})
        self._inner.state = self.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, whose options are checked."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            if require_number("lr", group["lr"]) < 0:
                raise InvalidArgument("lr", f"must be at least 0, got {group['lr']!r}.")
            require_one_of("scope", group["scope"], SCOPES)
            require_matrices("Hyperball", group)
            if group.get("norm") is not None:
                raise InvalidArgument(
                    "norm", f"must be None inside Hyperball, which keeps norms itself, got {group['norm']!r}."
                )
            names = group.get("param_names", [None] * len(group["params"]))
            for name, weight in zip(names, group["params"], strict=True):
                if weight.device.type == "meta" or weight.numel() == 0:
                    continue
                largest = _local(weight).detach().abs().amax() if _local(weight).numel() else torch.ones(())
                if not 0 < float(largest) < math.inf:
                    raise InvalidArgument(
                        "params" if name is None else f"params[{name!r}]",
                        "must be finite and not zero for Hyperball, which keeps their norm, got a weight of shape "
                        f"{list(weight.shape)} whose largest entry is {float(largest):g}.",
                    )
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a loaded optimizer."""
        super().__setstate__(state)
        self._inner.state = self.state

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs, the optimizer inside included."""
        return {**super().__getstate__(), "_inner": self._inner}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict; norms keep their precision, which torch reduces to that of the weights."""
        super().load_state_dict(state_dict)
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for index, weight in zip(indices, weights, strict=True):
            radius = state_dict["state"].get(index, {}).get(RADIUS)
            if radius is not None:
                self.state[weight][RADIUS] = radius.detach().to(weight.device, copy=True)

    def _step(self) -> None:
        """Make one step."""
        # The optimizer inside gets weights of 0 and a learning rate of 1: what it writes is its update, unrounded.
        self._inner.param_groups = [{**group, "lr": 1.0} for group in self.param_groups]
        weights = [
            (weight, weight.detach().clone(), group["lr"], group["scope"], self.state[weight].pop(RADIUS, None))
            for group in self.param_groups
            for weight in group["params"]
            if weight.grad is not None
        ]
        for weight, *_ in weights:
            weight.zero_()
        try:
            self._inner.step()
        except BaseException:
            for weight, before, *_ in weights:
                weight.copy_(before)
            raise
        for weight, before, angle, scope, radius in weights:
            if radius is None:
                radius = _norms(before, scope)
            weight.copy_(_rotated(before, weight, angle, scope, radius))
            self.state[weight][RADIUS] = radius


def _local(weight: Any) -> Tensor:
    """Return the values that this process owns."""
    values: Tensor = weight.to_local() if is_dtensor(weight) else weight
    return values


def _sums(values: Tensor, like: Any, scope: str) -> Tensor:
    """Return the sums of products over each weight or filter, with dimensions of size 1, over all processes."""
    return _over_processes(values.sum(_dims(values, scope), keepdim=True), like, scope, "sum")


def _largest(values: Tensor, like: Any, scope: str) -> Tensor:
    """Return the largest magnitude of each weight or filter, at least the smallest normal number."""
    dims = _dims(values, scope)
    largest = values.abs().amax(dims, keepdim=True) if values.numel() else values.new_zeros([1] * values.dim())
    return _over_processes(largest, like, scope, "max").clamp(min=torch.finfo(values.dtype).tiny)


def _dims(values: Tensor, scope: str) -> tuple[int, ...]:
    """Return the dimensions of a weight or of each of its filters."""
    return tuple(range(int(scope == "filter"), values.dim()))


def _over_processes(values: Tensor, like: Any, scope: str, reduction: str) -> Tensor:
    """Return numbers of the parts of a weight, reduced to those of the whole weight; filters are never divided."""
    if scope == "filter" or not is_dtensor(like):
        return values
    from torch.distributed.tensor import DTensor, Partial, Replicate

    placements = [Partial(reduction) if placement.is_shard() else Replicate() for placement in like.placements]
    return DTensor.from_local(values, like.device_mesh, placements).full_tensor()


def _norms(weight: Any, scope: str) -> Tensor:
    """Return the norm of a weight [1], or of each of its filters [filters], sharded like the weight."""
    values = _local(weight).to(working_dtype(weight.dtype))
    norms = _sums(values.square(), weight, scope).sqrt().flatten()
    if scope == "weight" or not is_dtensor(weight):
        return norms
    from torch.distributed.tensor import DTensor

    whole: Tensor = DTensor.from_local(
        norms, weight.device_mesh, weight.placements, shape=weight.shape[:1], stride=(1,)
    )
    return whole


def _rotated(before: Any, update: Any, angle: float, scope: str, radius: Tensor) -> Tensor:
    """Return a weight that is rotated by an angle along an update; what has no direction stays as it was."""
    start = _local(before).to(working_dtype(before.dtype))
    step = _local(update).to(start.dtype)
    kept = _local(radius).to(start.device, start.dtype).reshape(-1, *[1] * (start.dim() - 1))

    smallest = torch.finfo(start.dtype).tiny

    def norms(values: Tensor) -> Tensor:
        return _sums(values.square(), before, scope).sqrt().clamp(min=smallest)

    direction = start / norms(start)
    step = step / _largest(step, before, scope)  # squares of tiny or huge updates would underflow or overflow
    step = step / norms(step)
    tangent = step - direction * _sums(direction * step, before, scope)
    length = norms(tangent)
    rotated = math.cos(angle) * direction + math.sin(angle) / length * tangent
    rotated = rotated * (kept / norms(rotated))
    # An update of 0, or along the weight itself up to rounding, has no direction. NaN propagates.
    result = torch.where(length < 16 * torch.finfo(start.dtype).eps, start, rotated).to(before.dtype)
    if not is_dtensor(before):
        return result
    from torch.distributed.tensor import DTensor

    whole: Tensor = DTensor.from_local(
        result, before.device_mesh, before.placements, shape=before.shape, stride=before.stride()
    )
    return whole
