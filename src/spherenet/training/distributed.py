"""The processes of a run under torchrun: who am I, what did the others count, what do we do now."""

from __future__ import annotations

import atexit
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spherenet.errors import LostProcessError, RunError, SphereNetError

__all__ = ["TIMEOUT", "Processes"]

TIMEOUT = 120.0
"""Seconds after which a process that does not answer counts as lost."""
PREPARING = timedelta(hours=6)
"""How long the others wait while one process downloads and reads the data."""

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
    def joined(cls, device: str | None = None, timeout: float = TIMEOUT) -> Iterator[Processes]:
        """Join the processes that torchrun started, or be alone; leave them when the block ends.

        device: "cpu", "cuda", "cuda:1", …; None takes CUDA where it is there. Under torchrun each process takes
        the GPU of its local rank; NCCL speaks between GPUs, gloo between CPUs.
        timeout: seconds that the processes wait for each other, to join and at every exchange.
        Raises ValueError for a device that is not there, RunError if not all processes join, and RunError from the
        block if another process is lost or does not answer.
        """
        world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
        chosen = _device(device, int(os.environ.get("LOCAL_RANK", "0")) if world > 1 else None)
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
        # torchrun with a single process also sets the variables; then there is nobody to talk to.
        if world == 1:
            yield cls(0, 1, chosen)
            return
        _join("nccl" if chosen.type == "cuda" else "gloo", world, timeout)
        group = dist.group.WORLD
        try:
            yield cls(rank, world, chosen)
        except RuntimeError as error:
            if not _is_about_others(error):
                raise
            detail = str(error).splitlines()[0][:200].rstrip(".")
            raise LostProcessError(
                f"another process of the run was lost or did not answer within {timeout:g} s ({detail}); "
                "the last checkpoint is intact."
            ) from None
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

    def from_main(self, function: Callable[[], T], *, patient: bool = False) -> T:
        """Call a function in the main process and return its result in all; its error is raised in all.

        patient: the function may take hours, such as a download.
        """
        if self.world == 1:
            return function()
        group = dist.new_group(timeout=PREPARING, backend="gloo") if patient else None
        result: list[Any] = [None, None]
        if self.is_main:
            try:
                result = [function(), None]
            except (SphereNetError, ValueError, OSError) as error:
                result = [None, error]
        dist.broadcast_object_list(result, src=0, group=group)
        if group is not None:
            dist.destroy_process_group(group)
        if result[1] is not None:
            raise result[1]
        value: T = result[0]
        return value

    def in_all(self, function: Callable[[], T]) -> T:
        """Call a function in every process and return its own result in each; an error in one is raised in all."""
        if self.world == 1:
            return function()
        value: T | None = None
        failure: Exception | None = None
        try:
            value = function()
        except (SphereNetError, ValueError, TypeError, OSError) as error:
            failure = error
        failures: list[Any] = [None] * self.world
        dist.all_gather_object(failures, failure)
        first = failure or next((found for found in failures if found is not None), None)
        if first is not None:
            raise first
        return value  # type: ignore[return-value]

    def require_same(self, values: Mapping[str, Any]) -> None:
        """Raise RunError in all processes, naming the first value that is not the same in all of them.

        Values that differ unnoticed would train several models as if they were one, or let the processes wait for
        exchanges that the others never make.
        """
        if self.world == 1:
            return
        every: list[Any] = [None] * self.world
        dist.all_gather_object(every, {name: repr(value) for name, value in values.items()})
        for name, first in every[0].items():
            for rank, other in enumerate(every):
                if other.get(name) != first:
                    shown = f"{first[:80]} in process 0 and {other.get(name, 'nothing')[:80]} in process {rank}"
                    raise RunError(f"{name} must be the same in all processes, got {shown}.")

    def share_buffers(self, model: nn.Module) -> None:
        """Give every process the buffers (running means, counters) of the main one, which are those that are saved."""
        if self.world > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)

    def wrap(self, model: nn.Module, *, sync_batch_norm: bool) -> nn.Module:
        """The model in torch's DDP where there are several processes; SyncBatchNorm needs a GPU."""
        if self.world == 1:
            return model
        if sync_batch_norm and self.device.type == "cuda":
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        on_gpu = self.device.type == "cuda"
        return nn.parallel.DistributedDataParallel(model, device_ids=[self.device] if on_gpu else None)


def _join(backend: str, world: int, timeout: float) -> None:
    """Meet the other processes, in a thread: torch waits for them without hearing signals."""
    outcome: list[BaseException | None] = []

    def join() -> None:
        try:
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
            outcome.append(None)
        except BaseException as error:  # raised below, in the main thread
            outcome.append(error)

    thread = threading.Thread(target=join, daemon=True)
    thread.start()
    ends = time.monotonic() + timeout
    while thread.is_alive() and time.monotonic() < ends:  # torch itself waits longer than it is told to
        thread.join(0.05)  # in between, Python calls the handlers of signals
    error = outcome[0] if outcome else TimeoutError("the time is up")
    if isinstance(error, (RuntimeError, TimeoutError, OSError)):
        detail = (str(error).splitlines() or [type(error).__name__])[0][:200].rstrip(".")
        raise RunError(f"all {world} processes must join within {timeout:g} s, but did not ({detail}).") from None
    if error is not None:
        raise error


_ABOUT_OTHERS = re.compile(r"gloo|nccl|connection (closed|reset|refused)|timed out|broken pipe", re.IGNORECASE)


def _is_about_others(error: RuntimeError) -> bool:
    """Whether an error is of an exchange between processes; torch has no type of its own for those of gloo."""
    return isinstance(error, dist.DistError) or bool(_ABOUT_OTHERS.search(str(error)))


def _device(name: str | None, local_rank: int | None) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device("cuda", local_rank) if name == "cuda" and local_rank is not None else torch.device(name)
        torch.zeros(1, device=device).item()  # the device meta has tensors, but no numbers
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ValueError(f"device {name!r} is not available here ({str(error).splitlines()[0]}).") from None
    return device
