"""Workers that fail, hang or have no shared memory cause an error within seconds, and signals are handled."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from faults.children import OPTIONS
from faults.folders import newest_step
from faults.scale import PATIENCE
from faults.small_sets import write_images
from spherenet.data import workers as reading_ahead
from spherenet.data.workers import read_ahead
from spherenet.errors import DataError

POINT = 13
IMAGES = ["--data", "folder", "--image-size", "12", "--batch-size", "4", "--workers", "1"]


class Lost:
    """Value that never arrives, because pickling it fails in the background thread of the worker."""

    def __reduce__(self):
        raise OSError("no space")


def lose(key):
    return Lost() if key == 2 else torch.tensor(key)


def test_value_that_never_arrives_is_an_error(monkeypatch, tried):
    monkeypatch.setattr(reading_ahead, "MAX_WAIT", 2)
    values = read_ahead(lose, range(5), workers=1)
    assert [int(next(values)), int(next(values))] == [0, 1]
    with pytest.raises(DataError, match="no images arrived for 2 s"):
        next(values)
    tried("a batch that never arrives from a worker")


def test_waiting_can_be_interrupted(monkeypatch, tried):
    class Enough(BaseException):
        pass

    def enough():
        raise Enough

    values = read_ahead(lose, iter([2]), workers=1, while_waiting=enough)
    with pytest.raises(Enough):
        next(values)
    tried("a batch that never arrives from a worker, interrupted")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_signal_while_no_batch_arrives_saves_and_stops(children, folder, tried, number):
    """As if the signal had been received in a step."""
    write_images(folder / "images", per_class=12)
    run = folder / "run"
    options = [*OPTIONS, *IMAGES, "--data-dir", folder / "images", "--checkpoint-every", 100, "--eval-every", 100]
    child = children.start("train", *options, "--output", run, stuck_worker={"after": 5})
    child.wait_for("step 4/14")
    time.sleep(1)
    child.signal(number)
    assert child.wait() == 128 + number, child.output
    assert "saved at step" in child.output
    assert newest_step(run) >= 4
    assert children.run("train", "--resume", run).code == 0
    tried(f"{number.name} while a worker hangs")


def can_mount():
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm"]
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="mounting in a namespace is not allowed")
def test_small_shared_memory_is_an_error(tmp_path, tried):
    """Docker has 64 MB of shared memory by default, which two batches of photographs exceed."""
    write_images(tmp_path / "images", per_class=12, size=40)
    run = tmp_path / "run"
    options = ["--data", "folder", "--data-dir", tmp_path / "images", "--image-size", 224, "--batch-size", 16,
               "--workers", 1, "--iterations", 2, "--widths", 4, 4, 4, "--output", run]  # fmt: skip
    command = [sys.executable, "-m", "spherenet", "train", *map(str, options)]
    mount = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount, "sh", *command],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=environment,
    )
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "shared memory" in last
    assert "--workers" in last
    assert "Traceback" not in done.stderr
    tried("a folder with a shared memory of 1 MB")
