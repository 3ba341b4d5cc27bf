"""`spherenet bench`: time and memory of a SphereNet beside its CNN twin."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from spherenet.cli.options import Parser
from spherenet.cli.output import print_json

if TYPE_CHECKING:
    from spherenet.bench.networks import Row

EXAMPLES = """\
  spherenet bench
  spherenet bench --suite --output bench.json                 # every workload of docs/performance.md, a few minutes
  spherenet bench --network resnet-32 --operators cosine learnable --batch-size 64
  spherenet bench --mode inference --rounds 30 --json
  spherenet bench --operators cosine sigmoid --authors        # beside the formula as released"""


def parser() -> Parser:
    """Return the verb's parser."""
    made = Parser(
        "bench",
        "Measure whole training steps (forward, backward, Adam) or inference of a network with\n"
        "each operator, taking turns with its CNN twin in one process. Ratios are of neighbours\n"
        "in the same round, with their quartiles. Leave the machine alone meanwhile.",
        examples=EXAMPLES,
    )
    made.add_argument("--network", default="cnn-9", metavar="NAME", help="a network of the paper (default: cnn-9)")
    made.add_argument(
        "--operators",
        nargs="+",
        default=["cosine", "linear", "sigmoid", "learnable"],
        metavar="NAME",
        help="operators to compare (default: all four)",
    )
    made.add_argument("--widths", nargs="+", type=int, metavar="N", help="filters of each stage (default: the paper's)")
    made.add_argument("--mode", choices=["train", "inference", "both"], default="both", help="default: both")
    made.add_argument("--batch-size", type=int, default=128, metavar="N", help="images a batch (default: 128)")
    made.add_argument("--rounds", type=int, default=15, metavar="N", help="measured rounds (default: 15)")
    made.add_argument("--warmup", type=int, default=2, metavar="N", help="rounds before those (default: 2)")
    made.add_argument("--threads", type=int, metavar="N", help="torch's threads (default: as torch chooses)")
    made.add_argument("--device", default="cpu", metavar="NAME", help="cpu, cuda, … (default: cpu)")
    made.add_argument("--sphere-norm", action="store_true", help="also without BatchNorm (the twin keeps its own)")
    made.add_argument("--authors", action="store_true", help="also by the formula of the authors' code")
    made.add_argument(
        "--suite",
        action="store_true",
        help="every workload of docs/performance.md; of the options above --rounds counts",
    )
    made.add_argument("--output", metavar="FILE", help="with --suite: write the results as JSON to this file")
    made.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return made


def run(arguments: Namespace) -> None:
    """Measure and print."""
    for name, least in (("rounds", 2), ("warmup", 1), ("batch_size", 1), ("threads", 1)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}.")
    if arguments.output is not None and not arguments.suite:
        raise ValueError("--output must be used with --suite.")
    import torch

    if arguments.suite:
        if arguments.threads is not None:
            torch.set_num_threads(arguments.threads)
        _run_suite(arguments)
        return
    from spherenet.angles import OPERATORS
    from spherenet.bench.networks import compare, contestants, hardware
    from spherenet.kernels.dispatch import implementation_name
    from spherenet.models import list_models
    from spherenet.validation import require_one_of

    require_one_of("--network", arguments.network, list_models())
    for operator in arguments.operators:
        require_one_of("--operators", operator, OPERATORS)
    if arguments.device != "cpu":
        _require_device(arguments.device)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    field = contestants(arguments.operators, sphere_norm=arguments.sphere_norm, authors=arguments.authors)
    modes = ["train", "inference"] if arguments.mode == "both" else [arguments.mode]
    rows: list[Row] = []
    for mode in modes:
        rows += compare(
            arguments.network,
            field,
            mode=mode,
            batch_size=arguments.batch_size,
            rounds=arguments.rounds,
            warmup=arguments.warmup,
            device=arguments.device,
            progress=partial(_progress, total=arguments.rounds, what=f"{mode}: rounds"),
            widths=arguments.widths,
        )
    settings = {
        "network": arguments.network,
        "batch_size": arguments.batch_size,
        "rounds": arguments.rounds,
        "implementation": implementation_name(arguments.device.split(":")[0]),
        **hardware(arguments.device),
    }
    if arguments.json:
        print_json({**settings, "rows": [row.as_dict() for row in rows]})
    else:
        _print_table(rows, settings)


