"""A whole training run from its configuration: new, resumed, or under torchrun."""

from __future__ import annotations

import hashlib
import platform
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spherenet import __version__
from spherenet.data import Dataset
from spherenet.errors import RunError
from spherenet.kernels.dispatch import implementation_name
from spherenet.runs import RunDirectory
from spherenet.training import Outcome, Processes, Reporter, StopSignals, Trainer
from spherenet.training.build import (
    augmentation_of,
    build_data,
    build_model,
    build_penalty,
    build_settings,
    iteration_setter,
)
from spherenet.training.config import FREE, TrainConfig
from spherenet.training.probes import Observation
from spherenet.training.saved_runs import config_of, data_record, require_same_data, start_from

__all__ = ["new_output", "train"]

DownloadProgress = Callable[[int, int], None]


def train(
    config: TrainConfig,
    output: str | Path,
    *,
    resume: bool = False,
    allow_changes: bool = False,
    reporter: Reporter | None = None,
    download_progress: DownloadProgress | None = None,
) -> Outcome:
    """Train as configured and write the run to `output`; with resume, go on with the run that is there.

    A run goes on only with the configuration and the number of processes it was begun with, unless changes are
    allowed; what does not change its result (`FREE`) may differ.

    Raises RunError where the folder is in use, taken or not writable, DataError, CheckpointError and TrainingError
    as their names say, and ValueError or TypeError for a wrong configuration. Nothing is written before
    configuration and data are known to be good.
    """
    if config.threads is not None:
        if config.threads < 1:
            raise ValueError(f"threads must be at least 1, got {config.threads}.")
        torch.set_num_threads(config.threads)
    settings = build_settings(config)
    augmentation = augmentation_of(config)
    with StopSignals() as stop, Processes.joined(config.device, config.timeout) as processes:
        processes.require_same({**_that_matter(config), "resume": resume, "allow_changes": allow_changes})
        dataset = _load_data(config, processes, download_progress)
        listener = reporter if reporter is not None and processes.is_main else Reporter()
        run = RunDirectory.open(output) if resume else RunDirectory(Path(output))

        def prepare() -> Trainer:
            model = build_model(config, dataset)
            set_iteration = iteration_setter(config, model)
            if config.init_from is not None and not run.checkpoints.paths():
                for message in start_from(model, config.init_from):
                    listener.warned(message)
            if resume and not allow_changes:
                _require_same(run, config, processes)
                require_same_data(run.config, dataset, "restore them, or say --allow-changes")
            return Trainer(
                model,
                dataset.train,
                dataset.test,
                len(dataset.classes),
                settings,
                processes,
                run,
                augmentation=augmentation,
                penalty=build_penalty(config, model),
                keep_weight_norms=config.keep_norms,
                before_step=set_iteration,
                observe=Observation(listener.warned) if config.observe else None,
                reporter=reporter,
            )

        trainer = processes.in_all(prepare)
        processes.require_same(_state_of(trainer, dataset))
        description = describe(config, dataset, trainer.model, processes)
        with _held(run, None if resume else description, processes):
            if resume:
                for message in processes.in_all(trainer.resume):
                    listener.warned(message)
                processes.require_same(_state_of(trainer, dataset))
                if processes.is_main:
                    run.cut_back(trainer.step)
                    # A run that is resumed as it was started keeps its description, the first command included.
                    if allow_changes:
                        run.write_config(description)
            outcome = trainer.train(stop)
            if outcome.signal is None and processes.is_main:
                run.write_summary(_summary(outcome, config, dataset, trainer.model))
        return outcome


def _that_matter(config: TrainConfig) -> dict[str, Any]:
    """The options that decide what a run computes, all but those that may differ between machines."""
    return {name: value for name, value in config.as_dict().items() if name not in FREE}


def _state_of(trainer: Trainer, dataset: Dataset) -> dict[str, Any]:
    """What must be the same in all processes before the first step, besides the options."""
    record = data_record(dataset)
    weights = hashlib.sha256()
    for name, tensor in trainer.model.state_dict().items():
        weights.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        weights.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return {
        "the classes": record["classes"],
        "the training data": record["train"],
        "the test data": record["test"],
        "the resumed step": trainer.step,
        "the weights": weights.hexdigest(),
        "the version of torch": torch.__version__,
    }


