"""Call a function for each key of a lazy sequence, in this process or in worker processes, in order.

torch's DataLoader does the work. This module adds what a training loop relies on: errors keep their message, closing
the generator stops the workers, signals for the training do not kill the workers first, and waiting for a lost batch
ends with an error.
"""

from __future__ import annotations

import atexit
import os
import signal
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data import Dataset as TorchDataset

from spherenet._util.text import first_line
from spherenet.errors import DataError

__all__ = ["read_ahead"]

Key = TypeVar("Key")
Value = TypeVar("Value")

BATCHES_AHEAD = 2  # per worker
SIGNAL_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
SIGNALS = {number for number in signal.Signals if number.name in SIGNAL_NAMES}
GRACE_PERIOD = 30  # seconds that a worker survives SIGTERM, so that the training can save and close it
POLL_INTERVAL = 1.0  # seconds
MAX_WAIT = 300.0  # seconds without a batch

_process_ids: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # running iterators, with the process that made them


class _Failure(NamedTuple):
    """An error message from a worker; an exception would be wrapped in two tracebacks by torch."""

    message: str


class _Calls(TorchDataset[Any], Generic[Key, Value]):
    """Calls `read` for each key and returns a DataError as `_Failure`."""

    def __init__(self, read: Callable[[Key], Value]) -> None:
        self.read = read

    def __getitem__(self, key: Key) -> Value | _Failure:
        try:
            value = self.read(key)
        except DataError as error:
            return _Failure(str(error))
        if isinstance(value, Tensor) and get_worker_info() is not None:
            # torch would do this in a thread, in which an error and the batch are lost.
            try:
                value.share_memory_()  # type: ignore[no-untyped-call]
            except (RuntimeError, OSError) as error:
                reason = first_line(error)
                return _Failure(
                    f"a batch does not fit into shared memory ({reason}): make /dev/shm larger or use fewer --workers "
                    "(0 needs none)."
                )
        return value


def read_ahead(
    read: Callable[[Key], Value],
    keys: Iterable[Key],
    *,
    workers: int,
    pin_memory: bool = False,
    while_waiting: Callable[[], None] | None = None,
) -> Generator[Value, None, None]:
    """Yield `read(key)` per key, in order. Closing the generator, or leaving Python, stops the workers.

    Args:
        read: Function to call; it must be picklable if workers are started by spawning.
        keys: Its arguments, read lazily.
        workers: Number of processes, each `BATCHES_AHEAD` values ahead; 0 calls `read` in this process.
        pin_memory: Whether to copy tensors to pinned memory.
        while_waiting: Called about once per second without a value; may raise.

    Raises:
        DataError: `read` raised it (when its key is due), a worker died, or no value arrived for `MAX_WAIT` seconds.
    """
    loader: DataLoader[Any] = DataLoader(
        _Calls(read),
        batch_size=None,  # a key stands for one batch
        sampler=keys,
        num_workers=workers,
        collate_fn=_identity,
        pin_memory=pin_memory,
        timeout=POLL_INTERVAL if workers else 0,
        prefetch_factor=BATCHES_AHEAD if workers else None,
        worker_init_fn=_initialize_worker,
        generator=torch.Generator(),  # otherwise each loader would advance torch's global generator
    )
    with _blocked_signals():
        values = iter(loader)
    _process_ids[values] = os.getpid()
    try:
        last_arrival = time.monotonic()
        while True:
            try:
                value = next(values)
            except StopIteration:
                return
            except (RuntimeError, OSError, EOFError) as error:
                if not _has_lost_worker(values):
                    if not str(error).startswith("DataLoader timed out"):
                        raise  # an error of `keys`
                    try:
                        _check_waiting(time.monotonic() - last_arrival, while_waiting)
                    except BaseException:
                        # torch would wait for each worker, and workers survive SIGTERM (see _initialize_worker).
                        for process in getattr(values, "_workers", ()):
                            process.kill()
                        raise
                    continue
                reason = first_line(error)
                raise DataError(f"a process that reads images ended ({reason}): use fewer --workers.") from None
            if isinstance(value, _Failure):
                raise DataError(value.message)
            yield value
            last_arrival = time.monotonic()
    finally:
        _stop(values)


def _check_waiting(waited: float, while_waiting: Callable[[], None] | None) -> None:
    """Call `while_waiting`, then raise DataError if no value has arrived for too long."""
    if while_waiting is not None:
        while_waiting()
    if waited > MAX_WAIT:
        raise DataError(
            f"no images arrived for {MAX_WAIT:g} s from the processes that read them: "
            "use fewer --workers, or check the disk."
        )


def _identity(value: Value) -> Value:
    return value


def _stop(values: object) -> None:
    _process_ids.pop(values, None)
    getattr(values, "_shutdown_workers", lambda: None)()  # absent without workers


@atexit.register
def _stop_all() -> None:
    # Runs before multiprocessing's own exit function, which would wait for workers that survive SIGTERM.
    for values, process_id in list(_process_ids.items()):
        if process_id == os.getpid():  # a forked process must not stop its parent's workers
            _stop(values)


def _has_lost_worker(values: object) -> bool:
    workers = getattr(values, "_workers", ())
    for process in workers:
        process.join(timeout=0.1)  # its pipes break shortly before it counts as dead
    return not all(process.is_alive() for process in workers)


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Block `SIGNALS` until new workers have set their handlers, and keep the handler of SIGCHLD.

    torch's handler of SIGCHLD would raise an exception at any point of the training. Without it, a lost worker is an
    error of the next batch, within five seconds.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    mask, handler = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS), signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGCHLD) is not handler and handler is not None:
            signal.signal(signal.SIGCHLD, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _initialize_worker(_: int) -> None:
    # Ctrl-C and the SIGTERM of a batch system reach every process of the group. The training then finishes its step
    # and saves, which may take one more batch, so the workers continue until they are stopped.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, lambda *_: signal.alarm(GRACE_PERIOD))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
