"""Training steps of SphereNets against their CNN twin on a GPU: eager, compiled and as a CUDA graph.

    python benchmarks/gpu.py --output gpu.json

Prints a table and writes it as JSON with the environment. Every combination of precision, way of running and operator
alternates with the CNN twin that runs the same way, and ratios compare the same round. The script also runs on a CPU,
without graphs. `--smoke` uses tiny networks and two rounds as a test.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spherenet.bench.networks import Spread, hardware, paired_ratios, take_turns
from spherenet.models import create_model
from spherenet.optim import param_groups

TWIN = "cnn"
WAYS = ("eager", "compiled", "graphs")
PRECISIONS = ("float32", "bfloat16")
OPERATORS = ("cosine", "linear", "sigmoid", "learnable")
SMOKE = {"widths": (4, 4, 4), "input_size": 8}


def training_step(
    operator: str | None, way: str, precision: str, arguments: argparse.Namespace
) -> Callable[[], Tensor]:
    """Return one training step of a fresh network as a function without arguments."""
    torch.manual_seed(0)
    device = torch.device(arguments.device)
    model = create_model(arguments.network, operator=operator, **(SMOKE if arguments.smoke else {})).to(device)
    model = model.to(memory_format=torch.channels_last)
    size, channels, classes = (model.config[name] for name in ("input_size", "in_channels", "num_classes"))
    images = torch.randn(arguments.batch_size, channels, *size, device=device).to(memory_format=torch.channels_last)
    labels = torch.randint(classes, (arguments.batch_size,), device=device)
    capturable = {"capturable": True} if way == "graphs" else {}
    optimizer = torch.optim.Adam(param_groups(model, 5e-4), lr=1e-3, fused=True, **capturable)
    # Code generation takes minutes and is not needed in a smoke test.
    forward = torch.compile(model, backend="eager" if arguments.smoke else "inductor") if way == "compiled" else model

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=way != "graphs")
        with torch.autocast(device.type, getattr(torch, precision), enabled=precision != "float32"):
            loss: Tensor = forward(images, labels)[0]
        loss.backward()
        optimizer.step()
        return loss.detach()

    return captured(step) if way == "graphs" else step


def captured(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return the replay of a step that was captured as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Time every combination; a combination that fails becomes a row with its error."""
    rows = []
    for precision in arguments.precisions:
        for way in arguments.ways:
            runs, errors = {}, {}
            for operator in (None, *arguments.operators):
                name = operator or TWIN
                try:
                    runs[name] = training_step(operator, way, precision, arguments)
                    runs[name]()
                except Exception as error:  # no compiler, memory or graphs: continue with the next row
                    runs.pop(name, None)
                    errors[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            rounds = list(take_turns(runs, arguments.rounds, arguments.warmup, arguments.device)) if runs else []
            for name in (TWIN, *arguments.operators):
                row: dict[str, Any] = {"network": name, "way": way, "precision": precision}
                if name in errors:
                    row["error"] = errors[name]
                else:
                    row["milliseconds"] = asdict(Spread.of([1e3 * seconds[name] for seconds in rounds]))
                    if TWIN in runs:
                        row["ratio"] = asdict(paired_ratios(rounds, name, TWIN))
                rows.append(row)
    return rows


def environment(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what the measurements depend on."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    environment = hardware(arguments.device)
    on_gpu = torch.device(arguments.device).type == "cuda"
    return environment | {
        "triton": triton_version,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version() if on_gpu else None,
        "capability": list(torch.cuda.get_device_capability()) if on_gpu else None,
        "tf32": torch.backends.cudnn.allow_tf32,
        "network": arguments.network,
        "batch_size": arguments.batch_size,
        "rounds": arguments.rounds,
    }


def shown(row: dict[str, Any]) -> str:
    """Return a row of the table as text."""
    what = f"{row['precision']:>9}  {row['way']:>8}  {row['network']:>10}"
    if "error" in row:
        return f"{what}  {row['error'][:80]}"
    ratio = row.get("ratio")
    of_twin = f"{ratio['median']:6.2f} ({ratio['lower']:.2f} to {ratio['upper']:.2f})" if ratio else ""
    return f"{what}  {row['milliseconds']['median']:9.2f} ms  {of_twin}"


def main(argv: list[str] | None = None) -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="device to measure on")
    parser.add_argument("--network", default="cnn-9", help="architecture")
    parser.add_argument("--batch-size", type=int, default=128, help="images per step")
    parser.add_argument("--rounds", type=int, default=30, help="measured steps per network")
    parser.add_argument("--warmup", type=int, default=5, help="steps before the first measured one")
    parser.add_argument("--operators", nargs="+", default=list(OPERATORS), choices=OPERATORS, help="operators")
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS, help="precisions")
    parser.add_argument("--ways", nargs="+", default=None, choices=WAYS, help="ways of running; graphs need CUDA")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--smoke", action="store_true", help="tiny networks and two rounds, as a test")
    arguments = parser.parse_args(argv)
    if arguments.ways is None:
        arguments.ways = [way for way in WAYS if way != "graphs" or torch.device(arguments.device).type == "cuda"]
    if arguments.smoke:
        arguments.network, arguments.batch_size, arguments.rounds, arguments.warmup = "cnn-3", 2, 2, 0
    table = {"environment": environment(arguments), "rows": measure(arguments)}
    print("precision       way     network           step   / CNN twin: median (quartiles)")
    for row in table["rows"]:
        print(shown(row))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
