"""Checkpoints of a trainer: its state as tensors and JSON, written and restored, by one process or by all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch import Tensor

from spherenet.errors import CheckpointError
from spherenet.kernels.dispatch import implementation_name
from spherenet.runs import Checkpoint
from spherenet.training.distributed_checkpoints import load_distributed, save_distributed
from spherenet.training.state import (
    Progress,
    load_model_tensors,
    load_optimizer_tensors,
    optimizer_tensors,
    require_number,
)

if TYPE_CHECKING:
    from spherenet.training.trainer import Trainer

__all__ = ["restore", "snapshot", "write"]


def snapshot(trainer: Trainer) -> tuple[dict[str, Mapping[str, Tensor]], dict[str, Any]]:
    """Return the tensors and the JSON state from which `restore` continues. All processes of a sharded run call it."""
    tensors: dict[str, Mapping[str, Tensor]] = {
        "model": trainer.model.state_dict(),
        "optimizer": optimizer_tensors(trainer.optimizer, trainer.model),
    }
    if trainer.config.average_weights:  # the average is what other commands load
        tensors |= {"model": trainer.average.state_dict(), "trained": tensors["model"]}
    if trainer.kept_norms is not None:
        tensors["kept_norms"] = trainer.kept_norms.state_dict()
    if lagging := trainer.protocols.state_dict():
        tensors["lagging"] = lagging
    state: dict[str, Any] = {
        "progress": asdict(trainer.progress),
        "world": trainer.processes.world,
        "implementation": implementation_name(trainer.processes.device.type),
    }
    if trainer.scaler.is_enabled():
        state["scaler"] = trainer.scaler.state_dict()
    return tensors, state


def write(
    trainer: Trainer, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any], *, best: bool = False
) -> None:
    """Write a checkpoint, in the main process or, if weights are sharded, in all processes."""
    checkpoint = Checkpoint(trainer.step, tensors, state)
    if trainer.sharded:
        save_distributed(trainer.run_directory, checkpoint, trainer.processes, best=best)
    elif trainer.processes.is_main:
        trainer.run_directory.save(checkpoint, best=best)


def restore(trainer: Trainer) -> list[str]:
    """Load the newest valid checkpoint into a trainer, if there is one, and return what `Trainer.resume` returns."""
    run, model, optimizer = trainer.run_directory, trainer.model, trainer.optimizer
    if trainer.sharded:
        checkpoint, warnings = load_distributed(run, model, trainer.processes)
    else:
        checkpoint, warnings = run.newest_checkpoint()
    if checkpoint is None:
        if warnings:
            raise CheckpointError(f"{run.path} has no valid checkpoint: {warnings[0]}")
        return ["there is no checkpoint yet: the run starts from the beginning."]
    source = f"the checkpoint of step {checkpoint.step}"
    average = checkpoint.tensors.get("model", {})
    trained = checkpoint.tensors.get("trained")  # only if weights were averaged
    load_model_tensors(model, average if trained is None else trained, source)
    warnings += trainer.average.load_state_dict(None if trained is None else average, source)
    warnings += load_optimizer_tensors(optimizer, model, checkpoint.tensors.get("optimizer", {}), source)
    if trainer.kept_norms is not None:
        trainer.kept_norms.load_state_dict(checkpoint.tensors.get("kept_norms", {}))
    warnings += trainer.protocols.load_state_dict(checkpoint.tensors.get("lagging", {}), source)
    scaler = trainer.scaler
    if scaler.is_enabled() and "scaler" in checkpoint.state:  # absent if the precision was changed
        scaling = checkpoint.state["scaler"]
        scaler.load_state_dict({name: require_number(scaling, name) for name in scaler.state_dict()})
    trainer.progress = Progress.from_state(checkpoint.state)
    trainer.step = checkpoint.step
    before, now = checkpoint.state.get("implementation"), implementation_name(trainer.processes.device.type)
    if isinstance(before, str) and before != now:
        warnings.append(
            f"{source} was computed by the implementation {before[:40]!r}, now {now!r} is used: "
            "results differ by rounding from those of an uninterrupted run."
        )
    return warnings
