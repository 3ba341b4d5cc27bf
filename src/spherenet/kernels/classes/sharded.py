"""Heads whose classes are divided among processes: the classes of a process, its output, and exchanges of rows.

Each process owns the weights of some classes and has the features of all processes. They exchange features, labels and
a few numbers per row, so the amount does not depend on the number of classes.

Gradients follow the convention of DDP and FSDP, which average over processes: the gradient of the features is
multiplied by the number of processes, that of the class weights is not, because each process owns its weights alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spherenet.ops.angular import AngularOutput, angular_cosine, finite, nearest_direction
from spherenet.ops.norms import without_autocast

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ClassShard", "ShardedOutput", "gather_rows", "own_rows", "sum_over_processes", "total"]


@dataclass(frozen=True)
class ClassShard:
    """The classes that this process owns, and the processes that own the others.

    Attributes:
        mesh: Mesh of the processes, with one dimension.
        first: Index of the first own class.
        num_classes: Number of classes of all processes.
    """

    mesh: DeviceMesh
    first: int
    num_classes: int

    @property
    def group(self) -> ProcessGroup:
        """Process group of the mesh."""
        return self.mesh.get_group()

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """Index of this process in the group."""
        return self.group.rank()

    def reduce(self, values: Tensor, operation: str = "SUM") -> Tensor:
        """Return the SUM, MAX or MIN of a tensor over the processes, without a gradient."""
        import torch.distributed as dist

        reduced = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(reduced, getattr(dist.ReduceOp, operation), self.group)
        return reduced

    def gather(self, values: Tensor) -> Tensor:
        """Return the tensors of all processes, which have the same shape, as [world, *shape], without a gradient."""
        gathered = values.new_empty(self.world, *values.shape)
        gather = _collective("all_gather_single", "all_gather_into_tensor")
        gather(gathered.flatten(0, 1), values.contiguous(), group=self.group)
        return gathered

    def scatter_sum(self, values: Tensor) -> Tensor:
        """Return the sum over the processes of values[rank], for values [world, *shape], without a gradient."""
        own = torch.empty_like(values[0], memory_format=torch.contiguous_format)
        scatter = _collective("reduce_scatter_single", "reduce_scatter_tensor")
        scatter(own, values.contiguous().flatten(0, 1), group=self.group)
        return own

    def raise_together(self, error: Exception | None) -> None:
        """Raise the error of the first process that has one, in all processes. All of them must call it."""
        import torch.distributed as dist

        errors: list[Any] = [None] * self.world
        dist.all_gather_object(errors, error, group=self.group)
        first = next((error for error in errors if error is not None), None)
        if first is not None:
            raise first


def _collective(name: str, earlier_name: str) -> Any:
    """Return a function of torch.distributed that had another name before torch 2.13."""
    import torch.distributed as dist

    return getattr(dist, name, None) or getattr(dist, earlier_name)


@dataclass(eq=False)
class ShardedOutput:
    """Output of a sharded head: what `AngularOutput` is computed from, for all rows and the classes of this process.

    Attributes:
        unit_features: Features of all processes divided by their norms [N, in].
        feature_norm: Norms of the features [N].
        weight: Weights of the own classes [classes, in], or [classes, directions, in].
        bias: Bias of the own classes [classes], or None.
        eps: Number added under the square root of norms.
        shard: The own classes.
        rows: Number of rows of each process; their sum is N.
        leading: Shape of the own features without the last dimension.
        sample_rate: Fraction of the own classes that a loss uses, 1 for all.
    """

    unit_features: Tensor
    feature_norm: Tensor
    weight: Tensor
    bias: Tensor | None
    eps: float
    shard: ClassShard
    rows: tuple[int, ...]
    leading: tuple[int, ...]
    sample_rate: float = 1.0

    @property
    def own(self) -> slice:
        """Rows of this process among all rows."""
        first = sum(self.rows[: self.shard.rank])
        return slice(first, first + self.rows[self.shard.rank])

    def angles(self) -> AngularOutput:
        """Return the angles of all rows and the own classes, [N, classes]."""
        with without_autocast(self.weight):
            cosine, length = angular_cosine(self.unit_features, self.weight.flatten(0, -2), self.eps)
        if self.weight.dim() == 3:
            cosine, length = nearest_direction(cosine, self.weight.shape[1])
        return AngularOutput(cosine, self.feature_norm, finite(length, self.eps), self.bias)


def sum_over_processes(values: Tensor) -> Tensor:
    """Return the sum of a tensor over all processes, the tensor itself if there is one process, without a gradient."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return values
    summed = values.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(summed)
    return summed


def gather_rows(own: Tensor, rows: Sequence[int], shard: ClassShard) -> Tensor:
    """Return the rows of all processes; the gradient is summed over processes and multiplied by their number."""
    gathered: Tensor = _GatherRows.apply(own, tuple(rows), shard)  # type: ignore[no-untyped-call]
    return gathered


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, rows: tuple[int, ...], shard: ClassShard) -> Tensor:
        ctx.rows, ctx.shard = rows, shard
        longest = max(rows)
        padded = own if own.shape[0] == longest else own.new_zeros(longest, *own.shape[1:])
        if padded is not own:
            padded[: own.shape[0]] = own
        gathered = shard.gather(padded)
        if min(rows) == longest:
            return gathered.flatten(0, 1)
        return torch.cat([values[:count] for values, count in zip(gathered, rows, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rows, shard, longest = ctx.rows, ctx.shard, max(ctx.rows)
        if min(rows) == longest:
            padded = torch.unflatten(grad, 0, (len(rows), longest))
        else:
            padded = grad.new_zeros(len(rows), longest, *grad.shape[1:])
            for target, values in zip(padded, torch.split(grad, rows), strict=True):
                target[: len(values)] = values
        return shard.scatter_sum(padded)[: rows[shard.rank]] * shard.world, None, None


def total(values: Tensor, shard: ClassShard) -> Tensor:
    """Return the sum of a tensor over the processes. Each process computes the same from it, so gradients pass."""
    summed: Tensor = _Total.apply(values, shard)  # type: ignore[no-untyped-call]
    return summed


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, shard: ClassShard) -> Tensor:
        return shard.reduce(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad, None


def own_rows(values: Tensor, output: ShardedOutput) -> Tensor:
    """Return the own rows of values [N] that all processes have, if each process computes its own loss from them."""
    own: Tensor = _OwnRows.apply(values, output.rows, output.own, output.shard)  # type: ignore[no-untyped-call]
    return own


class _OwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, rows: tuple[int, ...], own: slice, shard: ClassShard) -> Tensor:
        ctx.rows, ctx.shard = rows, shard
        return values[own].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # The loss of the run is the mean of those of the processes.
        return gather_rows(grad, ctx.rows, ctx.shard) / ctx.shard.world, None, None, None
