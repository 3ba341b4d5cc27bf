"""Call a reader for each key of a lazy order, here or in worker processes, in order and with clean ends.

torch's DataLoader does the work. Around it stands what a training loop relies on: errors arrive as the one sentence
they were raised with, closing ends the workers, signals meant for the training do not kill them first, and whoever
waits for a batch that does not come is told so.
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

from spherenet.errors import DataError

__all__ = ["read_ahead"]

Key = TypeVar("Key")
Value = TypeVar("Value")

BATCHES_AHEAD = 2  # for each worker
NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
SIGNALS = {number for number in signal.Signals if number.name in NAMES}
GRACE = 30  # seconds that a worker outlives a SIGTERM: time for the training to save and close it

POLL = 1.0  # seconds between two looks at whether to wait any longer
LONGEST_WAIT = 300.0  # seconds without a batch, after which it counts as lost

_running: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # to the process that started the workers


class _Failure(NamedTuple):
    """An error on its way out of a worker: raised there, torch would wrap it in two tracebacks."""

    message: str


class _Calls(TorchDataset[Any], Generic[Key, Value]):
    def __init__(self, read: Callable[[Key], Value]) -> None:
        self.read = read

    def __getitem__(self, key: Key) -> Value | _Failure:
        try:
            value = self.read(key)
        except DataError as error:
            return _Failure(str(error))
        if isinstance(value, Tensor) and get_worker_info() is not None:
            # Here, not in the thread that torch sends it from: an error there would be lost, and the batch with it.
            try:
                value.share_memory_()  # type: ignore[no-untyped-call]
            except (RuntimeError, OSError) as error:
                reason = str(error).splitlines()[0].rstrip(".")
                return _Failure(
                    f"a batch found no room in shared memory ({reason}): make /dev/shm larger, or give fewer --workers "
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
    """Yield `read(key)` for each key, in order.

    With `workers` the calls happen in that many processes, `BATCHES_AHEAD` a worker in advance. A DataError of
    `read` is raised here at its key's turn; a worker that dies, or a value that does not come for `LONGEST_WAIT`
    seconds, raises DataError too. `while_waiting` is called about every second without a value, and may raise.
    Closing the generator, or leaving Python, ends the workers.
    """
    loader: DataLoader[Any] = DataLoader(
        _Calls(read),
        batch_size=None,  # a key is a whole batch
        sampler=keys,
        num_workers=workers,
        collate_fn=_unchanged,
        pin_memory=pin_memory,
        timeout=POLL if workers else 0,
        prefetch_factor=BATCHES_AHEAD if workers else None,
        worker_init_fn=_in_worker,
        generator=torch.Generator(),  # its own, or each loader would advance torch's global one
    )
    with _starting_workers():
        values = iter(loader)
    _running[values] = os.getpid()
    try:
        came = time.monotonic()
        while True:
            try:
                value = next(values)
            except StopIteration:
                return
            except (RuntimeError, OSError, EOFError) as error:
                if not _has_lost_a_worker(values):
                    if not str(error).startswith("DataLoader timed out"):
                        raise  # an error of `keys`
                    try:
                        _wait_on(time.monotonic() - came, while_waiting)
                    except BaseException:
                        _kill_workers(values)
                        raise
                    continue
                reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
                raise DataError(f"a process that reads pictures ended ({reason}): try fewer workers.") from None
            if isinstance(value, _Failure):
                raise DataError(value.message)
            yield value
            came = time.monotonic()
    finally:
        _end(values)


def _wait_on(waited: float, while_waiting: Callable[[], None] | None) -> None:
    """Return if it is worth waiting any longer for a value; what `while_waiting` raises, or DataError, otherwise."""
    if while_waiting is not None:
        while_waiting()
    if waited > LONGEST_WAIT:
        raise DataError(
            f"no images arrived for {LONGEST_WAIT:g} s from the processes that read them: "
            "try fewer --workers, or look at the disk."
        )


def _unchanged(value: Value) -> Value:
    return value


def _end(values: object) -> None:
    _running.pop(values, None)
    getattr(values, "_shutdown_workers", lambda: None)()  # none where there are no workers


def _kill_workers(values: object) -> None:
    """End workers that hang: torch would wait for each, and they outlive the SIGTERM that follows (see _in_worker)."""
    for process in getattr(values, "_workers", ()):
        process.kill()


@atexit.register
def _end_all() -> None:
    # Before Python's own end of child processes, which would wait for workers that outlive a SIGTERM.
    for values, process in list(_running.items()):
        if process == os.getpid():  # a forked process must not end its parent's
            _end(values)


def _has_lost_a_worker(values: object) -> bool:
    workers = getattr(values, "_workers", ())
    for process in workers:
        process.join(timeout=0.1)  # its pipes break a moment before it counts as dead
    return not all(process.is_alive() for process in workers)


@contextmanager
def _starting_workers() -> Iterator[None]:
    """Keep the signals below from a worker until it can take them, and SIGCHLD as it was.

    torch would answer SIGCHLD with an exception wherever the training stands; without, a lost worker is an error of
    the next batch, within five seconds.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before, at_a_child = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS), signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGCHLD) is not at_a_child and at_a_child is not None:
            signal.signal(signal.SIGCHLD, at_a_child)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _in_worker(_: int) -> None:
    # Ctrl-C and a batch system's SIGTERM reach every process of the group. The training then finishes its step and
    # saves, for which it may need one more batch: so the workers wait to be closed.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, lambda *_: signal.alarm(GRACE))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
