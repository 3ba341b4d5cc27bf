"""Cost model of training with many classes: memory and communication of each process, by formula.

Symbols: C classes, F features, H = 4·C·F bytes of class weights, P bytes of backbone parameters, p processes, N images
per step over all processes, n = N/p of each process, o bytes of optimizer state per byte of weights (Adam 2, SGD with
momentum 1), r the sample rate.

| memory of a process | data parallel | FSDP | sharded head |
|---|---|---|---|
| weights, optimizer | (1 + o)·(H + P) | (1 + o)·(H + P)/p | (1 + o)·(H/p + P) |
| gradients | H + P | (H + P)/p | H/p + P |
| buffers | DDP's buckets, H + P | gathered weights, H; to scatter gradients, 2·H | buckets, P |
| head | maps [n, C]: cosines, scores, gradient; blocks | the same | [N, F] and blocks, no map |

These do not all exist at once: the peak is the largest of the moments of the backward pass. With sampling, a sharded
head also copies the r·H/p drawn weights and their gradient, and needs H/p to add them up. A block has at most
`BLOCK_ELEMENTS` values.

Collectives use rings: to all-reduce s bytes, each process sends 2·(p − 1)/p·s; to all-gather or reduce-scatter s bytes,
of which each owns s/p, it sends (p − 1)/p·s. Gradients of what is replicated are all-reduced. What FSDP shards, and the
features [N, F] of a sharded head and their gradients, are gathered and scattered. A sharded head also exchanges labels
and 32 bytes of sums per image.

Assumptions: weights, gradients and optimizer state are float32, as under autocast, which adds a half-precision copy of
the backbone. FSDP gathers the head once per step and keeps it until the backward pass; the backbone is gathered in both
passes and counts as one block, an upper bound of what is gathered at once. Activations of the backbone, sums of the
trainer (40 bytes) and memory of libraries are not included. tests/training/test_cost.py compares the formulas with the
bytes that processes allocate and exchange.

This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from spherenet.errors import InvalidArgument

__all__ = ["BLOCK_ELEMENTS", "Cost", "Workload", "costs", "recommend"]

FLOAT, HALF, INTEGER = 4, 2, 8
"""Bytes of a number."""

BLOCK_ELEMENTS = {"cpu": 1 << 19, "gpu": 1 << 25}
"""Largest number of values that heads and losses process at once."""

MAP_BLOCKS, SHARD_BLOCKS, SAMPLED_BLOCKS, WEIGHT_BLOCKS = 4, 4, 6, 2
"""Blocks that exist at once in the loss of a map, of a shard and of a sampled shard, and of directions of the weights.

