"""The plan of a grid before its first run: the data it needs, the commands of its runs, and an estimate of its time."""

from __future__ import annotations

import os
import shlex
import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from spherenet.cli.plugin import as_number, plain
from spherenet.data import DATASETS, find_dataset
from spherenet.errors import DataError, RunError, SphereNetError
from spherenet.models import create_model
from spherenet.runs import RunDirectory
from spherenet.training import TrainConfig, build_data
from spherenet_paper.experiments.jobs import Job

__all__ = ["Estimate", "NeededData", "check_data", "dry_run", "estimate", "needed_data", "shell_command",
           "training_seconds"]  # fmt: skip

SECONDS_PER_OPERATION, SECONDS_PER_VALUE, SECONDS_PER_LAYER = 5e-12, 1e-8, 3e-3
"""Seconds of one core per floating point operation, per output value of a layer, and per layer and step.

They are fitted to the runs of the presets cpu and cpu-32 in results: the median ratio of estimated to measured seconds
is 1, and eight of ten ratios are between 0.5 and 2."""

BASIS = "constants fitted to the stored runs of the preset cpu, right within a factor of 2 for eight of ten of them"

DOWNLOADS = ("cifar10", "cifar100")


@dataclass(frozen=True)
class NeededData:
    """A data set that runs of a grid need.

    Attributes:
        config: Configuration of the first run that needs it.
        runs: Number of runs that need it.
        location: File or folder that holds it, None if it is missing.
    """

    config: TrainConfig
    runs: int
    location: Path | None

    @property
    def description(self) -> str:
        """Name, location, and what happens if the data are missing."""
        if self.location is not None:
            where = f"found at {self.location}"
        elif self.config.data == "mnist5k":
            where = "included in the package"
        elif self.config.data in DOWNLOADS and self.config.download:
            where = "missing; it is downloaded before the first run"
        else:
            where = "missing"
        return f"{self.config.data} ({self.runs} run{'s' if self.runs > 1 else ''}): {where}"


def needed_data(jobs: Sequence[Job]) -> list[NeededData]:
    """Return the data sets of jobs. Nothing is read or downloaded."""
    groups: dict[tuple[str, str | None], list[TrainConfig]] = {}
    for job in jobs:
        groups.setdefault((job.config.data, job.config.data_dir), []).append(job.config)
    return [NeededData(configs[0], len(configs), find_dataset(*key)) for key, configs in groups.items()]


def check_data(jobs: Sequence[Job], progress: Callable[[int, int], None] | None = None) -> None:
    """Read the data sets of jobs, after a download if it is necessary, so that no run fails because of them.

    Args:
        jobs: Jobs that will run.
        progress: Function (bytes done, bytes in total) that is called during a download.

    Raises:
        DataError: If a data set is missing or corrupt. The message says how many runs need it.
    """
    for needed in needed_data(jobs):
        try:
            build_data(needed.config, progress)
        except DataError as error:
            raise DataError(f"no run was started: {needed.runs} need {needed.config.data}, but {error}") from None


def shell_command(job: Job, processes: int = 1) -> str:
    """Return the command of a run, quoted for a shell.

    Args:
        job: Run of a grid.
        processes: Processes of the run; more than one uses torchrun.
    """
    torchrun = ["torchrun", "--standalone", f"--nproc-per-node={processes}", "-m"]
    return shlex.join([*(torchrun if processes > 1 else []), "spherenet", *job.arguments()])