def _load_data(config: TrainConfig, processes: Processes, progress: DownloadProgress | None) -> Dataset:
    """One process downloads; the others find what it brought."""
    if processes.world > 1:
        processes.from_main(lambda: build_data(config, progress) and None, patient=True)
        progress = None
    return processes.in_all(lambda: build_data(config, progress))


@contextmanager
def _held(run: RunDirectory, new: dict[str, Any] | None, processes: Processes) -> Iterator[None]:
    """Hold the run directory in the main process; an error there is an error in all.

    new: the description of a new run, whose folder is made with it.
    """
    with ExitStack() as held:

        def begin() -> None:
            if new is not None:
                RunDirectory.create(run.path)
            held.enter_context(run.locked())
            try:
                if new is not None:
                    RunDirectory.create(run.path)  # once more: somebody may have been faster
                    run.write_config(new)
                run.clean()
            except OSError as error:
                raise RunError(f"{run.path} is not writable ({error.strerror}).") from None

        processes.from_main(begin)
        yield


def _require_same(run: RunDirectory, config: TrainConfig, processes: Processes) -> None:
    """Refuse to go on with another configuration or another number of processes."""
    description = run.config
    before = config_of(run).as_dict()
    changed = [name for name, value in config.as_dict().items() if name not in FREE and before[name] != value]
    if changed:
        name = changed[0]
        raise RunError(
            f"{run.path} was begun with {name} = {before[name]!r}, not {getattr(config, name)!r}: "
            f"leave it, or say --allow-changes to go on with {', '.join(changed)} changed."
        )
    if description.get("processes") != processes.world:
        raise RunError(
            f"{run.path} was begun with {description.get('processes')} processes, not {processes.world}: "
            "start as many, or say --allow-changes; the result then differs by rounding."
        )


def describe(config: TrainConfig, dataset: Dataset, model: nn.Module, processes: Processes) -> dict[str, Any]:
    """What config.json holds: all that is needed to run it again and to use its weights."""
    return {
        "format": 1,
        "train": config.as_dict(),
        "model": model.config,
        "classes": list(dataset.classes),
        "preprocessing": dataset.preprocessing.as_dict(),
        "data": data_record(dataset),
        "pictures": {"train": len(dataset.train), "test": len(dataset.test)},
        "processes": processes.world,
        "started": datetime.now(timezone.utc).date().isoformat(),
        "command": ["spherenet", *sys.argv[1:]],
        "versions": {"spherenet": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "implementation": implementation_name(processes.device.type),
        "hardware": {
            "device": str(processes.device),
            "processor": _processor(processes.device),
            "threads": torch.get_num_threads(),
            "system": platform.system(),
        },
    }


def _processor(device: torch.device) -> str:
    """The name of the GPU or CPU that computes, as far as the system tells it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        found = re.search(r"^model name\s*: *(.+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:  # not on Linux
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def _summary(outcome: Outcome, config: TrainConfig, dataset: Dataset, model: nn.Module) -> dict[str, Any]:
    return {
        "iterations": outcome.step,
        "accuracy": outcome.accuracy,
        "best_accuracy": outcome.best_accuracy,
        "best_step": outcome.best_step,
        "test_pictures": len(dataset.test),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": round(outcome.seconds, 3),
        "peak_megabytes": round(_peak_megabytes()),
        "seed": config.seed,
    }


def _peak_megabytes() -> float:
    """The most memory that this process, or its part of a GPU, has held."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated() / 2**20
    try:
        import resource
    except ImportError:  # not on Windows
        return 0.0
    unit = 2**20 if sys.platform == "darwin" else 2**10  # bytes there, kilobytes elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def new_output(config: TrainConfig, parent: str | Path = "runs") -> Path:
    """A free folder named after what is trained: runs/mnist5k-cnn-3-sigmoid, then …-2, …-3."""
    name = f"{config.data}-{config.model}-{config.operator or 'none'}"
    if config.loss != "softmax":
        name += f"-{config.loss}"
    parent = Path(parent)
    taken = {1}
    if parent.is_dir():
        pattern = re.compile(re.escape(name) + r"(?:-(\d+))?")
        found = [match for entry in parent.iterdir() if (match := pattern.fullmatch(entry.name))]
        if not found:
            return parent / name
        taken |= {int(match[1] or 1) for match in found}
        return parent / f"{name}-{max(taken) + 1}"
    return parent / name
