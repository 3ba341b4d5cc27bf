"""The verb `bench`: time and memory of SphereNets relative to their CNN twins."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from spherenet.cli.option_types import add_option, add_threads
from spherenet.cli.options import Parser, require_folder
from spherenet.cli.output import print_json, stdout_console
from spherenet.errors import InvalidArgument

if TYPE_CHECKING:
    from spherenet.bench.networks import Row

__all__ = ["bench_parser", "run_bench"]


def bench_parser() -> Parser:
    """Return the parser of `spherenet bench`."""
    parser = Parser(
        "bench",
        "Measure training steps (forward, backward, Adam) and inference of a network with each operator\n"
        "and of its CNN twin, the same network with plain convolutions. All alternate in one process, and\n"
        "ratios compare measurements of the same round. The machine should be otherwise idle.",
        examples="""\
  spherenet bench
  spherenet bench --suite --output bench.json                 # all workloads of docs/performance.md (minutes)
  spherenet bench --network resnet-32 --operators cosine learnable --batch-size 64
  spherenet bench --mode inference --rounds 30 --json
  spherenet bench --convolution direct                        # torch's convolutions in sphere layers, smaller errors
  spherenet bench --operators cosine sigmoid --authors        # also the formula of the released code""",
    )
    add_option(parser, "--network", default="cnn-9", help="name of the network")
    operators = ["cosine", "linear", "sigmoid", "learnable"]
    add_option(parser, "--operators", type=list[str], default=operators, help="operators to measure")
    add_option(parser, "--widths", type=list[int], help="filters per stage; by default those of the paper")
    modes = Literal["train", "inference", "both"]
    add_option(parser, "--mode", type=modes, default="both", help="training steps, inference or both")
    add_option(parser, "--batch-size", type=int, default=128, at_least=1, help="images per batch")
    precisions = Literal["float32", "bfloat16", "float16"]
    text = "precision of the forward pass; half precision uses autocast"
    add_option(parser, "--precision", type=precisions, default="float32", help=text)
    algorithms = Literal["auto", "direct", "winograd"]
    text = "algorithm of 3×3 sphere layers on CPUs in float32: Winograd's where it is faster, torch's, or Winograd's"
    add_option(parser, "--convolution", type=algorithms, default="auto", help=text)
    add_option(parser, "--rounds", type=int, default=15, at_least=2, help="measured rounds")
    add_option(parser, "--warmup", type=int, default=2, at_least=1, help="rounds before the measured ones")
    add_threads(parser)
    add_option(parser, "--device", default="cpu", help="cpu, cuda, cuda:1, …")
    text = "also measure sphere layers without BatchNorm; the CNN twin keeps it"
    parser.add_argument("--sphere-norm", action="store_true", help=text)
    parser.add_argument("--authors", action="store_true", help="also measure the formula of the authors' code")
    text = "measure all workloads of docs/performance.md; only --rounds and --threads apply"
    parser.add_argument("--suite", action="store_true", help=text)
    add_option(parser, "--output", metavar="FILE", help="with --suite: JSON file for the results")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def run_bench(arguments: Namespace) -> None:
    """Measure networks and print the results."""
    if arguments.output is not None and not arguments.suite:
        raise InvalidArgument("--output", "must be used with --suite.")
    # torch reads these when it is imported: messages of the profiler, which measures memory, are not for users.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    if arguments.suite:
        _run_suite(arguments)
        return
    from spherenet._util.validation import require_device, require_one_of
    from spherenet.angles import OPERATORS
    from spherenet.kernels.settings import convolution
    from spherenet.models import list_models

    require_one_of("--network", arguments.network, list_models())
    authors = [name for name in OPERATORS if name in ("linear", "cosine", "sigmoid", "learnable")]
    for operator in arguments.operators:
        require_one_of("--operators", operator, OPERATORS)
        if arguments.authors:
            require_one_of("--operators with --authors", operator, authors)
    if arguments.device != "cpu":
        require_device("--device", arguments.device)
    with convolution(arguments.convolution):
        _run_networks(arguments)


