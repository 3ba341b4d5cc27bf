"""A network of any operator against its CNN twin: whole training step, inference, peak memory."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from spherenet.bench.authors import as_authors_wrote_it
from spherenet.bench.memory import peak_bytes
from spherenet.bench.timing import Spread, paired_ratios, take_turns
from spherenet.kernels.native import release_scratch
from spherenet.models import create_model
from spherenet.optim import param_groups

__all__ = ["Contestant", "Row", "compare", "contestants", "hardware", "training_or_inference"]

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
    found = [Contestant(TWIN)]
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
