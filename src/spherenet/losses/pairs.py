"""What losses on pairs of features share: unit features, blocks of rows, and the features of other processes.

A batch of 32,768 features has 10⁹ similarities: 4 GB in float32, and several times that for their gradients. Here a
block of rows is compared with all columns at a time, and backward computes the block again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spherenet._util.validation import OptionCheck, require_floating, require_integer, require_positive
from spherenet.angles.elementary import gradients_of
from spherenet.errors import InvalidArgument, InvalidArgumentType
from spherenet.ops.angular import unit_features
from spherenet.ops.norms import without_autocast

__all__ = ["PAIR_EPS", "PairLoss", "checked_features", "checked_labels", "gather", "in_blocks", "unit", "unit_views"]

PAIR_EPS = 1e-8
"""Number under the square root of the norms. The gradient of a zero feature is 10⁴ times that of its direction."""

BLOCK_ELEMENTS = {"cpu": 1 << 21}
"""Similarities of a block by device: 8 MB in float32 on a CPU."""

BLOCK_ELEMENTS_ELSEWHERE = 1 << 25
"""Similarities of a block on other devices: few, large launches."""


class PairLoss(OptionCheck, nn.Module):
    """Base class of losses that compare features with each other, not with class weights.

    Args:
        eps: Number > 0 under the square root of the norms of the features.
        block_size: Number of rows whose similarities are computed at a time; None chooses it from the batch size.
        gather: Whether to compare with the features of all processes if torch.distributed is initialized.
    """

    def __init__(self, *, eps: float = PAIR_EPS, block_size: int | None = None, gather: bool = False) -> None:
        super().__init__()
        self.eps = require_positive("eps", eps)
        self.block_size = None if block_size is None else require_integer("block_size", block_size, minimum=1)
        if not isinstance(gather, bool):
            raise InvalidArgumentType("gather", f"must be True or False, got {gather!r}.")
        self.gather = gather

    def _mean(self, rows: Tensor, counted: Tensor) -> Tensor:
        """Return the mean of the rows that count, over all processes; 0 without any.

        Backward of each process starts from its rows, times the number of processes, because DDP averages gradients.
        """
        total, count = rows.sum(), counted.sum().to(rows.dtype)
        if not self.gather or process_count() == 1:
            return total / count.clamp_min(1)
        import torch.distributed as dist

        sums = torch.stack([total.detach(), count])
        dist.all_reduce(sums)
        count = sums[1].clamp_min(1)
        own = total * process_count() / count
        return own + (sums[0] / count - own).detach()

    def _gathered(self, own: Tensor) -> tuple[Tensor, int]:
        """Return the rows to compare with and the position of the first own row among them."""
        return gather(own) if self.gather else (own, 0)

    def extra_repr(self) -> str:
        """Return the options that differ from their defaults."""
        defaults = {"eps": PAIR_EPS, "block_size": None, "gather": False}
        return ", ".join(
            f"{name}={getattr(self, name)!r}" for name in defaults if getattr(self, name) != defaults[name]
        )


def checked_features(name: str, features: Tensor, like: Tensor | None = None) -> Tensor:
    """Return features [N, D]; raise an error for another shape or dtype."""
    require_floating(name, features)
    if features.dim() != 2:
        raise InvalidArgument(name, f"must have the shape [samples, features], got {list(features.shape)}.")
    if like is not None and features.shape[1] != like.shape[1]:
        raise InvalidArgument(name, f"must have {like.shape[1]} features, got {features.shape[1]}.")
    return features


def checked_labels(name: str, labels: Tensor, features: Tensor) -> Tensor:
    """Return labels [N] on the device of the features; raise an error for another shape or dtype."""
    if not isinstance(labels, Tensor):
        raise InvalidArgumentType(name, f"must be a tensor, got {type(labels).__name__}.")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise InvalidArgumentType(name, f"must be a tensor of integers, got {labels.dtype}.")
    if labels.shape != features.shape[:1]:
        raise InvalidArgument(name, f"must have the shape {[len(features)]}, got {list(labels.shape)}.")
    return labels.to(features.device)


def unit(features: Tensor, eps: float) -> Tensor:
    """Return x/‖x‖ in float32 or float64; 0 for a zero feature, and for one whose squares overflow."""
    with without_autocast(features):
        return unit_features(features, eps)[0]


def unit_views(first: Tensor, second: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the unit features of two views of the same samples."""
    first = checked_features("first", first)
    second = checked_features("second", second, first)
    if len(first) != len(second):
        raise InvalidArgument("second", f"must have {len(first)} samples as first, got {len(second)}.")
    x, y = unit(first, eps), unit(second, eps)
    if x.dtype != y.dtype:
        raise InvalidArgumentType("second", f"must have the dtype of first, {first.dtype}, got {second.dtype}.")
    return x, y


