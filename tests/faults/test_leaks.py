"""Training for long: memory stays flat, and no thread, process or file is left over."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from faults.scale import SOAK_READERS, SOAK_RUNS, SOAK_STEPS

POINT = 10
BOUND = 16 * 1024
"""Kilobytes by which the second half may exceed the first: what the C library keeps moves by 8 MB from round to round
as batches grow and shrink. Over the steps of a soak this is less than 3 KB a step; the smallest map of the network that
trains here has more."""


@pytest.fixture(scope="module")
def seen():
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("leaking.py"), str(SOAK_STEPS), str(SOAK_RUNS), str(SOAK_READERS)],
        capture_output=True, text=True, timeout=7200, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


WHAT = {
    "batches": (SOAK_STEPS, "training steps with growing and shrinking batches"),
    "runs": (SOAK_RUNS, "whole runs in one process"),
    "readers": (SOAK_READERS, "loaders of pictures with two workers, ended, closed or forgotten"),
}


@pytest.mark.parametrize("what", WHAT)
def test_memory_is_flat(seen, tried, what):
    kilobytes = [found["kilobytes"] for found in seen[what]]
    first, second = kilobytes[: len(kilobytes) // 2], kilobytes[len(kilobytes) // 2 :]
    assert max(second) - max(first) < BOUND, kilobytes
    tried(f"{WHAT[what][1]}: memory grows by less than {BOUND // 1024} MB", WHAT[what][0])


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("name", ["threads", "files", "processes"])
def test_nothing_is_left_over(seen, tried, what, name):
    counts = [found[name] for found in seen[what]]
    assert max(counts[1:]) <= counts[0], counts
    tried(f"{WHAT[what][1]}: no thread, file or process left", WHAT[what][0] if name == "threads" else 0)
