"""Several hosts, each in a network namespace: same result as on one host, and one of them is cut off during the run."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from faults.children import OPTIONS
from faults.folders import assert_same_tensors, newest_step, tensors_of
from faults.hosts import Hosts, NotPermittedError
from faults.scale import PATIENCE, SOAK
from faults.test_inconsistent_processes import error_of
from spherenet.runs import RunDirectory

POINT = 7
WORKER = Path(__file__).with_name("dying_worker.py")
COUNT = 4
TIMEOUT = 5
JOIN = 120  # seconds for which torchrun waits for the other hosts when a job starts or is restarted
# The batch can be divided by three and by four, and BatchNorm would see the images of one process only.
SHARED = [*OPTIONS, "--batch-size", 24, "--no-batch-norm", "--timeout", TIMEOUT]
NETWORK = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@pytest.fixture(scope="module")
def hosts():
    """Return four hosts. They are removed at the end, whatever happens."""
    try:
        created = Hosts(COUNT)
    except NotPermittedError as error:
        pytest.skip(str(error))
    yield created
    created.close()


@pytest.fixture(scope="module")
def on_one_host(children, place):
    """Return a run of four processes on one host."""
    run = place / "on-one-host"
    ranks = children.start_ranks("train", *SHARED, "--output", run, world=COUNT)
    assert [rank.wait() for rank in ranks] == [0] * COUNT, [rank.output for rank in ranks]
    return run


def start_on_hosts(children, hosts, *arguments, **faults):
    """Start one process per host, without torchrun."""
    shared = {**NETWORK, "MASTER_ADDR": hosts.address(0), "MASTER_PORT": "29400", "WORLD_SIZE": str(COUNT)}
    return [
        children.start(
            *arguments, environment={**shared, "RANK": str(rank), "LOCAL_RANK": "0"}, host={"name": name}, **faults
        )
        for rank, name in enumerate(hosts.names)
    ]


def test_four_hosts_train_as_one_host(children, hosts, on_one_host, folder, tried):
    run = folder / "run"
    ranks = start_on_hosts(children, hosts, "train", *SHARED, "--output", run)
    assert [rank.wait() for rank in ranks] == [0] * COUNT, [rank.output for rank in ranks]
    assert_same_tensors(tensors_of(run), tensors_of(on_one_host))
    tried("a run on four hosts against one on one host")


@pytest.mark.parametrize("lost", range(COUNT) if SOAK else [COUNT - 1])
def test_all_processes_end_if_a_host_is_cut_off(children, hosts, folder, tried, lost):
    """No connection is closed: packets are lost, and only the timeout detects it."""
    run, proceed = folder / "run", folder / "proceed"
    hold = {"step": 7, "until": str(proceed)}
    ranks = start_on_hosts(children, hosts, "train", *SHARED, "--output", run, "--log-every", 1, hold=hold)
    ranks[0].wait_for("step 7/")
    hosts.cut_off(lost)
    try:
        proceed.touch()
        assert [rank.wait() for rank in ranks] == [1] * COUNT, [rank.output for rank in ranks]
    finally:
        hosts.connect(lost)
    assert all(f"did not respond within {TIMEOUT} s" in error_of(rank) for rank in ranks)
    assert newest_step(run) == 6
    tried("one of four hosts cut off")


def test_run_is_resumed_if_only_some_processes_count_a_restart(children, folder, tried):
    """torchrun does not count the restart of a host that only waits for another one whose process has failed."""
    run = folder / "run"
    killed = children.start_ranks("train", *SHARED, "--output", run, faults={1: {"die_at_step": {"step": 7}}})
    assert [rank.wait() for rank in killed] == [1, -9], [rank.output for rank in killed]
    ranks = children.start_ranks(
        "train", *SHARED, "--output", run, environments=[{"TORCHELASTIC_RESTART_COUNT": count} for count in "10"]
    )
    assert [rank.wait() for rank in ranks] == [0, 0], [rank.output for rank in ranks]
    assert "training from step 6 to 14" in ranks[0].output
    tried("a restart that only one of two processes counts")


class Torchrun:
    """A job of one process per host, with one torchrun on each host that meet by a c10d rendezvous on host 0.

    The intervals of the rendezvous are shorter than torch's defaults, for a short test. The timeout is longer than that
    of forked processes, because starting torch takes time.
    """

    def __init__(self, hosts, folder, *arguments, nodes, restarts=0, **environment):
        # `is_host`: names of these hosts cannot be looked up, so that torchrun does not recognize its own address.
        conf = f"join_timeout={JOIN},last_call_timeout=15,keep_alive_interval=3"
        options = [f"--nnodes={nodes}", "--nproc-per-node=1", f"--max-restarts={restarts}", "--monitor-interval=0.2",
                   "--rdzv-backend=c10d", f"--rdzv-endpoint={hosts.address(0)}:29500", "--rdzv-id=hosts"]  # fmt: skip
        self.logs = [folder / f"host-{host}.txt" for host in range(hosts.count)]
        self.processes = []
        for host, (name, log) in enumerate(zip(hosts.names, self.logs, strict=True)):
            with log.open("w") as stream:
                self.processes.append(subprocess.Popen(
                    ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", *options,
                     f"--rdzv-conf={conf},is_host={int(host == 0)}", f"--local-addr={hosts.address(host)}", str(WORKER),
                     "train", *map(str, arguments), "--timeout", "15"],
                    stdout=stream, stderr=subprocess.STDOUT, env={**os.environ, **NETWORK, **environment},
                ))  # fmt: skip

    def output(self):
        return "\n".join(f"{log.name}:\n{log.read_text()}" for log in self.logs)

    def wait_for(self, text):
        """Wait until a host has printed a text."""
        deadline = time.monotonic() + PATIENCE
        while not any(text in log.read_text() for log in self.logs):
            assert time.monotonic() < deadline, self.output()
            assert all(process.poll() is None for process in self.processes), self.output()
            time.sleep(0.02)

    def codes(self, timeout):
        """Return the exit codes of all hosts; fail if a host has not ended by then."""
        deadline = time.monotonic() + timeout
        try:
            return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job did not end in {timeout} s:\n{self.output()}") from None

    def close(self):
        for process in self.processes:
            if process.poll() is None:
                process.terminate()  # torchrun ends its workers
        for process in self.processes:
            try:
                process.wait(240)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def torchrun(hosts, tmp_path):
    """Return a function that starts torchrun on all hosts. What it started is ended after the test."""
    jobs = []

    def start(*arguments, **options):
        jobs.append(Torchrun(hosts, tmp_path, *arguments, **options))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


in_a_soak = pytest.mark.skipif(not SOAK, reason="starts torch up to eleven times: only in make soak")


@in_a_soak
def test_torchrun_on_four_hosts_trains_as_one_host(torchrun, on_one_host, tmp_path, tried):
    job = torchrun(*SHARED, "--output", tmp_path / "run", nodes=COUNT)
    assert job.codes(PATIENCE) == [0] * COUNT, job.output()
    assert_same_tensors(tensors_of(tmp_path / "run"), tensors_of(on_one_host))
    tried("torchrun on four hosts against one host")


@in_a_soak
def test_torchrun_resumes_on_three_hosts_if_one_is_cut_off(torchrun, hosts, on_one_host, tmp_path, tried):
    """The run needs --allow-changes, because the number of processes changes. Results differ by rounding."""
    run, proceed = tmp_path / "run", tmp_path / "proceed"
    job = torchrun(*SHARED, "--output", run, "--log-every", 1, "--allow-changes", nodes=f"{COUNT - 1}:{COUNT}",
                   restarts=1, HOLD_AT_STEP="7", HOLD_UNTIL=str(proceed))  # fmt: skip
    job.wait_for("step 7/")
    lost = COUNT - 1
    hosts.cut_off(lost)
    try:
        proceed.touch()
        codes = job.codes(PATIENCE)
    finally:
        hosts.connect(lost)
    assert codes[:lost] == [0] * lost, job.output()
    assert codes[lost] != 0
    assert "training from step 6 to 14" in job.output()
    assert RunDirectory(run).finished
    assert RunDirectory(run).config["processes"] == COUNT - 1
    trained, expected = tensors_of(run), tensors_of(on_one_host)
    for name in expected:
        if "step-00000014/model" in name:
            torch.testing.assert_close(trained[name], expected[name], rtol=1e-3, atol=1e-4)
    tried("one of four hosts cut off, restart with three")


@in_a_soak
@pytest.mark.parametrize("lost", [0, COUNT - 1])
def test_torchrun_ends_on_all_hosts_if_one_is_cut_off(torchrun, hosts, tmp_path, tried, lost):
    """Without restarts, or if the lost host is that of the rendezvous, which waits in vain for the others to join."""
    run, proceed = tmp_path / "run", tmp_path / "proceed"
    job = torchrun(*SHARED, "--output", run, "--log-every", 1, nodes=COUNT, restarts=0 if lost else 1,
                   HOLD_AT_STEP="7", HOLD_UNTIL=str(proceed))  # fmt: skip
    job.wait_for("step 7/")
    hosts.cut_off(lost)
    try:
        proceed.touch()
        codes = job.codes(PATIENCE)
    finally:
        hosts.connect(lost)
    assert all(codes), job.output()
    assert newest_step(run) == 6
    tried("one of four hosts cut off under torchrun, without restarts or with the rendezvous on it")
