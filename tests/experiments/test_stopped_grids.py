"""Ctrl-C and SIGTERM stop a grid: its runs save a checkpoint and exit, and no other run starts."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spherenet.experiments.jobs import Job
from spherenet.experiments.runner import run_jobs
from spherenet.runs import RunDirectory
from spherenet.training.config import TrainConfig

SCRIPT = Path(__file__).with_name("stopped_grid.py")
TIMEOUT = 120
has_ray = importlib.util.find_spec("ray") is not None
with_ray = pytest.param("ray", 1, signal.SIGINT, marks=pytest.mark.skipif(not has_ray, reason="ray is not installed"))


@pytest.mark.parametrize(
    ("launcher", "jobs", "number"),
    [("local", 2, signal.SIGINT), ("local", 1, signal.SIGTERM), ("torchrun", 1, signal.SIGINT), with_ray],
)
def test_stopped_grid_saves_its_runs_and_starts_no_other(tmp_path, launcher, jobs, number):
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
        grid.send_signal(number)  # to the grid only, as a cluster manager does
        output, _ = grid.communicate(timeout=TIMEOUT)
    finally:
        grid.kill()
        grid.wait()
        grid.stdout.close()
    assert grid.returncode == 130, output
    for run in running:
        assert not RunDirectory(run).in_use
        newest, problems = RunDirectory(run).newest_checkpoint()
        assert problems == []
        assert newest is not None, output  # saved on the signal
        assert newest.step > 2
    assert [entry.name for entry in sorted(tmp_path.iterdir()) if entry.is_dir()] == [run.name for run in running]
    assert output.count("None") == 0


def fresh(path):
    """Return a new path: rows are counted once per object and kept."""
    return Path(path)


def wait_until(condition, process):
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_no_job_starts_after_stop(tmp_path):
    """This holds for every launcher: `run_jobs` starts no further job."""
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
