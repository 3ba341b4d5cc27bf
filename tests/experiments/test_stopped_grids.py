"""Ctrl-C and SIGTERM at a grid: runs save and leave, no other one starts, nothing is left running."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spherenet.experiments.experiment import Job
from spherenet.experiments.runner import run_jobs
from spherenet.runs import RunDirectory
from spherenet.training.config import TrainConfig

SCRIPT = Path(__file__).with_name("stopped_grid.py")
PATIENCE = 120
has_ray = importlib.util.find_spec("ray") is not None
with_ray = pytest.param("ray", 1, signal.SIGINT, marks=pytest.mark.skipif(not has_ray, reason="ray is not installed"))


@pytest.mark.parametrize(
    ("launcher", "jobs", "number"),
    [("here", 2, signal.SIGINT), ("here", 1, signal.SIGTERM), ("torchrun", 1, signal.SIGINT), with_ray],
)
def test_a_stopped_grid(tmp_path, launcher, jobs, number):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    grid = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(tmp_path), launcher, str(jobs)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        running = [tmp_path / f"run-{index}" for index in range(jobs)]
        wait_until(lambda: all(len(RunDirectory(run).metrics) > 3 for run in map(fresh, running)), grid)
        grid.send_signal(number)  # to the grid alone, as a cluster's manager would
        said, _ = grid.communicate(timeout=PATIENCE)
    finally:
        grid.kill()
        grid.wait()
        grid.stdout.close()
    assert grid.returncode == 130, said
    for run in running:
        assert not RunDirectory(run).in_use
        newest, complaints = RunDirectory(run).newest_checkpoint()
        assert complaints == []
        assert newest is not None, said  # it saved when it was asked to leave
        assert newest.step > 2
    assert [entry.name for entry in sorted(tmp_path.iterdir()) if entry.is_dir()] == [run.name for run in running]
    assert said.count("None") == 0


def fresh(path):
    """Rows are counted once and kept: look anew."""
    return Path(path)


def wait_until(condition, process):
    ends = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < ends
        time.sleep(0.1)


def test_no_job_starts_after_the_grid_was_stopped(tmp_path):
    """Whatever launches them: the list of jobs itself ends."""
    started, stopped = [], []

    def launch(arguments, log):
        started.append(arguments)
        stopped.append(True)
        return 143

    jobs = [Job(f"run {number}", tmp_path / str(number), TrainConfig()) for number in range(4)]
    results = run_jobs(jobs, launch, 1, stopped=lambda: bool(stopped))
    assert len(started) == 1
    assert all(result.failure is not None for result in results)
    assert "stopped" in results[-1].failure