def _run_suite(arguments: Namespace) -> None:
    from pathlib import Path

    from spherenet.bench.suite import run_suite
    from spherenet.files import write_json

    output = None if arguments.output is None else Path(arguments.output)
    if output is not None and not output.parent.is_dir():
        raise ValueError(f"--output must be a file in an existing folder, got {arguments.output!r}.")
    results = run_suite(arguments.rounds, _progress)
    if output is not None:
        write_json(output, results)
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        _print_suite(results)


def _print_suite(results: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title="Time, as a ratio to the CNN twin (cnn-9)")
    for column in ("workload", "operator"):
        table.add_column(column)
    for column in ("ratio", "quartiles", "target", "memory"):
        table.add_column(column, justify="right")
    for entry in results["workloads"]:
        if "skipped" in entry:
            table.add_row(entry["workload"], f"({entry['skipped']})", "", "", "", "")
            continue
        for row in entry["rows"][1:]:
            ratio = row["time_ratio"]
            table.add_row(
                entry["workload"],
                row["name"],
                f"{ratio['median']:.3f}",
                f"{ratio['lower']:.3f} … {ratio['upper']:.3f}",
                f"{entry['targets'][row['name']]:.2f}",
                f"{row['memory_ratio']:.3f}",
            )
    console.print(table)
    for row in results["recurrent"]:
        console.print(f"{row['name']}: {row['time_ratio']['median']:.2f} times torch's own layer", highlight=False)
    first = results["first_step"]
    slowest = max(first[name]["median"] - first["none"]["median"] for name in first)
    console.print(f"First step of a new process: at most {slowest:.2f} s longer than the CNN's", highlight=False)
    console.print(
        f"{results['processor']}, {results['threads']} threads, torch {results['torch']}, Python {results['python']}, "
        f"n = {results['rounds']} rounds. Sphere layers: {results['implementation']}.",
        highlight=False,
    )


def _require_device(device: str) -> None:
    import torch

    try:
        torch.zeros(1, device=device).item()  # the device meta has tensors, but no numbers
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device!r} is not available here ({str(error).splitlines()[0]}).") from None


def _progress(rounds: Iterator[dict[str, float]], total: int, what: str) -> Iterable[dict[str, float]]:
    from rich.console import Console
    from rich.progress import track

    # On stderr, so that what is printed can be piped.
    return track(rounds, description=what, total=total, console=Console(stderr=True), transient=True)


def _print_table(rows: list[Row], settings: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{settings['network']}, batch {settings['batch_size']}, ratios to the CNN twin")
    for column in ("mode", "operator"):
        table.add_column(column)
    for column in ("ms", "time ratio", "quartiles", "peak MB", "memory ratio"):
        table.add_column(column, justify="right")
    for row in rows:
        ratio = row.time_ratio
        table.add_row(
            row.mode,
            row.name,
            f"{row.milliseconds.median:.1f}",
            f"{ratio.median:.3f}",
            f"{ratio.lower:.3f} … {ratio.upper:.3f}",
            f"{row.peak_megabytes:.0f}",
            f"{row.memory_ratio:.3f}",
        )
    console = Console()
    console.print(table)
    console.print(
        f"{settings['processor']}, {settings['threads']} threads, torch {settings['torch']}, "
        f"Python {settings['python']}, n = {settings['rounds']} rounds. Sphere layers: {settings['implementation']}.",
        highlight=False,
    )