def dry_run(title: str, jobs: Sequence[Job], at_once: int = 1, processes: int = 1, threads: int = 1) -> str:
    """Return a shell script with the commands of a grid. Comments state its data and an estimate of its time.

    Args:
        title: Title of the grid.
        jobs: Jobs of the grid.
        at_once: Runs at the same time.
        processes: Processes per run.
        threads: Threads per process.
    """
    commands: list[str] = []
    states = {"done": 0, "to resume": 0, "to start": 0, "that cannot run": 0}
    for job in sorted(jobs, key=lambda job: job.after is not None):  # the order in which they run
        try:
            done = job.is_done()
        except SphereNetError as error:
            states["that cannot run"] += 1
            commands.append(f"# {plain(job.name)} cannot run: {plain(error)}")
            continue
        state = "done" if done else "to resume" if (job.folder / "config.json").exists() else "to start"
        states[state] += 1
        commands.append(f"# done: {plain(job.name)}" if done else shell_command(job, processes))
    counts = ", ".join(f"{count} {state}" for state, count in states.items() if count)
    expected = estimate(jobs)
    here = expected.seconds(at_once, processes * threads)
    lines = [
        f"{title}: {len(jobs)} runs ({counts}), {at_once} at a time",
        *(f"data: {needed.description}" for needed in needed_data(jobs)),
        f"time: about {_duration(here)} on this machine, {_duration(expected.core_seconds)} of one core; an estimate "
        f"for idle CPUs from the size of the networks and {expected.basis}",
    ]
    wrapped = [part for line in lines for part in textwrap.wrap(plain(line), 78, break_on_hyphens=False)]
    return "\n".join([*(f"# {line}" for line in wrapped), f"export OMP_NUM_THREADS={threads}", *commands])


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.{int(seconds < 10 * size)}f} {unit}"
    return f"{round(seconds)} seconds"


@dataclass(frozen=True)
class Estimate:
    """Estimated time of a grid.

    Attributes:
        core_seconds: Seconds on one core.
        basis: What the estimate is based on.
    """

    core_seconds: float
    basis: str

    def seconds(self, at_once: int, threads: int) -> float:
        """Return the seconds on this machine, if its cores are idle and threads share the work without loss."""
        return self.core_seconds / max(1, min(os.cpu_count() or 1, at_once * threads))


def estimate(jobs: Sequence[Job]) -> Estimate:
    """Estimate the time of the jobs that are not finished.

    `training_seconds` of each is multiplied by the median ratio of measured to estimated seconds of the finished jobs.
    """
    ratios: list[float] = []
    remaining = 0.0
    for job in jobs:
        seconds = training_seconds(job.config)
        fraction = 1.0
        with suppress(RunError):
            run = RunDirectory.open(job.folder)
            if run.finished:
                fraction = 0.0
                ratios.append((as_number(run.summary.get("seconds")) or 0.0) * _threads(run) / seconds)
            elif last := run.metrics.tail():
                fraction = max(0.0, 1 - last["step"] / job.config.iterations)
        remaining += fraction * seconds
    if ratios:
        return Estimate(remaining * median(ratios), f"the measured seconds of {len(ratios)} finished runs of this grid")
    return Estimate(remaining, BASIS)


def _threads(run: RunDirectory) -> int:
    hardware = run.config.get("hardware")
    threads = hardware.get("threads") if isinstance(hardware, dict) else None
    return threads if isinstance(threads, int) and threads > 0 else 1


def training_seconds(config: TrainConfig) -> float:
    """Return an estimate of the seconds of a run on one CPU core.

    A training step counts three forward passes; evaluations count if the size of the test set is known. The network
    counts as its CNN twin.
    """
    info = DATASETS[config.data]
    size = (config.image_size, config.image_size) if config.image_size else info.size
    widths = None if config.widths is None else tuple(config.widths)
    cost = _forward_cost(config.model, widths, config.channels or info.channels, size, info.classes or 10)
    if info.train:
        config, _ = config.fitted_to(info.train if config.train_images is None else config.train_images)
    evaluations = -(-config.iterations // config.eval_every)
    tested = (info.train or 0) / config.folds if config.folds else info.test or 0
    images = 3.0 * config.batch_size * config.iterations + evaluations * tested
    per_image = cost.operations * SECONDS_PER_OPERATION + cost.values * SECONDS_PER_VALUE
    return images * per_image + config.iterations * cost.layers * SECONDS_PER_LAYER


class _Cost(NamedTuple):
    """Cost of the forward pass of one image: floating point operations, output values, layers with weights."""

    operations: int
    values: int
    layers: int


@cache
def _forward_cost(
    model: str, widths: tuple[int, ...] | None, channels: int, size: tuple[int, int], classes: int
) -> _Cost:
    with torch.device("meta"):
        network = create_model(model, classes, operator=None, widths=widths, in_channels=channels, input_size=size)
        images = torch.zeros(1, channels, *size)
    outputs: list[int] = []
    for module in network.modules():
        if isinstance(module, (nn.modules.conv._ConvNd, nn.Linear)):
            module.register_forward_hook(lambda module, inputs, output: outputs.append(output.numel()))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network.eval()(images)
    return _Cost(counter.get_total_flops(), sum(outputs), len(outputs))
