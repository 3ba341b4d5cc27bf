"""Memory and communication of training with many classes, by formula: what to shard, before anything is started.

    python benchmarks/sharding_costs.py --classes 10_000_000 --features 512 --gpus 8x8 --memory 80GB

prints, per process, the memory at the peak of a training step and the bytes sent, for data parallel training, FSDP and
heads whose classes are divided among processes, and recommends one. The exit code is 1 if none fits.

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
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

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
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}.")
        if self.batch_size < self.processes:
            raise ValueError(
                f"batch_size must be at least the number of processes, {self.processes}, got {self.batch_size}."
            )
        if not 0 < self.sample_rate <= 1:
            raise ValueError(f"sample_rate must be greater than 0 and at most 1, got {self.sample_rate:g}.")

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


UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
DECIMAL = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
IMAGES_PER_PROCESS = 64


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the costs and the recommendation; return 1 if nothing fits."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--classes", type=int, required=True, help="number of classes")
    parser.add_argument("--features", type=int, help="features of the head; default: those of --model")
    parser.add_argument("--gpus", type=_gpus, default=1, metavar="N", help="processes, or NODESxGPUS, e.g. 8x8")
    parser.add_argument("--batch-size", type=int, help=f"images per step; default: {IMAGES_PER_PROCESS} per process")
    parser.add_argument("--model", help="network of spherenet whose parameters and features are counted")
    parser.add_argument("--parameters", type=int, help="parameters without the head; default: those of --model, or 0")
    parser.add_argument("--optimizer", choices=("adam", "adamw", "sgd"), default="adam")
    parser.add_argument("--precision", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--sample-rate", type=float, default=1.0, help="fraction of the classes used in each step")
    parser.add_argument("--memory", type=_memory, metavar="SIZE", help="memory of one process, e.g. 80GB or 40GiB")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu", help="device whose block size is assumed")
    options = parser.parse_args(arguments)
    features, parameters = options.features, options.parameters
    if options.model is not None:
        features, counted = _network(options.model)
        parameters = counted if parameters is None else parameters
    if features is None or options.features not in (None, features):
        parser.error("--features or --model is required, and both must agree")
    try:
        workload = Workload(
            options.classes,
            features,
            options.gpus,
            options.batch_size or IMAGES_PER_PROCESS * options.gpus,
            parameters=parameters or 0,
            optimizer=options.optimizer,
            precision=options.precision,
            sample_rate=options.sample_rate,
            device=options.device,
        )
    except ValueError as error:
        parser.error(str(error))
    estimates = costs(workload)
    chosen, reason = recommend(estimates, options.memory)
    _print_table(workload, estimates, options.memory)
    if workload.precision == "float16" and workload.processes > 1:
        print("float16 requires data parallel training; bfloat16 allows FSDP and sharded heads.")
    print(reason)
    return 0 if chosen is not None else 1


def _gpus(text: str) -> int:
    """Return the number of processes."""
    match = re.fullmatch(r"(?:([1-9]\d{0,5})x)?([1-9]\d{0,5})", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be a number of GPUs or NODESxGPUS, such as 8x8, got {text[:40]!r}")
    return int(match[1] or 1) * int(match[2])


def _memory(text: str) -> int:
    """Return bytes."""
    match = re.fullmatch(rf"(\d{{1,9}}(?:\.\d{{1,9}})?) ?({'|'.join(UNITS)})", text)
    size = 0 if match is None else round(float(match[1]) * UNITS[match[2]])
    if size == 0:
        raise argparse.ArgumentTypeError(f"must be a size such as 80GB, in {', '.join(UNITS)}, got {text[:40]!r}")
    return size


def _network(name: str) -> tuple[int, int]:
    """Return the number of features of a network and the number of its parameters without the head."""
    import torch

    from spherenet import create_model

    with torch.device("meta"):
        network = create_model(name, num_classes=2)
    return network.head.in_features, sum(parameter.numel() for parameter in network.features.parameters())


def _print_table(workload: Workload, estimates: Sequence[Cost], memory: int | None) -> None:
    print(
        f"{workload.classes:,} classes, {workload.features:,} features, {workload.parameters:,} other parameters,\n"
        f"{workload.processes:,} processes, {workload.batch_size:,} images per step"
    )
    rows = [("per process", "weights", "training", "head", "total", "sent", "" if memory is None else "fits")]
    for cost in estimates:
        training = sum(cost.memory[name] for name in ("gradients", "optimizer", "buffers"))
        sizes = (cost.memory["weights"], training, cost.memory["head"], cost.total_memory, cost.total_sent)
        fits = "" if memory is None else "yes" if cost.total_memory <= memory else "no"
        rows.append((cost.strategy, *map(_shown, sizes), fits))
    width = max(len(row[0]) for row in rows)
    for strategy, *columns, fits in rows:
        print("  ".join([f"{strategy:<{width}}", *(f"{column:>8}" for column in columns), fits]).rstrip())


def _shown(size: int) -> str:
    """Return a size with about three digits and its unit."""
    unit, bytes_of_unit = next((unit for unit in DECIMAL if size >= unit[1]), DECIMAL[-1])
    value = size / bytes_of_unit
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"


if __name__ == "__main__":
    raise SystemExit(main())
