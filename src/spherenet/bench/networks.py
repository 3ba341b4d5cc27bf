"""Fair timing on a noisy machine: contestants take turns in one process, and only ratios of neighbours are compared.

Peak memory of tensors during a call, counted allocation by allocation.

A network of any operator against its CNN twin: whole training step, inference, peak memory.
"""

from __future__ import annotations

import gc
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from spherenet.bench.authors import as_authors_wrote_it
from spherenet.kernels.native import release_scratch
from spherenet.models import create_model
from spherenet.optim import param_groups

__all__ = [
    "Contestant",
    "Row",
    "Spread",
    "compare",
    "contestants",
    "hardware",
    "paired_ratios",
    "peak_bytes",
    "take_turns",
    "training_or_inference",
]


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles over n measurements."""

    median: float
    lower: float
    upper: float
    n: int

    @staticmethod
    def of(values: list[float]) -> Spread:
        """Summarise measurements; needs two at least."""
        lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
        return Spread(median, lower, upper, len(values))


def take_turns(
    contestants: Mapping[str, Callable[[], object]], rounds: int, warmup: int, device: str = "cpu"
) -> Iterator[dict[str, float]]:
    """Yield one dictionary of seconds a round; the order turns from round to round, so nobody always goes first."""
    names = list(contestants)
    for _ in range(warmup):
        for run in contestants.values():
            run()
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for index in range(rounds):
            start = index % len(names)
            seconds = {}
            for name in names[start:] + names[:start]:
                _wait_for(device)
                begin = time.perf_counter()
                contestants[name]()
                _wait_for(device)
                seconds[name] = time.perf_counter() - begin
            yield {name: seconds[name] for name in names}
    finally:
        if collecting:
            gc.enable()


def paired_ratios(rounds: list[dict[str, float]], name: str, base: str) -> Spread:
    """Summarise time(name)/time(base) round by round: what slows a whole round slows both."""
    return Spread.of([seconds[name] / seconds[base] for seconds in rounds])


def _wait_for(device: str) -> None:
    if device != "cpu":
        torch.get_device_module(device).synchronize()


def peak_bytes(run: Callable[[], object], device: str = "cpu") -> int:
    """Return the most bytes of tensors that `run` held at once, beyond what was allocated before.

    On the CPU every allocation and release that torch reports is added up, which is exact and does not depend on
    what the process held before; scratch space inside vendor libraries is not seen. Elsewhere the device's own
    counter is read.
    """
    if device != "cpu":
        module = torch.get_device_module(device)
        module.synchronize()
        module.reset_peak_memory_stats()
        before = module.memory_allocated()
        run()
        module.synchronize()
        return int(module.max_memory_allocated() - before)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        run()
    held = peak = 0
    assert profiler.profiler is not None
    kineto = profiler.profiler.kineto_results
    assert kineto is not None
    events = [event for event in kineto.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


TWIN = "cnn"


@dataclass(frozen=True)
class Contestant:
    """One network in the comparison: its name in the table and the arguments of `create_model`."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    authors: bool = False


@dataclass(frozen=True)
class Row:
    """What was measured of one network; ratios are to the CNN twin in the same round."""

    name: str
    mode: str
    milliseconds: Spread
    time_ratio: Spread
    peak_megabytes: float
    memory_ratio: float

    def as_dict(self) -> dict[str, Any]:
        """The row as JSON takes it."""
        return asdict(self)


def contestants(operators: Iterable[str], *, sphere_norm: bool = False, authors: bool = False) -> list[Contestant]:
    """The CNN twin first, then each operator, by request without BatchNorm and as the authors wrote it."""
    found = [Contestant(TWIN, {"operator": None})]
    for operator in operators:
        found.append(Contestant(operator, {"operator": operator}))
        if sphere_norm:
            found.append(Contestant(f"{operator}, no BatchNorm", {"operator": operator, "batch_norm": False}))
        if authors:
            found.append(Contestant(f"{operator}, authors' formula", {"operator": operator}, authors=True))
    return found


def compare(
    network: str,
    field_: list[Contestant],
    *,
    mode: str,
    batch_size: int,
    rounds: int,
    warmup: int = 2,
    device: str = "cpu",
    precision: str = "float32",
    progress: Callable[[Iterator[dict[str, float]]], Iterable[dict[str, float]]] = iter,
    **model_options: Any,
) -> list[Row]:
    """Measure every contestant on the same random images; the first must be the CNN twin.

    mode: "train" (forward, backward, Adam) or "inference" (eval, no gradients). progress: wraps the rounds.
    """
    options = {"mode": mode, "batch_size": batch_size, "device": device, "precision": precision, **model_options}
    runs = {c.name: training_or_inference(network, c, **options) for c in field_}
    rounds_seen = list(progress(take_turns(runs, rounds, warmup, device)))
    memory = {}
    for name, run in runs.items():
        release_scratch()  # so that it counts for those who use it
        memory[name] = peak_bytes(run, device)
    return [
        Row(
            name,
            mode,
            Spread.of([1e3 * seconds[name] for seconds in rounds_seen]),
            paired_ratios(rounds_seen, name, TWIN),
            memory[name] / 2**20,
            memory[name] / memory[TWIN],
        )
        for name in runs
    ]


def training_or_inference(
    network: str,
    contestant: Contestant,
    *,
    mode: str,
    batch_size: int,
    device: str,
    precision: str = "float32",
    **model_options: Any,
) -> Callable[[], object]:
    """One training step or one prediction of a fresh network, as a function without arguments."""
    torch.manual_seed(0)
    made = create_model(network, **{**model_options, **contestant.options})
    size = made.config["input_size"]
    model: nn.Module = as_authors_wrote_it(made) if contestant.authors else made
    model = model.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.randn(batch_size, made.config["in_channels"], *size, device=device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(made.config["num_classes"], (batch_size,), device=device)
    if mode == "inference":
        model.eval()

        def predict() -> Tensor:
            with torch.no_grad(), autocast(device, precision):
                scores: Tensor = model(images)
                return scores

        return predict
    optimizer = torch.optim.Adam(param_groups(model, 5e-4), lr=1e-3, fused=True)

    def train() -> Tensor:
        optimizer.zero_grad()
        with autocast(device, precision):
            loss: Tensor = model(images, labels)[0]
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return train


def autocast(device: str, precision: str) -> AbstractContextManager[object]:
    """The context in which a network computes in a precision; float32 is as it is."""
    return nullcontext() if precision == "float32" else torch.autocast(device, getattr(torch, precision))


def hardware(device: str = "cpu") -> dict[str, Any]:
    """What a number depends on: processor, threads, versions."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            name = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), name)
    except OSError:
        pass
    if device != "cpu":
        name = torch.get_device_module(device).get_device_name()
    return {
        "processor": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
    }
