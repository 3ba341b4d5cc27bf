"""Faults that a child of the fork server brings on itself: death at a chosen point, poison, a full disk, waiting."""

import atexit
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

import torch

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
    small_sets=False,
):
    """Put the faults of a request in place; each is None or the arguments of its function."""
    for function, arguments in (
        (watch_changes, changes),
        (die_at_a_step, die_at_step),
        (poison_steps, poison),
        (slow_down, slow),
        (hold_at_a_step, hold),
        (limit_files, largest_file),
        (stick_workers, stuck_worker),
    ):
        if arguments is not None:
            function(**arguments)
    if small_sets:
        from faults import small_sets

        small_sets.use()


def die():
    """As kill -9 does it: nothing is flushed, closed or unlocked."""
    os.kill(os.getpid(), signal.SIGKILL)


class Changes:
    """Every change that this process makes to a folder, in order; before one of them it may die."""

    def __init__(self, folder, die_at):
        self.folder, self.die_at = os.path.realpath(folder), die_at
        self.seen = []

    def happens(self, kind, path, half=None, source=None):
        """Note a change that is about to be made, or die there; half: makes the first half of it."""
        place = os.path.realpath(path)
        if os.path.commonpath([self.folder, place]) != self.folder:
            return
        if len(self.seen) == self.die_at:
            if half is not None:
                half()
            die()
        self.seen.append((kind, *(os.path.relpath(at, self.folder) for at in (place, source) if at is not None)))

    def hear(self, event, arguments):
        """Python tells of what it does with files by audit events, except for fsync and writing itself."""
        if event == "open" and isinstance(arguments[0], (str, bytes)):
            if arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                self.happens("open", os.fsdecode(arguments[0]))
        elif event in ("os.remove", "os.rmdir"):
            self.happens(event[3:], _placed(*arguments))
        elif event == "os.mkdir":
            self.happens("mkdir", _placed(arguments[0], arguments[2]))
        elif event == "os.rename":
            self.happens("rename", _placed(arguments[1], arguments[3]), source=_placed(arguments[0], arguments[2]))
        elif event == "os.truncate":
            self.happens("truncate", _of_handle(arguments[0]))


def _placed(path, handle):
    """The path that a call with dir_fd means."""
    return os.path.join(_of_handle(handle) if handle >= 0 else "", os.fsdecode(path))


def _of_handle(handle):
    return os.readlink(f"/proc/self/fd/{handle}")


def watch_changes(folder, die_at=None, record=None):
    """Die before the change of number `die_at`, half way where it is a write; note all changes in a JSON file."""
    changes = Changes(folder, die_at)
    fsync, write, save_file = os.fsync, os.write, checkpoints.save_file

    def watched_fsync(handle):
        changes.happens("fsync", _of_handle(handle))
        fsync(handle)

    def watched_write(handle, data):
        changes.happens("write", _of_handle(handle), lambda: write(handle, data[: len(data) // 2]))
        return write(handle, data)

    def watched_save(tensors, path):
        def half():
            save_file(tensors, path)
            os.truncate(path, Path(path).stat().st_size // 2)

        changes.happens("write", path, half)
        save_file(tensors, path)

    os.fsync, os.write, checkpoints.save_file = watched_fsync, watched_write, watched_save
    sys.addaudithook(changes.hear)
    if record is not None:
        atexit.register(lambda: Path(record).write_text(json.dumps(changes.seen)))


def die_at_a_step(step, after_saving=False):
    """Die when the optimiser has made so many steps, before or after what is then logged and saved."""
    after_step = Trainer._after_step

    def dying(self, **options):
        if self.step == step and not after_saving:
            die()
        after_step(self, **options)
        if self.step == step:
            die()

    Trainer._after_step = dying


def poison_steps(steps, where="loss", value="nan"):
    """Let the loss, or the gradient, of these steps be NaN or infinite."""
    poison, forward, step = float(value), Classifier.forward, Trainer._step
    now = {"step": -1}

    def counted(self, *arguments):
        now["step"] = self.step
        try:
            return step(self, *arguments)
        finally:
            now["step"] = -1

    def poisoned(self, images, labels=None):
        answer = forward(self, images, labels)
        if labels is None or not self.training or now["step"] not in steps:
            return answer
        if where == "loss":
            return answer[0] + torch.tensor(poison), answer[1]
        answer[0].register_hook(lambda gradient: gradient * poison)
        return answer

    Trainer._step, Classifier.forward = counted, poisoned


def slow_down(seconds):
    """Let each step take longer."""
    step = Trainer._step

    def slow(self, *arguments):
        time.sleep(seconds)
        return step(self, *arguments)

    Trainer._step = slow


def hold_at_a_step(step, until):
    """Make so many steps, and no more before a file is there."""
    make_step = Trainer._step

    def holding(self, *arguments):
        while self.step == step and not Path(until).exists():
            time.sleep(0.005)
        return make_step(self, *arguments)

    Trainer._step = holding


def stick_workers(after):
    """Let a worker hang forever when it has read so many batches."""
    read, calls = folder_split._BatchReader.__call__, []

    def sticking(self, key):
        calls.append(key)
        while len(calls) > after:
            time.sleep(60)
        return read(self, key)

    folder_split._BatchReader.__call__ = sticking


def limit_files(size):
    """Refuse to let a file grow beyond so many bytes, as a full disk does.

    What the child says goes to a file too: through another process, which has no limit.
    """
    reading, writing = os.pipe()
    writer = os.fork()
    if writer == 0:
        os.close(writing)
        while said := os.read(reading, 1 << 16):
            os.write(1, said)
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