Measured with CosFace; other losses need a few more or fewer.
"""

SIMPLER = 1.1
"""Factor by which a simpler strategy may send more than the one that sends least."""


@dataclass(frozen=True)
class Workload:
    """A training step whose cost is estimated.

    Attributes:
        classes: Number of classes.
        features: Number of features of the head.
        processes: Number of processes, one per GPU.
        batch_size: Images per step, over all processes.
        parameters: Parameters of the backbone.
        optimizer: "adam", "adamw", or "sgd" with momentum.
        precision: Precision of the forward pass; half precision uses autocast.
        sample_rate: Fraction of the classes that a sharded head uses in each step.
        device: "gpu" or "cpu", for the size of blocks.

    Raises:
        ValueError: If a value is out of range.
    """

    classes: int
    features: int
    processes: int
    batch_size: int
    parameters: int = 0
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    sample_rate: float = 1.0
    device: Literal["cpu", "gpu"] = "gpu"

    def __post_init__(self) -> None:
        for name, least in (("classes", 2), ("features", 1), ("processes", 1), ("parameters", 0)):
            if getattr(self, name) < least:
                raise InvalidArgument(name, f"must be at least {least}, got {getattr(self, name)}.")
        if self.batch_size < self.processes:
            raise InvalidArgument(
                "batch_size", f"must be at least the number of processes, {self.processes}, got {self.batch_size}."
            )
        if not 0 < self.sample_rate <= 1:
            raise InvalidArgument("sample_rate", f"must be greater than 0 and at most 1, got {self.sample_rate:g}.")

    @property
    def head_bytes(self) -> int:
        """Bytes of the class weights, H."""
        return FLOAT * self.classes * self.features

    @property
    def backbone_bytes(self) -> int:
        """Bytes of the backbone's parameters, P."""
        return FLOAT * self.parameters

    @property
    def own_batch(self) -> int:
        """Images of one process per step, n."""
        return -(-self.batch_size // self.processes)


@dataclass(frozen=True)
class Cost:
    """Cost of one strategy.

    Attributes:
        strategy: Name of the strategy.
        options: Options of `spherenet train` that select it.
        memory: Bytes of one process at the peak, by use.
        sent: Bytes that one process sends per step, by use.
    """

    strategy: str
    options: str
    memory: Mapping[str, int]
    sent: Mapping[str, int]

    @property
    def total_memory(self) -> int:
        """Bytes of one process at the peak."""
        return sum(self.memory.values())

    @property
    def total_sent(self) -> int:
        """Bytes that one process sends per step."""
        return sum(self.sent.values())


def costs(workload: Workload) -> list[Cost]:
    """Return the cost of every strategy, from the simplest.

    A head with fewer classes than processes is not sharded, nor are weights in float16, whose gradients are scaled.
    """
    strategies = [_data_parallel(workload)]
    if workload.processes > 1 and workload.precision != "float16":
        strategies.append(_fsdp(workload))
        if workload.classes >= workload.processes:
            strategies.append(_sharded_head(workload, fsdp=False))
            if workload.parameters > 0:
                strategies.append(_sharded_head(workload, fsdp=True))
    return strategies


def recommend(estimates: list[Cost], memory: int | None = None) -> tuple[Cost | None, str]:
    """Return the recommended strategy, None if none fits, and the reason as a sentence.

    Args:
        estimates: Costs, from the simplest strategy.
        memory: Bytes of each process, None if they are not limited.
    """
    fitting = [cost for cost in estimates if memory is None or cost.total_memory <= memory]
    if not fitting:
        least = min(estimates, key=lambda cost: cost.total_memory)
        return None, (
            f"No strategy fits: {least.strategy} takes least, {_gigabytes(least.total_memory)} per process, but there "
            f"are {_gigabytes(memory or 0)}; use more processes or smaller batches."
        )
    least_sent = min(cost.total_sent for cost in fitting)
    chosen = next(cost for cost in fitting if cost.total_sent <= SIMPLER * least_sent)
    reasons = []
    simpler = estimates[: estimates.index(chosen)]
    too_large = [cost.strategy for cost in simpler if cost not in fitting]
    if too_large:
        reasons.append(f"{' and '.join(too_large)} {'does' if len(too_large) == 1 else 'do'} not fit")
    slower = [cost for cost in simpler if cost in fitting]
    if slower:
        factor = min(cost.total_sent for cost in slower) / max(1, chosen.total_sent)
        shown = f"{factor:,.0f}" if factor >= 10 else f"{factor:.1f}"
        reasons.append(f"simpler strategies send at least {shown} times as much")
    if not reasons:
        reasons.append("it fits, it is the simplest, and no other sends much less")
    return chosen, f"Recommended: {chosen.strategy} ({chosen.options}), because {' and '.join(reasons)}."


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def _optimizer_states(workload: Workload) -> int:
    return 1 if workload.optimizer == "sgd" else 2


def _half_copies(workload: Workload) -> int:
    """Return the bytes of the half-precision copies that autocast makes of the backbone's weights."""
    return 0 if workload.precision == "float32" else HALF * workload.parameters


def _peak(*moments: dict[str, int]) -> dict[str, int]:
    """Return the moment of the backward pass with the most bytes."""
    return max(moments, key=lambda moment: sum(moment.values()))


def _map_moments(workload: Workload) -> tuple[int, int, int]:
    """Return the bytes of maps [n, C] and blocks in the backward pass of the loss, of the head, and after it.

    In the loss there are cosines, scores and the gradient of the cosines, in the head scores and this gradient. Scores
    are needed until the end of the step, for the accuracy.
    """
    one_map = FLOAT * workload.own_batch * workload.classes
    largest = FLOAT * BLOCK_ELEMENTS[workload.device]
    in_loss = 3 * one_map + MAP_BLOCKS * min(one_map, largest)
    in_head = 2 * one_map + WEIGHT_BLOCKS * min(workload.head_bytes, largest)
    return in_loss, in_head, one_map


def _ring(workload: Workload, size: float, rounds: int = 1) -> int:
    """Return the bytes that a process sends to gather or scatter `size` bytes; an all-reduce has two rounds."""
    return round(rounds * (workload.processes - 1) / workload.processes * size)


def _data_parallel(workload: Workload) -> Cost:
    head, replicated = workload.head_bytes, workload.head_bytes + workload.backbone_bytes
    in_loss, in_head, scores = _map_moments(workload)
    memory = {
        "weights": replicated + _half_copies(workload),
        "optimizer": _optimizer_states(workload) * replicated,
        "buffers": replicated if workload.processes > 1 else 0,
        **_peak(
            {"gradients": 0, "head": in_loss},
            {"gradients": head, "head": in_head},
            {"gradients": replicated, "head": scores},
        ),
    }
    return Cost("data parallel", "torchrun alone", memory, {"gradients": _ring(workload, replicated, 2)})


def _fsdp(workload: Workload) -> Cost:
    head, backbone = workload.head_bytes, workload.backbone_bytes
    own_head, own = (math.ceil(size / workload.processes) for size in (head, head + backbone))
    in_loss, in_head, scores = _map_moments(workload)
    memory = {
        "weights": own + _half_copies(workload),
        "optimizer": _optimizer_states(workload) * own,
        **_peak(
            {"gradients": 0, "buffers": head, "head": in_loss},
            {"gradients": 0, "buffers": 2 * head, "head": in_head},
            {"gradients": own_head, "buffers": 3 * head, "head": scores},
            {"gradients": own, "buffers": 3 * backbone, "head": scores},
        ),
    }
    sent = {"weights": _ring(workload, head + 2 * backbone), "gradients": _ring(workload, head + backbone)}
    return Cost("FSDP", "--sharding fsdp", memory, sent)


def _sharded_head(workload: Workload, *, fsdp: bool) -> Cost:
    processes, backbone = workload.processes, workload.backbone_bytes
    own_classes = math.ceil(workload.classes / processes)
    own_head = FLOAT * own_classes * workload.features
    used = own_classes if workload.sample_rate == 1 else math.ceil(workload.sample_rate * own_classes)
    sampled = 0 if workload.sample_rate == 1 else FLOAT * used * workload.features
    rows = workload.own_batch * processes
    features = FLOAT * rows * workload.features
    # The classes of a block, for all rows and for all features.
    step = max(1, min(used, BLOCK_ELEMENTS[workload.device] // max(rows, workload.features)))
    count = SHARD_BLOCKS if sampled == 0 else SAMPLED_BLOCKS
    blocks = FLOAT * step * (count * rows + WEIGHT_BLOCKS * workload.features)
    own_backbone, buckets = (math.ceil(backbone / processes), 0) if fsdp else (backbone, backbone)
    gradient = own_head if sampled == 0 else sampled
    memory = {
        "weights": own_head + own_backbone + _half_copies(workload),
        "optimizer": _optimizer_states(workload) * (own_head + own_backbone),
        **_peak(
            {"gradients": gradient, "buffers": buckets, "head": blocks + 3 * features + sampled},
            # The gradient of the sampled weights is added to zeros, out of place.
            {
                "gradients": own_head,
                "buffers": buckets + (own_head if sampled else 0),
                "head": 2 * sampled + FLOAT * 2 * step * rows + features,
            },
            {"gradients": own_head + own_backbone, "buffers": 3 * backbone if fsdp else buckets, "head": 0},
        ),
    }
    labels = INTEGER * processes * (workload.own_batch + 2)  # of each process, with their number and a sign of errors
    sums = rows * (6 * FLOAT + INTEGER)
    sent = {"features": _ring(workload, 2 * features + labels), "sums over classes": _ring(workload, sums, 2)}
    if fsdp:
        sent |= {"weights": _ring(workload, 2 * backbone), "gradients": _ring(workload, backbone)}
    else:
        sent["gradients"] = _ring(workload, backbone, 2)
    name = "sharded head" if workload.sample_rate == 1 else "sampled sharded head"
    options = "--shard-head" if workload.sample_rate == 1 else f"--shard-head --sample-rate {workload.sample_rate:g}"
    if fsdp:
        return Cost(f"{name}, FSDP", f"{options} --sharding fsdp", memory, sent)
    return Cost(name, options, memory, sent)
