"""All workloads of docs/performance.md: networks of several sizes, recurrent layers, and the first training step."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from spherenet.bench.networks import (
    ENGINE_TWIN,
    TWIN,
    Row,
    Spread,
    compare,
    contestants,
    hardware,
    paired_ratios,
    take_turns,
)
from spherenet.kernels.dispatch import implementation_name
from spherenet.layers import SphereGRU, SphereLSTM

__all__ = ["WORKLOADS", "Workload", "has_bfloat16", "run_suite"]

OPERATORS = ("cosine", "linear", "sigmoid", "learnable")
ShowRounds = Callable[[Iterator[dict[str, float]], int, str], Iterable[dict[str, float]]]


FULL_WIDTH, HALF_WIDTH = (64, 96, 128), (32, 48, 64)


@dataclass(frozen=True)
class Workload:
    """One network at one size, with the largest acceptable time ratio to its CNN twin per operator."""

    name: str
    targets: dict[str, float]
    mode: str = "train"
    widths: tuple[int, int, int] = FULL_WIDTH
    batch_size: int = 128
    size: int = 32
    precision: str = "float32"
    repeats: int = 1
    """Factor for the number of rounds; short steps need more."""

    network: str = "cnn-9"


WORKLOADS = (
    Workload(
        "training, 64/96/128, batch 128, 32×32",
        {"cosine": 0.62, "linear": 0.63, "sigmoid": 0.66, "learnable": 0.70, "cosine, no BatchNorm": 0.55},
    ),
    Workload(
        "training, 32/48/64, batch 128, 32×32",
        {"cosine": 0.68, "linear": 0.70, "sigmoid": 0.76, "learnable": 0.80},
        widths=HALF_WIDTH,
    ),
    Workload(
        "training, 16/24/32, batch 64, 16×16",
        {"cosine": 1.05, "linear": 1.08, "sigmoid": 1.12, "learnable": 1.20},
        widths=(16, 24, 32),
        batch_size=64,
        size=16,
        repeats=6,
    ),
    Workload(
        "training, bfloat16, 64/96/128, batch 128, 32×32",
        {"cosine": 1.15, "linear": 1.18, "sigmoid": 1.25, "learnable": 1.30},
        precision="bfloat16",
    ),
    Workload(
        "inference, 64/96/128, batch 128, 32×32",
        {"cosine": 0.55, "linear": 0.56, "sigmoid": 0.60, "learnable": 0.60},
        mode="inference",
    ),
    Workload("resnet-32, training, 64/96/128, batch 128, 32×32", {"cosine": 0.65}, network="resnet-32"),
)


def has_bfloat16() -> bool:
    """Return whether the processor supports bfloat16; otherwise torch emulates its convolutions."""
    try:
        with open("/proc/cpuinfo") as file:
            flags = file.read()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def run_suite(rounds: int, progress: ShowRounds, workloads: Iterable[Workload] = WORKLOADS) -> dict[str, Any]:
    """Measure workloads on the CPU and return the results as JSON values.

    Args:
        rounds: Measured rounds per network.
        progress: Wrapper of the rounds of a workload, called with the rounds, their number and the workload's name.
        workloads: Workloads to measure.
    """
    results = []
    for workload in workloads:
        entry: dict[str, Any] = {"workload": workload.name, "targets": workload.targets}
        if workload.precision == "bfloat16" and not has_bfloat16():
            entry["skipped"] = "this processor does not support bfloat16"
        else:
            entry["rows"] = [row.as_dict() for row in _rows(workload, rounds, progress)]
        results.append(entry)
    return {
        **hardware(),
        "implementation": implementation_name("cpu"),
        "rounds": rounds,
        "workloads": results,
        "recurrent": _recurrent(rounds, progress),
        "first_step": {name: _first_step(name) for name in ("none", *OPERATORS)},
    }


def _rows(workload: Workload, rounds: int, progress: ShowRounds) -> list[Row]:
    total = rounds * workload.repeats
    networks = contestants(
        OPERATORS,
        sphere_norm=any("BatchNorm" in name for name in workload.targets),
        engine=workload.precision == "float32",
    )
    return compare(
        workload.network,
        [contestant for contestant in networks if contestant.name in (TWIN, ENGINE_TWIN, *workload.targets)],
        mode=workload.mode,
        batch_size=workload.batch_size,
        rounds=total,
        precision=workload.precision,
        progress=lambda measured: progress(measured, total, workload.name),
        widths=workload.widths,
        input_size=(workload.size, workload.size),
    )


def _recurrent(rounds: int, progress: ShowRounds) -> list[dict[str, Any]]:
    """Measure training of recurrent layers (sequence 100, batch 64, hidden 128) relative to torch's layers."""
    entries = []
    for name, plain, sphere in (("SphereLSTM", nn.LSTM, SphereLSTM), ("SphereGRU", nn.GRU, SphereGRU)):
        torch.manual_seed(0)
        sequence = torch.randn(100, 64, 128)
        runs = {"torch": _training(plain(128, 128), sequence), name: _training(sphere(128, 128), sequence)}
        measured = list(progress(take_turns(runs, 2 * rounds, 2), 2 * rounds, name))
        milliseconds = Spread.of([1e3 * seconds[name] for seconds in measured])
        ratio = paired_ratios(measured, name, "torch")
        entries.append({"name": name, "milliseconds": asdict(milliseconds), "time_ratio": asdict(ratio)})
    return entries


def _training(layer: nn.Module, sequence: torch.Tensor) -> Callable[[], object]:
    def run() -> None:
        layer.zero_grad()
        layer(sequence)[0].square().mean().backward()

    return run


_FIRST_STEP = """
import time, torch
from spherenet.models import create_model
torch.manual_seed(0)
model = create_model("cnn-9", operator={operator!r}, widths=(16, 24, 32), input_size=(16, 16))
images, labels = torch.randn(64, 3, 16, 16), torch.randint(10, (64,))
start = time.perf_counter()
model(images, labels)[0].backward()
print(time.perf_counter() - start)
"""


def _first_step(name: str, processes: int = 5) -> dict[str, float]:
    """Measure the seconds of the first training step in new processes."""
    code = _FIRST_STEP.format(operator=None if name == "none" else name)
    seconds = []
    for _ in range(processes):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
        seconds.append(float(done.stdout))
    return asdict(Spread.of(seconds))
