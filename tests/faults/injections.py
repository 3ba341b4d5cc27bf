"""Faults that a child of the fork server injects into itself: SIGKILL, NaN and infinite values, a full disk, delays."""

import atexit
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

import torch

from faults import hosts
from spherenet.data import folder as folder_split
from spherenet.models import Classifier
from spherenet.runs import checkpoints
from spherenet.training import Trainer


def inject(
    changes=None,
    die_at_step=None,
    poison=None,
    slow=None,
    hold=None,
    largest_file=None,
    stuck_worker=None,
    host=None,
    small_sets=False,
):
    """Inject the faults of a request. Each is None or the arguments of its function."""
    for function, arguments in (
        (watch_changes, changes),
        (kill_at_step, die_at_step),
        (poison_steps, poison),
        (slow_down, slow),
        (hold_at_step, hold),
        (limit_files, largest_file),
        (block_workers, stuck_worker),
        (hosts.enter, host),
    ):
        if arguments is not None:
            function(**arguments)
    if small_sets:
        from faults import small_sets

        small_sets.register()


def die():
    """Send SIGKILL to this process: nothing is flushed, closed or unlocked."""
    os.kill(os.getpid(), signal.SIGKILL)


class Changes:
    """Record of the changes that this process makes to a folder. It can be killed before one of them."""

    def __init__(self, folder, die_at):
        self.folder, self.die_at = os.path.realpath(folder), die_at
        self.record = []

    def add(self, operation, path, half=None, source=None):
        """Record a change that is about to be made, or kill the process. half: makes the first half of the change."""
        place = os.path.realpath(path)
        if os.path.commonpath([self.folder, place]) != self.folder:
            return
        if len(self.record) == self.die_at:
            if half is not None:
                half()
            die()
        self.record.append((operation, *(os.path.relpath(at, self.folder) for at in (place, source) if at is not None)))

    def audit(self, event, arguments):
        """Handle Python's audit events for files. There are none for fsync and write."""
        if event == "open" and isinstance(arguments[0], (str, bytes)):
            if arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                self.add("open", os.fsdecode(arguments[0]))
        elif event in ("os.remove", "os.rmdir"):
            self.add(event[3:], _absolute(*arguments))
        elif event == "os.mkdir":
            self.add("mkdir", _absolute(arguments[0], arguments[2]))
        elif event == "os.rename":
            self.add("rename", _absolute(arguments[1], arguments[3]), source=_absolute(arguments[0], arguments[2]))
        elif event == "os.truncate":
            self.add("truncate", _path_of_handle(arguments[0]))


def _absolute(path, handle):
    """Return the path of a call with dir_fd."""
    return os.path.join(_path_of_handle(handle) if handle >= 0 else "", os.fsdecode(path))


def _path_of_handle(handle):
    return os.readlink(f"/proc/self/fd/{handle}")


def watch_changes(folder, die_at=None, record=None):
    """Kill the process before a change, or within it if it is a write. Write all changes to the JSON file `record`."""
    changes = Changes(folder, die_at)
    fsync, write, save_file = os.fsync, os.write, checkpoints.save_file

    def watched_fsync(handle):
        changes.add("fsync", _path_of_handle(handle))
        fsync(handle)

    def watched_write(handle, data):
        changes.add("write", _path_of_handle(handle), lambda: write(handle, data[: len(data) // 2]))
        return write(handle, data)

    def watched_save(tensors, path):
        def half():
            save_file(tensors, path)
            os.truncate(path, Path(path).stat().st_size // 2)

        changes.add("write", path, half)
        save_file(tensors, path)

    os.fsync, os.write, checkpoints.save_file = watched_fsync, watched_write, watched_save
    sys.addaudithook(changes.audit)
    if record is not None:
        atexit.register(lambda: Path(record).write_text(json.dumps(changes.record)))


def kill_at_step(step, after_saving=False):
    """Kill the process after an optimizer step, before or after logging and saving."""
    after_step = Trainer._after_step

    def dying(self, **options):
        if self.step == step and not after_saving:
            die()
        after_step(self, **options)
        if self.step == step:
            die()

    Trainer._after_step = dying


def poison_steps(steps, where="loss", value="nan"):
    """Make the loss or the gradient of some steps NaN or infinite."""
    poison, forward, step = float(value), Classifier.forward, Trainer._step
    current = {"step": -1}

    def counted(self, *arguments):
        current["step"] = self.step
        try:
            return step(self, *arguments)
        finally:
            current["step"] = -1

    def poisoned(self, images, labels=None):
        result = forward(self, images, labels)
        if labels is None or not self.training or current["step"] not in steps:
            return result
        if where == "loss":
            return result[0] + torch.tensor(poison), result[1]
        result[0].register_hook(lambda gradient: gradient * poison)
        return result

    Trainer._step, Classifier.forward = counted, poisoned


def slow_down(seconds):
    """Delay each step."""
    step = Trainer._step

    def slow(self, *arguments):
        time.sleep(seconds)
        return step(self, *arguments)

    Trainer._step = slow


def hold_at_step(step, until):
    """Wait at a step until a file exists."""
    original = Trainer._step

    def holding(self, *arguments):
        while self.step == step and not Path(until).exists():
            time.sleep(0.005)
        return original(self, *arguments)

    Trainer._step = holding


def block_workers(after):
    """Block a worker forever after it has read some batches."""
    read, calls = folder_split._BatchReader.__call__, []

    def blocking(self, key):
        calls.append(key)
        while len(calls) > after:
            time.sleep(60)
        return read(self, key)

    folder_split._BatchReader.__call__ = blocking


def limit_files(size):
    """Limit the size of files, which has the effect of a full disk.

    The output of the child goes to a file too, through another process without the limit.
    """
    reading, writing = os.pipe()
    writer = os.fork()
    if writer == 0:
        os.close(writing)
        while text := os.read(reading, 1 << 16):
            os.write(1, text)
        os._exit(0)
    os.close(reading)
    for stream in (1, 2):
        os.dup2(writing, stream)
    os.close(writing)
    atexit.register(_wait_for_writer, writer)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def _wait_for_writer(writer):
    sys.stdout.flush()
    sys.stderr.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.waitpid(writer, 0)
