"""The processes of a run under torchrun: who am I, what did the others count, what do we do now."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spherenet.errors import SphereNetError

__all__ = ["Processes"]

T = TypeVar("T")

# The group that was left last. A thread of gloo needs Python's lock to free its last tensors, and a group is freed
# when its thread has ended: torch gives up the lock for that only where the last to hold the group is Python, not DDP.
_left: list[Any] = []
atexit.register(_left.clear)


@dataclass(frozen=True)
class Processes:
    """One process alone, or one of `world` under torchrun; `device` is the one this process computes on."""

    rank: int
    world: int
    device: torch.device

    @classmethod
    @contextmanager
    def joined(cls, device: str | None = None, timeout: timedelta = timedelta(minutes=10)) -> Iterator[Processes]:
        """Join the processes that torchrun started, or be alone; leave them when the block ends.

        device: "cpu", "cuda", "cuda:1", …; None takes CUDA where it is there. Under torchrun each process takes
        the GPU of its local rank; NCCL speaks between GPUs, gloo between CPUs.
        Raises ValueError for a device that is not there.
        """
        world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
        chosen = _device(device, int(os.environ.get("LOCAL_RANK", "0")) if world > 1 else None)
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
        # torchrun with a single process also sets the variables; then there is nobody to talk to.
        if world == 1:
            yield cls(0, 1, chosen)
            return
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo", timeout=timeout)
        group = dist.group.WORLD
        try:
            yield cls(rank, world, chosen)
        finally:
            dist.destroy_process_group()
            _left[:] = [group]

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run directory."""
        return self.rank == 0

    def share(self, indices: Tensor) -> Tensor:
        """The part of a batch that this process takes; parts differ by at most one."""
        return indices.tensor_split(self.world)[self.rank]

    def total_on_device(self, counts: Tensor) -> Tensor:
        """Add up a tensor over the processes, in place, without waiting for the device."""
        if self.world > 1:
            dist.all_reduce(counts)
        return counts

    def total(self, counts: Tensor) -> Tensor:
        """Add up a tensor over the processes; returns it on the CPU."""
        return self.total_on_device(counts).cpu()

    def from_main(self, function: Callable[[], T]) -> T:
        """Call a function in the main process and return its result in all; its error is raised in all."""
        if self.world == 1:
            return function()
        result: list[Any] = [None, None]
        if self.is_main:
            try:
                result = [function(), None]
            except (SphereNetError, ValueError, OSError) as error:
                result = [None, error]
        dist.broadcast_object_list(result, src=0)
        if result[1] is not None:
            raise result[1]
        value: T = result[0]
        return value

    def wrap(self, model: nn.Module, *, sync_batch_norm: bool) -> nn.Module:
        """The model in torch's DDP where there are several processes; SyncBatchNorm needs a GPU."""
        if self.world == 1:
            return model
        if sync_batch_norm and self.device.type == "cuda":
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        on_gpu = self.device.type == "cuda"
        return nn.parallel.DistributedDataParallel(model, device_ids=[self.device] if on_gpu else None)


def _device(name: str | None, local_rank: int | None) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device("cuda", local_rank) if name == "cuda" and local_rank is not None else torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ValueError(f"device {name!r} is not to be had here ({str(error).splitlines()[0]}).") from None
    return device
