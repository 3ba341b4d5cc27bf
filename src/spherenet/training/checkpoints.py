"""Checkpoints of a trainer: its state as tensors and JSON, written and restored, by one process or by all.

All processes of a sharded run write and read with torch.distributed.checkpoint. Each writes its own part of the tensors
as one safetensors file, whose header states the offsets of the parts. The files of all processes form one checkpoint
with a manifest, which `runs.checkpoints` reads in a single process too. torch's default format would contain pickled
metadata, and reading a pickle can run code.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spherenet.errors import CheckpointError
from spherenet.kernels.dispatch import implementation_name
from spherenet.runs import Checkpoint, RunDirectory
from spherenet.runs.checkpoints import Checkpoints, file_digest, is_distributed, load_checkpoint
from spherenet.training.distributed import Processes
from spherenet.training.sharding import local
from spherenet.training.state import (
    Counters,
    load_model_tensors,
    load_optimizer_tensors,
    optimizer_tensors,
    require_fitting,
    require_number,
)

if TYPE_CHECKING:
    from spherenet.training.trainer import Trainer

__all__ = ["load_distributed", "restore", "save_distributed", "snapshot", "write"]


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
    trainer.progress = Counters.from_state(checkpoint.state)
    trainer.step = checkpoint.step
    before, now = checkpoint.state.get("implementation"), implementation_name(trainer.processes.device.type)
    if isinstance(before, str) and before != now:
        warnings.append(
            f"{source} was computed by the implementation {before[:40]!r}, now {now!r} is used: "
            "results differ by rounding from those of an uninterrupted run."
        )
    return warnings


def save_distributed(run: RunDirectory, checkpoint: Checkpoint, processes: Processes, *, best: bool = False) -> None:
    """Save a checkpoint whose tensors are divided among the processes. All of them must call it.

    Raises:
        CheckpointError: In all processes, if one of them could not write. Earlier checkpoints are unchanged then.
    """
    digests: dict[str, str] = {}
    with ExitStack() as stack:

        def start() -> Path:
            return stack.enter_context(run.saving(checkpoint.step, checkpoint.state, digests, best=best))

        folder = processes.from_main(start)
        tensors = {f"{group}/{name}": t for group, named in checkpoint.tensors.items() for name, t in named.items()}
        _write_part(folder, tensors, run.checkpoints)

        def digest_own_files() -> dict[str, str]:
            own = folder.glob(f"shard-{processes.rank + 1:05d}-*.safetensors")
            return {file.name: file_digest(file) for file in own}

        own_digests = processes.in_all(digest_own_files)
        everywhere: list[Any] = [None] * processes.world
        dist.all_gather_object(everywhere, own_digests)
        for of_process in everywhere:
            digests.update(of_process)
        processes.from_main(stack.close)


def _write_part(folder: Path, tensors: Mapping[str, Tensor], checkpoints: Checkpoints) -> None:
    """Write the own part of all tensors. Raises CheckpointError in all processes if one of them cannot."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    # Buffers such as running means differ between processes; those of the main process are saved.
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    try:
        save(_separate(tensors), storage_writer=writer, planner=planner)
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        reason = getattr(cause, "strerror", None) or str(cause).strip().partition("\n")[0] or type(cause).__name__
        raise CheckpointError(
            f"the checkpoint could not be written by process {rank} ({reason}); {checkpoints.earlier()}."
        ) from None


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors that do not share memory, as tied weights do: safetensors rejects those."""
    separate: dict[str, Tensor] = {}
    addresses: set[int] = set()
    for name, tensor in tensors.items():
        contiguous = tensor.detach().contiguous()
        address = local(contiguous).untyped_storage().data_ptr()
        separate[name] = contiguous.clone() if address in addresses else contiguous
        addresses.add(address)
    return separate


def load_distributed(run: RunDirectory, model: nn.Module, processes: Processes) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest valid checkpoint as `RunDirectory.newest_checkpoint`, with tensors divided as those of the run.

    Each process reads its own part only, whatever the number of processes was that wrote the checkpoint. The main
    process finds the checkpoint and checks it.

    Raises:
        CheckpointError: If the checkpoint does not fit the model.
    """
    shapes, warnings = processes.from_main(lambda: run.newest_checkpoint(shapes_only=True))
    if shapes is None:
        return None, warnings
    require_fitting(model, shapes.tensors.get("model", {}), f"the checkpoint of step {shapes.step}")
    path = run.checkpoints.path(shapes.step)
    parameters = dict(model.named_parameters())
    targets: dict[str, Any] = {}
    own_state = model.state_dict()
    for group, tensors in shapes.tensors.items():
        for name, shape in tensors.items():
            like = own_state.get(name) if group in ("model", "trained") else parameters.get(name.partition("/")[2])
            if like is None or like.shape != shape.shape:
                like = shape  # a number of steps, norms, or a tensor that does not fit, which the caller reports
            targets[f"{group}/{name}"] = torch.empty_like(like, device=processes.device)
    _read_into(path, targets)
    loaded = {
        group: {name: targets[f"{group}/{name}"] for name in tensors} for group, tensors in shapes.tensors.items()
    }
    return replace(shapes, tensors=loaded), warnings


def _read_into(path: Path, targets: dict[str, Any]) -> None:
    """Read tensors of a checkpoint into `targets`, "group/name" → tensor. Each process reads what it holds."""
    if is_distributed(path):
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.state_dict_loader import load

        reader = HuggingFaceStorageReader(str(path))
        try:
            load(targets, storage_reader=reader, no_dist=True)
        except CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            raise CheckpointError(f"{path} cannot be read ({str(cause).partition(chr(10))[0]}).") from None
        return
    from torch.distributed.tensor import DTensor, distribute_tensor

    whole = load_checkpoint(path).tensors
    for key, target in targets.items():
        group, _, name = key.partition("/")
        value = whole[group][name].to(target.device, target.dtype)
        if isinstance(target, DTensor):
            value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
        target.copy_(value)
