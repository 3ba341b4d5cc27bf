"""Simulate power failures on a loop device: `python tests/faults/power_failure.py [times]`.

A run is trained on an ext4 file system in a file. At a random moment the run is stopped and the file is copied. As
after a power failure, the copy lacks what the run has written but not synced. It is mounted, which replays its journal,
and must contain a run that `doctor` finds valid and that can be resumed to the end.

Mounting loop devices requires privileges. The exit code is 77 without them. `test_power_failure.py` runs this script.
"""

import filecmp
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

NOT_ALLOWED = 77
OPTIONS = ["--widths", "4", "4", "4", "--batch-size", "32", "--iterations", "60", "--log-every", "1",
           "--eval-every", "10", "--checkpoint-every", "5", "--eval-batch-size", "500", "--threads", "1",
           "--set", "probes=false"]  # fmt: skip
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def spherenet(*arguments):
    return [sys.executable, "-m", "spherenet", *map(str, arguments)]


@contextmanager
def mounted(disk, place):
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", "loop", disk, place], check=True, capture_output=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def is_allowed(folder):
    """Return whether loop devices can be mounted."""
    disk = folder / "try.img"
    try:
        make_disk(disk)
        with mounted(disk, folder / "try"):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False
    finally:
        disk.unlink(missing_ok=True)


def make_disk(disk):
    with open(disk, "wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", disk], check=True, capture_output=True)


def copy_at_one_moment(disk, copy):
    """Copy a disk as it was at one moment: blocks of different moments are a state that no power failure leaves."""
    for _ in range(100):
        shutil.copyfile(disk, copy)
        if filecmp.cmp(disk, copy, shallow=False):  # nothing was written between the first and the last block
            return
    raise AssertionError("the disk changed during each of 100 copies")


def lose_power(folder, moment):
    """Train, copy the disk after some seconds of training, and return a problem of the copy, None if there is none."""
    disk, copy = folder / "disk.img", folder / "copy.img"
    make_disk(disk)
    with mounted(disk, folder / "disk") as place:
        run = place / "run"
        training = subprocess.Popen(
            spherenet("train", *OPTIONS, "--output", run),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=ENVIRONMENT,
        )
        try:
            while not (run / "checkpoints").exists() and training.poll() is None:
                time.sleep(0.01)
            time.sleep(moment)
            training.send_signal(signal.SIGSTOP)
            copy_at_one_moment(disk, copy)
        finally:
            training.kill()
            training.wait()
    with mounted(copy, folder / "copy") as place:
        run = place / "run"
        if not (run / "config.json").exists():
            return None if not (run / "checkpoints").exists() else "checkpoints without config.json"
        for command in (["doctor", run], ["train", "--resume", run], ["doctor", run]):
            done = subprocess.run(spherenet(*command), capture_output=True, text=True, env=ENVIRONMENT)
            if done.returncode != 0:
                return f"{command[0]} ended with {done.returncode}: {done.stdout}{done.stderr}"
    return None


def main(times):
    chance = random.Random(0)
    # In memory if possible: synced data are those in this file, whether it is on a disk or not.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as name:
        folder = Path(name)
        if not is_allowed(folder):
            print("mounting loop devices is not allowed here")
            return NOT_ALLOWED
        for number in range(times):
            problem = lose_power(folder, chance.uniform(0, 2))
            if problem is not None:
                print(f"power failure {number}: {problem}")
                return 1
    print(f"{times} power failures, no run was corrupt")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 25))
