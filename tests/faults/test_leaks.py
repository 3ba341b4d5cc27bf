"""Long training does not leak memory, threads, processes or files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from faults.scale import SOAK_READERS, SOAK_RUNS, SOAK_STEPS

POINT = 10
BOUND = 16 * 1024
"""Kilobytes by which the second half may exceed the first. The memory kept by the C library varies by 8 MB as batches
grow and shrink. In a soak the bound is less than 3 KB per step, less than the smallest feature map of the network."""


@pytest.fixture(scope="module")
def measured():
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("leaking.py"), str(SOAK_STEPS), str(SOAK_RUNS), str(SOAK_READERS)],
        capture_output=True, text=True, timeout=7200, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


LOOPS = {
    "batches": (SOAK_STEPS, "training steps with growing and shrinking batches"),
    "runs": (SOAK_RUNS, "complete runs in one process"),
    "readers": (SOAK_READERS, "loaders of images with two workers, ended, closed or forgotten"),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_memory_does_not_grow(measured, tried, loop):
    kilobytes = [resources["kilobytes"] for resources in measured[loop]]
    first, second = kilobytes[: len(kilobytes) // 2], kilobytes[len(kilobytes) // 2 :]
    assert max(second) - max(first) < BOUND, kilobytes
    tried(f"{LOOPS[loop][1]}: memory grows by less than {BOUND // 1024} MB", LOOPS[loop][0])


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", ["threads", "files", "processes"])
def test_no_threads_files_or_processes_are_left(measured, tried, loop, name):
    counts = [resources[name] for resources in measured[loop]]
    assert max(counts[1:]) <= counts[0], counts
    tried(f"{LOOPS[loop][1]}: no thread, file or process left", LOOPS[loop][0] if name == "threads" else 0)
