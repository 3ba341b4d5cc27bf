"""Ctrl-C and SIGTERM stop a grid: its runs save a checkpoint and exit, and no other run starts."""

import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from grid_folders import finish_job

from command_line import command
from spherenet.runs import RunDirectory
from spherenet.training import TrainConfig
from spherenet_paper.experiments.jobs import Job
from spherenet_paper.experiments.runner import LocalLauncher, run_jobs

SCRIPT = Path(__file__).with_name("stopped_grid.py")
TIMEOUT = 240
has_ray = importlib.util.find_spec("ray") is not None
with_ray = pytest.param("ray", 1, signal.SIGINT, marks=pytest.mark.skipif(not has_ray, reason="ray is not installed"))


@pytest.mark.parametrize(
    ("launcher", "jobs", "number"),
    [
        ("local", 2, signal.SIGINT),
        ("local", 1, signal.SIGTERM),
        ("local", 1, signal.SIGHUP),
        ("torchrun", 1, signal.SIGINT),
        with_ray,
    ],
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


def test_interrupted_tune_saves_its_run_and_writes_no_best_setting(tmp_path):
    """One setting is finished, so that there would be a best one."""
    options = ["--widths", "4", "4", "4", "--batch-size", "32", "--log-every", "1", "--threads", "1",
               "--set", "probes=false", "--eval-every", "500000", "--iterations", "1000000"]  # fmt: skip
    settings = ["--try-operators", "cosine", "linear", "none", "--number-of-folds", "2"]
    runs, best = tmp_path / "runs", tmp_path / "best.yaml"
    config = TrainConfig(
        widths=[4, 4, 4], batch_size=32, log_every=1, threads=1, probes=False, eval_every=500_000, iterations=1_000_000
    )
    for fold in range(2):
        finish_job(Job("cosine", runs / "cosine_softmax" / f"fold-{fold}", replace(config, folds=2, fold=fold)))
    tune = subprocess.Popen(
        command("tune", *options, *settings, "--output", runs, "--best", best),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        running = runs / "linear_softmax" / "fold-0"
        wait_until(lambda: len(RunDirectory(running).metrics) > 3, tune)
        tune.send_signal(signal.SIGINT)
        output, errors = tune.communicate(timeout=TIMEOUT)
    finally:
        tune.kill()
        tune.wait()
    assert tune.returncode == 130, errors
    said = errors.strip().splitlines()[-1]
    assert "stopped: 2 of 6 runs done, 1 stopped, 3 not started; continue with the same command: spherenet tune" in said
    assert shlex.quote(str(best)) in said
    assert "failed" not in errors
    assert "cosine_softmax" in output
    assert RunDirectory(running).newest_checkpoint()[0] is not None
    assert not RunDirectory(running).in_use
    assert sorted(path.parent.name for path in runs.glob("*/*/config.json")) == ["fold-0", "fold-0", "fold-1"]
    assert not best.exists()


def test_second_signal_during_stop_does_not_block():
    """A signal handler runs inside any function, also inside the handler of an earlier signal."""
    launcher = LocalLauncher()
    with launcher._lock:
        signal.signal(signal.SIGALRM, lambda *_: pytest.fail("stop waits for a lock that its thread holds"))
        signal.alarm(10)
        try:
            launcher.stop()
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
    assert launcher.stopped


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("elsewhere")], ids=["a pipe", "a link"])
def test_log_that_is_not_a_regular_file_fails_its_run_only(tmp_path, make):
    jobs = [Job(f"run {number}", tmp_path / str(number), TrainConfig()) for number in range(2)]
    make(jobs[0].log)
    jobs[1].log.mkdir()
    results = run_jobs(jobs, LocalLauncher(), 1)
    assert "must be a regular file, got" in results[0].failure
    assert results[1].failure
    assert not (tmp_path / "elsewhere").exists()


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


def test_step_of_a_stopped_run_is_that_of_its_checkpoint(tmp_path):
    """The last row of metrics can be older: rows are written at intervals, and a stopped run saves at once."""
    job = Job("run", tmp_path / "run", TrainConfig())
    (job.folder / "checkpoints" / "step-00000214").mkdir(parents=True)
    RunDirectory(job.folder).metrics.append({"step": 200, "split": "train"})
    stopped = []

    def launch(arguments, log):
        stopped.append(True)
        return 143

    [result] = run_jobs([job], launch, 1, stopped=lambda: bool(stopped))
    assert result.failure == "stopped at step 214."
