"""Checkpoints of sharded runs, written and read by all processes with torch.distributed.checkpoint.

Each process writes its own part of the tensors as one safetensors file, whose header states the offsets of the parts.
The files of all processes form one checkpoint with a manifest, which `runs.checkpoints` reads in a single process too.
torch's default format would contain pickled metadata, and reading a pickle can run code.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spherenet.errors import CheckpointError
from spherenet.runs import Checkpoint, RunDirectory
from spherenet.runs.checkpoints import Checkpoints, file_digest, is_distributed, load_checkpoint
from spherenet.training.distributed import Processes
from spherenet.training.sharding import local
from spherenet.training.state import require_fitting

__all__ = ["load_distributed", "save_distributed"]


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
        _write(folder, tensors, run.checkpoints)

        def digest_own_files() -> dict[str, str]:
            own = folder.glob(f"shard-{processes.rank + 1:05d}-*.safetensors")
            return {file.name: file_digest(file) for file in own}

        own_digests = processes.in_all(digest_own_files)
        everywhere: list[Any] = [None] * processes.world
        dist.all_gather_object(everywhere, own_digests)
        for of_process in everywhere:
            digests.update(of_process)
        processes.from_main(stack.close)


def _write(folder: Path, tensors: Mapping[str, Tensor], checkpoints: Checkpoints) -> None:
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
    _read(path, targets)
    loaded = {
        group: {name: targets[f"{group}/{name}"] for name in tensors} for group, tensors in shapes.tensors.items()
    }
    return replace(shapes, tensors=loaded), warnings


def _read(path: Path, targets: dict[str, Any]) -> None:
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