def in_blocks(
    function: Callable[..., tuple[Tensor, ...]],
    rows: Sequence[Tensor],
    columns: Sequence[Tensor],
    block_size: int | None = None,
) -> tuple[Tensor, ...]:
    """Return function(*rows, *columns), computed for blocks of rows, forward and backward.

    Second derivatives are computed without blocks. torch.compile sees the blocks one after the other and plans memory
    itself.

    Args:
        function: Function that returns tensors with one entry per row, which depends on this row and all columns.
            Tensors without a gradient must be of integers or booleans.
        rows: Tensors with one entry per row.
        columns: Tensors that every block needs; the first one has one entry per column.
        block_size: Rows of a block; None for blocks of about `BLOCK_ELEMENTS` similarities.
    """
    if block_size is None:
        elements = BLOCK_ELEMENTS.get(rows[0].device.type, BLOCK_ELEMENTS_ELSEWHERE)
        block_size = max(1, elements // max(1, len(columns[0])))
    with without_autocast(rows[0]):
        if len(rows[0]) <= block_size:
            return function(*rows, *columns)
        if not torch.compiler.is_compiling():
            arguments = (function, block_size, len(rows), *rows, *columns)
            results: tuple[Tensor, ...] = _InBlocks.apply(*arguments)  # type: ignore[no-untyped-call]
            return results
        # torch.compile follows checkpoint, but not a backward that calls autograd.
        blocks = [
            checkpoint(function, *block, *columns, use_reentrant=False, preserve_rng_state=False)
            for block in zip(*(torch.split(tensor, block_size) for tensor in rows), strict=True)
        ]
        return tuple(torch.cat(values) for values in zip(*blocks, strict=True))


class _InBlocks(torch.autograd.Function):
    """`in_blocks`: forward saves the inputs alone; backward computes each block again and differentiates it.

    Results and gradients are allocated at once and filled. If those of a block were kept between the large tensors of
    two blocks, the C library could not reuse the memory of the latter, and the memory would grow with their number.
    """

    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., tuple[Tensor, ...]], block_size: int, split: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.function, ctx.block_size, ctx.split = function, block_size, split
        results: tuple[Tensor, ...] = ()
        for at in _blocks(tensors[0], block_size):
            values = function(*(rows[at] for rows in tensors[:split]), *tensors[split:])
            results = results or tuple(value.new_empty(len(tensors[0]), *value.shape[1:]) for value in values)
            for result, value in zip(results, values, strict=True):
                result[at] = value
            del values, value
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        tensors, split = ctx.saved_tensors, ctx.split
        with without_autocast(tensors[0]):
            if torch.is_grad_enabled():  # create_graph=True: all pairs at once
                return (None, None, None, *gradients_of(ctx.function, tensors, grads))
            totals = [torch.zeros_like(each) if each.requires_grad else None for each in tensors]
            for at in _blocks(tensors[0], ctx.block_size):
                with torch.enable_grad():  # for a part to require the gradient of its tensor
                    block = [rows[at] for rows in tensors[:split]]
                own = [None if grad is None else grad[at] for grad in grads]
                found = gradients_of(ctx.function, (*block, *tensors[split:]), own)
                for index, (total, grad) in enumerate(zip(totals, found, strict=True)):
                    if total is not None and grad is not None:
                        (total[at] if index < split else total).add_(grad)
        return (None, None, None, *totals)


def _blocks(rows: Tensor, block_size: int) -> list[slice]:
    return [slice(first, first + block_size) for first in range(0, len(rows), block_size)]


def process_count() -> int:
    """Return the number of processes, 1 if torch.distributed is not initialized."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gather(own: Tensor) -> tuple[Tensor, int]:
    """Return the rows of all processes and the position of the first own one; processes may have different numbers.

    The gradient of a row is the sum of its gradients in all processes: that of the sum of their losses.
    """
    import torch.distributed as dist

    world = process_count()
    if world == 1:
        return own, 0
    sizes = own.new_zeros(world, dtype=torch.int64)
    sizes[dist.get_rank()] = len(own)
    dist.all_reduce(sizes)
    counts: list[int] = sizes.tolist()
    gathered: Tensor = _Gather.apply(own, tuple(counts))  # type: ignore[no-untyped-call]
    return gathered, sum(counts[: dist.get_rank()])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, counts: tuple[int, ...]) -> Tensor:
        import torch.distributed as dist

        ctx.first, ctx.count = sum(counts[: dist.get_rank()]), len(own)
        padded = own.new_zeros(max(counts), *own.shape[1:])
        padded[: len(own)] = own
        everywhere = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(everywhere, padded)
        return torch.cat([rows[:count] for rows, count in zip(everywhere, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        import torch.distributed as dist

        summed = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed)
        return summed[ctx.first : ctx.first + ctx.count], None
