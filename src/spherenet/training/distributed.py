"""The processes of a run under torchrun: rank, device, sums and agreement between them."""

from __future__ import annotations

import atexit
import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spherenet._util.text import first_line
from spherenet._util.validation import require_device
from spherenet.errors import InvalidArgument, LostProcessError, RunError, SphereNetError
from spherenet.kernels.dispatch import leave_out_of_ddp

__all__ = ["TIMEOUT", "Processes"]

TIMEOUT = 120.0
"""Default number of seconds after which an unresponsive process counts as lost."""
PREPARATION_TIMEOUT = timedelta(hours=6)
"""Time that processes wait while one of them downloads and reads the data."""

T = TypeVar("T")

# The last process group that was destroyed. Gloo's thread needs Python's lock to free its last tensors, and a group is
# freed when its thread has ended. torch releases the lock for that only if Python, not DDP, holds the last reference.
_last_group: list[Any] = []


@atexit.register
def _end_gloo_threads() -> None:
    """Free the last process group, or at least the last tensors of its threads, before Python ends.

    If DDP still refers to the group, its threads live on. One that needs Python's lock later aborts the process.
    """
    if _last_group:
        _last_group.clear()
        time.sleep(0.2)  # other threads have Python's lock meanwhile; they need microseconds


@dataclass(frozen=True)
class Processes:
    """A single process, or one of several under torchrun.

    Attributes:
        rank: Index of this process.
        world: Number of processes.
        device: Device that this process computes on.
        is_main: Whether this is process 0, which writes the run directory.
    """

    rank: int
    world: int
    device: torch.device
    is_main: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_main", self.rank == 0)

    @classmethod
    @contextmanager
    def joined(cls, device: str | None = None, timeout: float = TIMEOUT) -> Iterator[Processes]:
        """Join the processes that torchrun started, if any, and leave them at the end of the block.

        Args:
            device: "cpu", "cuda", "cuda:1" and so on; None for CUDA if it is available. Under torchrun each process
                uses the GPU of its local rank. GPUs communicate by NCCL, CPUs by gloo.
            timeout: Seconds that the processes wait for each other, to join and at every exchange.

        Raises:
            ValueError: If the device is not available, or a variable of torchrun has a wrong value.
            RunError: If not all processes join.
            LostProcessError: In the block, if another process ends or does not respond.
        """
        world = _variable("WORLD_SIZE", default=1, least=1)
        rank = _variable("RANK", default=0, most=world - 1) if world > 1 else 0
        chosen = _device(device, _variable("LOCAL_RANK", default=0) if world > 1 else None)
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
        # torchrun with one process sets the variables too, but then there are no others to join.
        if world == 1:
            yield cls(0, 1, chosen)
            return
        _join("nccl" if chosen.type == "cuda" else "gloo", world, timeout)
        group = dist.group.WORLD
        try:
            yield cls(rank, world, chosen)
        except RuntimeError as error:
            if not _is_communication_error(error):
                raise
            detail = first_line(error)
            raise LostProcessError(
                f"another process of the run ended or did not respond within {timeout:g} s ({detail}); "
                "the run can be resumed from its last checkpoint, if it has one."
            ) from None
        finally:
            dist.destroy_process_group()
            _last_group[:] = [group]

    def total(self, values: Tensor) -> Tensor:
        """Sum a tensor over the processes, in place, and return it. This does not wait for the device."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def from_main(self, function: Callable[[], T], *, patient: bool = False) -> T:
        """Call a function in the main process. Return its result, or raise its error, in all processes.

        Args:
            function: Function to call.
            patient: Whether the function may take hours, e.g. for a download.
        """
        if self.world == 1:
            return function()
        group = dist.new_group(timeout=PREPARATION_TIMEOUT, backend="gloo") if patient else None
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
        """Call a function in every process and return its result. An error in one process is raised in all."""
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
        first = failure or next((error for error in failures if error is not None), None)
        if first is not None:
            raise first
        return value  # type: ignore[return-value]

    def require_same(self, values: Mapping[str, Any]) -> None:
        """Raise RunError in all processes if a value is not the same in all of them; the message names the first.

        Undetected differences would train several models as if they were one, or make processes wait for exchanges
        that others never start.
        """
        if self.world == 1:
            return
        all_values: list[Any] = [None] * self.world
        dist.all_gather_object(all_values, {name: repr(value) for name, value in values.items()})
        for name, first in all_values[0].items():
            for rank, other in enumerate(all_values):
                if other.get(name) != first:
                    shown = f"{first[:80]} in process 0 and {other.get(name, 'nothing')[:80]} in process {rank}"
                    raise RunError(f"{name} must be the same in all processes, got {shown}.")

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Copy tensors of the main process, such as running means, which are saved, to all processes in place."""
        if self.world > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def average_gradient(self, parameter: Tensor) -> None:
        """Replace the gradient of a parameter by its mean over the processes."""
        if self.world > 1 and parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.world

    def wrap(self, model: nn.Module, *, sync_batch_norm: bool) -> nn.Module:
        """Return the model wrapped in torch's DDP if there are several processes. SyncBatchNorm requires GPUs.

        DTensors, which are divided among the processes, are left out.
        """
        if self.world == 1:
            return model
        on_gpu = self.device.type == "cuda"
        if sync_batch_norm and on_gpu:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        # Channels-last gradients of a single channel have other strides of dimensions of size 1: the same layout.
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides", UserWarning)
        leave_out_of_ddp(model, [name for name, p in model.named_parameters() if hasattr(p, "device_mesh")])
        return nn.parallel.DistributedDataParallel(model, device_ids=[self.device] if on_gpu else None)


def _join(backend: str, world: int, timeout: float) -> None:
    """Join the other processes in a thread, because torch does not handle signals while it waits for them."""
    outcome: list[BaseException | None] = []

    def join() -> None:
        try:
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
            outcome.append(None)
        except BaseException as error:  # raised below, in the main thread
            outcome.append(error)

    thread = threading.Thread(target=join, daemon=True)
    thread.start()
    deadline = time.monotonic() + timeout
    while thread.is_alive() and time.monotonic() < deadline:  # torch can wait longer than its timeout
        thread.join(0.05)  # Python runs signal handlers between these calls
    error = outcome[0] if outcome else TimeoutError("timed out")
    if isinstance(error, (RuntimeError, TimeoutError, OSError, ValueError)):  # ValueError: MASTER_ADDR, MASTER_PORT
        detail = first_line(error)
        raise RunError(f"all {world} processes must join within {timeout:g} s, but did not ({detail}).") from None
    if error is not None:
        raise error


_COMMUNICATION = re.compile(r"gloo|nccl|connection (closed|reset|refused)|timed out|broken pipe", re.IGNORECASE)


def _is_communication_error(error: RuntimeError) -> bool:
    """Return whether an exchange between processes failed. torch has no exception type for errors of gloo."""
    return isinstance(error, dist.DistError) or bool(_COMMUNICATION.search(str(error)))


def _variable(name: str, default: int, least: int = 0, most: int | None = None) -> int:
    """Return an integer that torchrun sets in the environment. Raises ValueError if it is none or out of range."""
    text = os.environ.get(name, str(default))
    number = int(text) if re.fullmatch("[0-9]{1,9}", text) else -1
    if number < least or (most is not None and number > most):
        allowed = f"at least {least}" if most is None else f"from {least} to {most}"
        raise InvalidArgument(f"the variable {name}", f"must be an integer {allowed}, got {text[:40]!r}.")
    return number


def _device(name: str | None, local_rank: int | None) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return require_device("device", f"cuda:{local_rank}" if name == "cuda" and local_rank is not None else name)
