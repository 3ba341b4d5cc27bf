"""The verb `plan`: memory and communication of training with many classes, estimated before anything is started."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError, Namespace
from typing import Any, Literal

from spherenet._util.text import short
from spherenet.cli.option_types import add_option
from spherenet.cli.options import Parser
from spherenet.cli.output import print_json, stdout_console
from spherenet.errors import InvalidArgument
from spherenet.training.cost import Cost, Workload, costs, recommend

__all__ = ["plan_parser", "run_plan"]

UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
DECIMAL = [("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)]
MAX_CLASSES, MAX_FEATURES, MAX_PARAMETERS, MAX_BATCH, MAX_GPUS = 10**12, 10**6, 10**13, 10**9, 10**6
IMAGES_PER_PROCESS = 64


def plan_parser() -> Parser:
    """Return the parser of `spherenet plan`."""
    parser = Parser(
        "plan",
        "Estimate memory and communication of each process, per training step, for data parallel training,\n"
        "FSDP and heads whose classes are divided among processes, and recommend one. Nothing is allocated.\n"
        "Activations of the network are not included.",
        examples="""\
  spherenet plan --classes 10_000_000 --features 512 --gpus 8x8 --memory 80GB
  spherenet plan --classes 1_000_000 --model resnet-18 --gpus 8 --batch-size 512 --optimizer sgd
  spherenet plan --classes 100_000_000 --features 256 --gpus 16x8 --sample-rate 0.1 --json""",
    )
    add_option(parser, "--classes", type=int, at_least=2, at_most=MAX_CLASSES, help="number of classes (required)")
    add_option(
        parser, "--features", type=int, at_least=1, at_most=MAX_FEATURES, help="features of the head; default: --model"
    )
    parser.add_argument(
        "--gpus", type=_gpus, default=(1, 1), metavar="N", help="processes: GPUs, or NODESxGPUS, e.g. 8x8 (default: 1)"
    )
    add_option(
        parser,
        "--batch-size",
        type=int,
        at_least=1,
        at_most=MAX_BATCH,
        help=f"images per step, over all processes; default: {IMAGES_PER_PROCESS} per process",
    )
    add_option(parser, "--model", help="network whose parameters and features are counted")
    add_option(
        parser,
        "--parameters",
        type=int,
        at_least=0,
        at_most=MAX_PARAMETERS,
        help="parameters of the network without the head; default: those of --model, or 0",
    )
    optimizers, precisions = Literal["adam", "adamw", "sgd"], Literal["float32", "bfloat16", "float16"]
    add_option(parser, "--optimizer", type=optimizers, default="adam", help="Adam, AdamW, or SGD with momentum")
    add_option(parser, "--precision", type=precisions, default="float32", help="precision of the forward pass")
    text = "fraction of the classes that a sharded head uses in each step"
    add_option(parser, "--sample-rate", type=float, default=1.0, help=text)
    parser.add_argument("--memory", type=_memory, metavar="SIZE", help="memory of one process, e.g. 80GB or 40GiB")
    add_option(parser, "--device", type=Literal["gpu", "cpu"], default="gpu", help="device whose block size is assumed")
    parser.add_argument("--json", action="store_true", help="print bytes as JSON instead of a table")
    return parser


def run_plan(arguments: Namespace) -> int:
    """Print the costs and the recommendation; return 1 if nothing fits."""
    if arguments.classes is None:
        raise InvalidArgument("--classes", "must be given.")
    features, parameters = _network(arguments)
    nodes, gpus = arguments.gpus
    batch_size = arguments.batch_size or IMAGES_PER_PROCESS * nodes * gpus
    workload = Workload(
        classes=arguments.classes,
        features=features,
        processes=nodes * gpus,
        batch_size=batch_size,
        parameters=parameters,
        optimizer=arguments.optimizer,
        precision=arguments.precision,
        sample_rate=arguments.sample_rate,
        device=arguments.device,
    )
    estimates = costs(workload)
    chosen, reason = recommend(estimates, arguments.memory)
    if arguments.json:
        print_json(
            {
                "classes": workload.classes,
                "features": features,
                "processes": workload.processes,
                "batch_size": batch_size,
                "parameters": parameters,
                "strategies": [_as_dict(cost, arguments.memory) for cost in estimates],
                "recommended": None if chosen is None else chosen.strategy,
                "reason": reason,
            }
        )
    else:
        _print_table(workload, estimates, arguments.memory)
        if workload.precision == "float16" and workload.processes > 1:
            print("float16 requires data parallel training; bfloat16 allows FSDP and sharded heads.")
        print(reason)
    return 0 if chosen is not None else 1


def _gpus(text: str) -> tuple[int, int]:
    """Return nodes and GPUs per node."""
    match = re.fullmatch(r"(?:([0-9_]{1,9})[x×])?([0-9_]{1,9})", text)
    numbers = [] if match is None else [number.replace("_", "") for number in match.groups("1")]
    if not all(number.isdigit() and int(number) >= 1 for number in numbers) or not numbers:
        raise ArgumentTypeError(f"must be a number of GPUs or NODESxGPUS, such as 8x8, got {short(repr(text))}")
    nodes, gpus = map(int, numbers)
    if nodes * gpus > MAX_GPUS:
        raise ArgumentTypeError(f"must be at most {MAX_GPUS:,} in total, got {short(repr(text))}")
    return nodes, gpus


def _memory(text: str) -> int:
    """Return bytes."""
    match = re.fullmatch(rf"([0-9]{{1,9}}(?:\.[0-9]{{1,9}})?) ?({'|'.join(UNITS)})", text)
    size = 0 if match is None else round(float(match[1]) * UNITS[match[2]])
    if size == 0:
        raise ArgumentTypeError(f"must be a size such as 80GB, with one of {', '.join(UNITS)}, got {short(repr(text))}")
    return size


def _network(arguments: Namespace) -> tuple[int, int]:
    """Return the number of features and the number of parameters of the network without the head."""
    if arguments.model is None:
        if arguments.features is None:
            raise InvalidArgument("--features", "or --model must be given.")
        return arguments.features, arguments.parameters or 0
    import torch

    from spherenet._util.validation import require_one_of
    from spherenet.models import create_model, list_models

    require_one_of("--model", arguments.model, list_models())
    with torch.device("meta"):
        network = create_model(arguments.model, num_classes=2)
    features = network.head.in_features
    if arguments.features not in (None, features):
        raise InvalidArgument(
            "--features", f"must be {features}, those of {arguments.model}, got {arguments.features}."
        )
    counted = sum(parameter.numel() for parameter in network.features.parameters())
    return features, counted if arguments.parameters is None else arguments.parameters


def _as_dict(cost: Cost, memory: int | None) -> dict[str, Any]:
    return {
        "strategy": cost.strategy,
        "options": cost.options,
        "memory": {**cost.memory, "total": cost.total_memory},
        "sent": {**cost.sent, "total": cost.total_sent},
        "fits": None if memory is None else cost.total_memory <= memory,
    }


def _print_table(workload: Workload, estimates: list[Cost], memory: int | None) -> None:
    from rich.table import Table

    table = Table(title="per process: memory at the peak, sent per step")
    table.add_column("strategy")
    for column in ("weights", "training", "head", "total", "sent"):
        table.add_column(column, justify="right")
    if memory is not None:
        table.add_column("fits")
    for cost in estimates:
        training = sum(cost.memory[name] for name in ("gradients", "optimizer", "buffers"))
        sizes = (cost.memory["weights"], training, cost.memory["head"], cost.total_memory, cost.total_sent)
        fits = [] if memory is None else ["yes" if cost.total_memory <= memory else "no"]
        table.add_row(cost.strategy, *map(_shown, sizes), *fits)
    console = stdout_console()
    console.print(
        f"{workload.classes:,} classes, {workload.features:,} features, {workload.parameters:,} other parameters,\n"
        f"{workload.processes:,} processes, {workload.batch_size:,} images per step",
        highlight=False,
    )
    console.print(table)


def _shown(size: int) -> str:
    """Return a size with about three digits and its unit."""
    unit, bytes_of_unit = next((unit for unit in DECIMAL if size >= unit[1]), DECIMAL[-1])
    value = size / bytes_of_unit
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"
