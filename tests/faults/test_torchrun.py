"""Runs under torchrun: signals are forwarded, a killed worker ends the job, restarted runs are bit-identical."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from faults.children import OPTIONS
from faults.folders import assert_same_tensors, newest_step, tensors_of
from faults.scale import PATIENCE, SOAK
from spherenet.runs import RunDirectory

POINT = 7
WORKER = Path(__file__).with_name("dying_worker.py")


class Job:
    """Run of two processes under torchrun, with its output."""

    def __init__(self, *arguments, restarts=0, **environment):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
             f"--max-restarts={restarts}", str(WORKER), "train", *map(str, arguments)],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **environment},
        )  # fmt: skip
        self.lines = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        with self.process.stderr as lines:
            self.lines.extend(iter(lines.readline, ""))

    def wait_for(self, text):
        deadline = time.monotonic() + PATIENCE
        while not any(text in line for line in list(self.lines)):
            assert time.monotonic() < deadline, self.output
            assert self.process.poll() is None, self.output
            time.sleep(0.02)

    def wait(self):
        try:
            code = self.process.wait(PATIENCE)
        finally:
            self.process.kill()
        self.reader.join(10)
        return code

    @property
    def output(self):
        return "".join(self.lines)


in_a_soak = pytest.mark.skipif(not SOAK, reason="starts torch three more times: only in make soak")


@pytest.mark.parametrize("lost", ["0", "1"] if SOAK else ["1"])
def test_killed_worker_is_restarted_and_the_run_resumed(children, tmp_path, tried, lost):
    """The weights are those of an uninterrupted run of two processes."""
    run, expected = tmp_path / "run", tmp_path / "expected"
    ranks = children.start_ranks("train", *OPTIONS, "--output", expected)
    assert [rank.wait() for rank in ranks] == [0, 0], [rank.output for rank in ranks]
    job = Job(*OPTIONS, "--output", run, restarts=2, DIE_AT_STEP="7", DIE_RANK=lost)
    assert job.wait() == 0, job.output
    assert "training from step 6 to 14" in job.output
    assert RunDirectory(run).finished
    assert_same_tensors(tensors_of(run), tensors_of(expected))
    tried("a worker of torchrun killed, with restarts")


@in_a_soak
def test_killed_worker_ends_the_job_without_restarts(tmp_path, tried):
    run = tmp_path / "run"
    job = Job(*OPTIONS, "--output", run, DIE_AT_STEP="7", DIE_RANK="1")
    assert job.wait() != 0
    assert newest_step(run) == 6
    tried("a worker of torchrun killed, without restarts")


@in_a_soak
def test_ctrl_c_at_torchrun_saves_and_stops(tmp_path, tried):
    """torchrun forwards the signal to the workers, which are in other sessions."""
    run = tmp_path / "run"
    job = Job(*OPTIONS, "--iterations", 100_000, "--log-every", 1, "--checkpoint-every", 100_000, "--output", run)
    job.wait_for("step 3/")
    job.process.send_signal(signal.SIGINT)
    assert job.wait() != 0
    assert "saved at step" in job.output
    assert newest_step(run) >= 3
    tried("Ctrl-C at torchrun")
