"""What a run records of itself: config.json when it starts or is resumed, summary.json when it is complete."""

from __future__ import annotations

import platform
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spherenet import __version__
from spherenet.data import Dataset
from spherenet.errors import RunError
from spherenet.export.description import to_json
from spherenet.kernels.dispatch import implementation_name
from spherenet.runs import RunDirectory
from spherenet.training.config import TrainConfig
from spherenet.training.distributed import Processes
from spherenet.training.state import Outcome
from spherenet.training.trainer import Trainer

__all__ = ["describe", "record_resumption", "resumed_description", "summarize"]


def describe(
    config: TrainConfig,
    dataset: Dataset,
    record: dict[str, Any],
    model: nn.Module,
    processes: Processes,
    command: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return the content of config.json: everything needed to repeat the run and to use its weights."""
    words, today = list(command or ["spherenet", *sys.argv[1:]]), datetime.now(timezone.utc).date().isoformat()
    splits = {"train": dataset.train, "validation": dataset.validation, "test": dataset.test}
    return {
        "format": 1,
        "train": config.as_dict(),
        "model": to_json("model", model.config),
        "classes": list(dataset.classes),
        "preprocessing": dataset.preprocessing.as_dict(),
        "data": record,
        "images": {name: len(split) for name, split in splits.items() if split is not None},
        "processes": processes.world,
        "started": today,
        "command": words,
        "history": [{"command": shlex.join(words), "date": today, "step": 0}],
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
    """Return the name of the GPU or CPU, as far as the system provides it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        match = re.search(r"^model name\s*: *(.+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:  # not on Linux
        match = None
    return match[1] if match else platform.processor() or platform.machine()


def resumed_description(
    before: dict[str, Any], now: dict[str, Any], config: TrainConfig, step: int, *, keep: bool
) -> dict[str, Any]:
    """Return the content of config.json of a run that is resumed: all commands, and what they changed.

    Args:
        before: Content so far. The first command and the date of the start are kept.
        now: Description of the resumed run.
        config: Options of the resumed run.
        step: Step from which it is resumed.
        keep: Whether to keep the rest of the description, e.g. versions, because nothing that matters has changed.
    """
    history, old, new = before.get("history"), before["train"], config.as_dict()
    changes = {name: [old[name], value] for name, value in new.items() if name in old and old[name] != value}
    entry = {**now["history"][0], "step": step, **({"changes": changes} if changes else {})}
    kept: dict[str, Any] = before if keep else {name: before[name] for name in ("started", "command") if name in before}
    return {**now, **kept, "train": new, "history": [*(history if isinstance(history, list) else []), entry]}


def record_resumption(
    run: RunDirectory,
    description: dict[str, Any],
    forget: Callable[[], None],
    *,
    required: bool,
    warn: Callable[[str], None],
) -> None:
    """Write config.json of a run that is resumed. If nothing but the history has changed, the run continues without it.

    `forget` is called when the new file is complete, and before it replaces the old one: a full disk loses no
    checkpoint, and a process that is killed in between leaves none that belongs to other options.

    Raises:
        RunError: If it is required and cannot be written. The run is unchanged then.
    """
    try:
        run.write_config(description, forget)
    except OSError as error:
        message = f"config.json of {run.path} could not be written ({error.strerror})"
        if required:
            raise RunError(f"{message}; the run is unchanged.") from None
        warn(f"{message}: this command is not recorded in its history.")


def summarize(outcome: Outcome, config: TrainConfig, dataset: Dataset, trainer: Trainer) -> dict[str, Any]:
    """Return the content of summary.json."""
    return {
        "iterations": outcome.step,
        "accuracy": outcome.accuracy,
        "balanced_accuracy": outcome.balanced_accuracy,
        "tta_accuracy": outcome.tta_accuracy,
        "best_accuracy": outcome.best_accuracy,
        "best_step": outcome.best_step,
        "stopped_early": outcome.stopped_early,
        "protocol": trainer.protocols.primary,
        "selected_on": "test" if dataset.validation is None else "validation",
        "test_images": len(dataset.test),
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "seconds": round(outcome.seconds, 3),
        "peak_megabytes": round(_peak_megabytes()),
        "seed": config.seed,
    }


def _peak_megabytes() -> float:
    """Return the peak memory of this process, on its GPU if it uses one."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated() / 2**20
    try:
        import resource
    except ImportError:  # not on Windows
        return 0.0
    unit = 2**20 if sys.platform == "darwin" else 2**10  # bytes on macOS, kilobytes elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