def _run_networks(arguments: Namespace) -> None:
    from spherenet.bench.networks import compare, contestants, hardware
    from spherenet.kernels.dispatch import implementation_name

    has_engine = arguments.device == "cpu" and arguments.precision == "float32" and arguments.convolution != "direct"
    networks = contestants(
        arguments.operators, sphere_norm=arguments.sphere_norm, authors=arguments.authors, engine=has_engine
    )
    rows: list[Row] = []
    for mode in ["train", "inference"] if arguments.mode == "both" else [arguments.mode]:
        rows += compare(
            arguments.network,
            networks,
            mode=mode,
            batch_size=arguments.batch_size,
            rounds=arguments.rounds,
            warmup=arguments.warmup,
            device=arguments.device,
            precision=arguments.precision,
            progress=partial(_progress, total=arguments.rounds, description=f"{mode}: rounds"),
            widths=arguments.widths,
        )
    settings = {
        "network": arguments.network,
        "batch_size": arguments.batch_size,
        "precision": arguments.precision,
        "rounds": arguments.rounds,
        "implementation": implementation_name(arguments.device.split(":")[0]),
        **hardware(arguments.device),
    }
    if arguments.json:
        print_json({**settings, "rows": [row.as_dict() for row in rows]})
    else:
        _print_table(rows, settings)


def _run_suite(arguments: Namespace) -> None:
    from spherenet._util.atomic import write_json
    from spherenet.bench.suite import run_suite

    output = None if arguments.output is None else Path(arguments.output)
    require_folder("--output", arguments.output)
    results = run_suite(arguments.rounds, _progress)
    if output is not None:
        write_json(output, results)
    if arguments.json:
        print_json(results)
    else:
        _print_suite(results)


def _progress(rounds: Iterator[dict[str, float]], total: int, description: str) -> Iterable[dict[str, float]]:
    """Return the rounds, wrapped in a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import track

    return track(rounds, description=description, total=total, console=Console(stderr=True), transient=True)


_SAME_ENGINE = "same engine: time relative to the CNN twin whose convolutions use the engine of sphere layers."
_ERRORS = "Winograd's algorithm: errors of up to 5e-6 of the largest output; --convolution direct: 5e-7."


def _environment(results: dict[str, Any]) -> str:
    return (
        f"{results['processor']}, {results['threads']} threads, torch {results['torch']}, Python {results['python']}, "
        f"n = {results['rounds']} rounds. Sphere layers: {results['implementation']}."
    )


def _print_suite(results: dict[str, Any]) -> None:
    from rich.table import Table

    console = stdout_console()
    table = Table(title="time relative to the CNN twin (cnn-9)")
    for column in ("workload", "operator"):
        table.add_column(column)
    for column in ("ratio", "quartiles", "target", "same engine", "memory"):
        table.add_column(column, justify="right")
    for entry in results["workloads"]:
        if "skipped" in entry:
            table.add_row(entry["workload"], f"({entry['skipped']})", "", "", "", "", "")
            continue
        for row in entry["rows"][1:]:
            ratio = row["time_ratio"]
            table.add_row(
                entry["workload"],
                row["name"],
                f"{ratio['median']:.3f}",
                f"{ratio['lower']:.3f} … {ratio['upper']:.3f}",
                f"{entry['targets'][row['name']]:.2f}" if row["name"] in entry["targets"] else "",
                f"{row['engine_ratio']['median']:.3f}" if row["engine_ratio"] else "",
                f"{row['memory_ratio']:.3f}",
            )
    console.print(table)
    for row in results["recurrent"]:
        console.print(f"{row['name']}: {row['time_ratio']['median']:.2f} × the time of torch's layer", highlight=False)
    first = results["first_step"]
    slowest = max(first[name]["median"] - first["none"]["median"] for name in first)
    console.print(f"first step of a new process: at most {slowest:.2f} s longer than the CNN twin", highlight=False)
    console.print(_environment(results), highlight=False)
    console.print(_SAME_ENGINE, highlight=False)


def _print_table(rows: list[Row], settings: dict[str, Any]) -> None:
    from rich.table import Table

    title = "{network}, batch size {batch_size}, {precision}, relative to the CNN twin".format(**settings)
    table = Table(title=title)
    for column in ("mode", "operator"):
        table.add_column(column)
    for column in ("ms", "time ratio", "quartiles", "same engine", "peak MB", "memory ratio"):
        table.add_column(column, justify="right")
    for row in rows:
        ratio = row.time_ratio
        table.add_row(
            row.mode,
            row.name,
            f"{row.milliseconds.median:.1f}",
            f"{ratio.median:.3f}",
            f"{ratio.lower:.3f} … {ratio.upper:.3f}",
            "" if row.engine_ratio is None else f"{row.engine_ratio.median:.3f}",
            f"{row.peak_megabytes:.0f}",
            f"{row.memory_ratio:.3f}",
        )
    console = stdout_console()
    console.print(table)
    console.print(_environment(settings), highlight=False)
    if "winograd" in settings["implementation"]:
        console.print(f"{_SAME_ENGINE}\n{_ERRORS}", highlight=False)
