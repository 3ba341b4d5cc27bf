"""Time and memory of networks relative to their CNN twins.

Networks alternate in one process, and only times of the same round are compared, so that a slow phase of the machine
affects both sides of a ratio. Peak memory is the sum of all tensor allocations. As a baseline, sphere layers can be
computed with the formula of the authors' released code.
"""

from __future__ import annotations

import copy
import gc
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from spherenet.kernels.sphere_conv.native import release_scratch
from spherenet.layers import SphereConv2d, SphereLinear
from spherenet.models import create_model
from spherenet.optim import param_groups

__all__ = [
    "Contestant",
    "Row",
    "Spread",
    "autocast",
    "compare",
    "contestants",
    "hardware",
    "paired_ratios",
    "peak_bytes",
    "take_turns",
    "training_or_inference",
    "with_authors_formula",
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
        """Return median and quartiles of at least two measurements."""
        lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
        return Spread(median, lower, upper, len(values))


def take_turns(
    contestants: Mapping[str, Callable[[], object]], rounds: int, warmup: int, device: str = "cpu"
) -> Iterator[dict[str, float]]:
    """Time functions alternately and yield the seconds of each per round.

    The order rotates from round to round. Garbage collection is off while functions are timed.

    Args:
        contestants: Functions without arguments, by name.
        rounds: Number of measured rounds.
        warmup: Number of rounds before the measured ones.
        device: Device to synchronize with before and after each call.
    """
    names = list(contestants)
    for _ in range(warmup):
        for run in contestants.values():
            run()
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for index in range(rounds):
            first = index % len(names)
            seconds = {}
            for name in names[first:] + names[:first]:
                _synchronize(device)
                start_time = time.perf_counter()
                contestants[name]()
                _synchronize(device)
                seconds[name] = time.perf_counter() - start_time
            yield {name: seconds[name] for name in names}
    finally:
        if collecting:
            gc.enable()


def paired_ratios(rounds: list[dict[str, float]], name: str, base: str) -> Spread:
    """Return median and quartiles of time(name)/time(base) over the rounds."""
    return Spread.of([seconds[name] / seconds[base] for seconds in rounds])


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.get_device_module(device).synchronize()


def peak_bytes(run: Callable[[], object], device: str = "cpu") -> int:
    """Return the peak memory of tensors during a call, in bytes above the memory allocated before.

    On the CPU, all allocations and releases reported by torch are added up. The result is exact and independent of
    earlier allocations, but does not include scratch memory of vendor libraries. On other devices, the device's
    counter is used.
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
    allocated = peak = 0
    assert profiler.profiler is not None
    kineto = profiler.profiler.kineto_results
    assert kineto is not None
    events = [event for event in kineto.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak


TWIN, ENGINE_TWIN = "cnn", "cnn, winograd"
"""Names of the CNN twin with torch's convolutions and with the engine of sphere layers (`FastConv2d`)."""


@dataclass(frozen=True)
class Contestant:
    """One network of a comparison: its name, arguments of `create_model`, and whether to use the authors' formula."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    authors: bool = False


@dataclass(frozen=True)
class Row:
    """Measurements of one network; ratios are relative to the CNN twin in the same round."""

    name: str
    mode: str
    milliseconds: Spread
    time_ratio: Spread
    engine_ratio: Spread | None
    """Time relative to the CNN twin on the engine of sphere layers; None if that was not measured."""

    peak_megabytes: float
    memory_ratio: float

    def as_dict(self) -> dict[str, Any]:
        """Return the row as a dictionary for JSON."""
        return asdict(self)


def contestants(
    operators: Iterable[str], *, sphere_norm: bool = False, authors: bool = False, engine: bool = False
) -> list[Contestant]:
    """Return the networks of a comparison: the CNN twin first, then one or more per operator.

    Args:
        operators: Names of operators.
        engine: Whether to add the CNN twin on the engine of sphere layers.
        sphere_norm: Whether to add each operator without BatchNorm.
        authors: Whether to add each operator with the formula of the authors' code.
    """
    networks = [Contestant(TWIN, {"operator": None})]
    if engine:
        networks.append(Contestant(ENGINE_TWIN, {"operator": None, "engine": "winograd"}))
    for operator in operators:
        networks.append(Contestant(operator, {"operator": operator}))
        if sphere_norm:
            networks.append(
                Contestant(f"{operator}, no BatchNorm", {"operator": operator, "batch_norm": False, "center": None})
            )
        if authors:
            networks.append(Contestant(f"{operator}, authors' formula", {"operator": operator}, authors=True))
    return networks


def compare(
    network: str,
    networks: list[Contestant],
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
    """Measure networks on the same random images.

    Args:
        network: Name of the architecture.
        networks: The networks; the first must be the CNN twin.
        mode: "train" (forward, backward, Adam) or "inference" (eval mode, no gradients).
        batch_size: Images per batch.
        rounds: Number of measured rounds.
        warmup: Number of rounds before the measured ones.
        device: Device to run on.
        precision: "float32", or a half precision for autocast.
        progress: Wrapper of the rounds, such as a progress bar.
        **model_options: Further arguments of `create_model`.
    """
    options = {"mode": mode, "batch_size": batch_size, "device": device, "precision": precision, **model_options}
    runs = {c.name: training_or_inference(network, c, **options) for c in networks}
    measured = list(progress(take_turns(runs, rounds, warmup, device)))
    memory = {}
    for name, run in runs.items():
        release_scratch()  # otherwise only the first network would be charged for it
        memory[name] = peak_bytes(run, device)
    return [
        Row(
            name,
            mode,
            Spread.of([1e3 * seconds[name] for seconds in measured]),
            paired_ratios(measured, name, TWIN),
            paired_ratios(measured, name, ENGINE_TWIN) if ENGINE_TWIN in runs else None,
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
    """Return one training step or one forward pass of a new network as a function without arguments."""
    torch.manual_seed(0)
    classifier = create_model(network, **{**model_options, **contestant.options})
    model: nn.Module = with_authors_formula(classifier) if contestant.authors else classifier
    model = model.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    shape = (batch_size, classifier.config["in_channels"], *classifier.config["input_size"])
    images = torch.randn(shape, device=device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(classifier.config["num_classes"], (batch_size,), device=device)
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
    """Return the autocast context of a precision; a null context for float32."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(torch.device(device).type, getattr(torch, precision))


def hardware(device: str = "cpu") -> dict[str, Any]:
    """Return what measurements depend on: processor, threads and versions."""
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


def with_authors_formula(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose sphere layers use the formula of the authors' released code.

    The patch norm is a convolution of x² with a kernel of ones over all channels; acos and exp are separate passes.
    Groups, padding modes other than zeros and rescaling are not supported.
    """
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, SphereConv2d):
                setattr(module, name, _AuthorsConv2d(child))
            elif isinstance(child, SphereLinear):
                setattr(module, name, _AuthorsLinear(child))
    return model


class _AuthorsConv2d(nn.Module):
    def __init__(self, layer: SphereConv2d) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        layer = self.layer
        geometry: Any = (layer.stride, layer.padding, layer.dilation)
        ones = torch.ones_like(layer.weight[:1])
        patch_norm = torch.sqrt(F.conv2d(x * x, ones, None, *geometry) + layer.eps)
        weight_norm = torch.sqrt((layer.weight * layer.weight).sum((1, 2, 3)) + layer.eps)
        product = F.conv2d(x, layer.weight, None, *geometry)
        return _authors_g(product / patch_norm / weight_norm[:, None, None], layer)


class _AuthorsLinear(nn.Module):
    def __init__(self, layer: SphereLinear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        layer = self.layer
        norm = torch.sqrt((x * x).sum(1, keepdim=True) + layer.eps)
        weight_norm = torch.sqrt((layer.weight * layer.weight).sum(1) + layer.eps)
        return _authors_g(F.linear(x, layer.weight) / norm / weight_norm, layer)


def _authors_g(cosine: Tensor, layer: Any) -> Tensor:
    """Return g(θ) of Eq. 1, computed through acos."""
    if layer.operator == "cosine":
        return cosine
    # The released code does not clamp. Without it, training ends at the first NaN.
    theta = torch.acos(cosine.clamp(-1 + 1e-7, 1 - 1e-7))
    if layer.operator == "linear":
        return 1 - 2 / math.pi * theta
    k = layer.k if isinstance(layer.k, Tensor) else torch.tensor(layer.k, dtype=cosine.dtype)
    k = k.reshape(-1, *(1,) * (cosine.dim() - 2))
    scale = (1 + torch.exp(-math.pi / (2 * k))) / (1 - torch.exp(-math.pi / (2 * k)))
    u = torch.exp(theta / k - math.pi / (2 * k))
    return scale * (1 - u) / (1 + u)
