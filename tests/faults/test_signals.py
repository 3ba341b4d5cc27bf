"""A signal stops one or two processes within seconds, with one checkpoint and the documented exit code."""

import re
import signal
import time

import pytest

from faults.children import OPTIONS
from faults.folders import assert_same_run, newest_step
from faults.scale import PAIRS, SOAK
from spherenet.runs import RunDirectory

POINT = 7
CODES = {signal.SIGINT: 130, signal.SIGUSR1: 138, signal.SIGTERM: 143}

NO_INTERVALS = ("--checkpoint-every", "100", "--eval-every", "100", "--log-every", "1")


def only_checkpoint(run):
    """Return the step of the only checkpoint."""
    (_,) = RunDirectory(run).checkpoints.paths()
    return newest_step(run)


@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
def test_signal_saves_and_stops_one_process(children, uninterrupted, folder, tried, number):
    run, released = folder / "run", folder / "released"
    hold = {"step": 4, "until": str(released)}
    child = children.start("train", *OPTIONS, *NO_INTERVALS, "--output", run, hold=hold)
    child.wait_for("step 4/14")
    child.signal(number)
    released.touch()
    assert child.wait() == CODES[number], child.output
    step = int(re.search(r"saved at step (\d+) and stopped", child.output)[1])
    assert f"--resume {run}" in child.output
    assert step == 5  # the step during which it was received
    assert only_checkpoint(run) == step
    assert not RunDirectory(run).finished
    assert children.run("train", "--resume", run).code == 0
    assert_same_run(run, uninterrupted(*NO_INTERVALS))
    tried(f"{number.name} to one process")


def test_second_ctrl_c_exits_at_once(children, folder, tried):
    run = folder / "run"
    child = children.start("train", *OPTIONS, *NO_INTERVALS, "--output", run, slow={"seconds": 60})
    child.wait_for("training from step 0")
    child.signal(signal.SIGINT)
    assert not child.has_ended(1)  # it waits for the end of the step
    child.signal(signal.SIGINT)
    assert child.wait() == 130
    assert newest_step(run) == -1
    tried("a second Ctrl-C")


def test_second_sigterm_changes_nothing(children, folder, tried):
    """Launchers forward signals that the process has already received from the terminal."""
    run = folder / "run"
    child = children.start("train", *OPTIONS, *NO_INTERVALS, "--output", run, slow={"seconds": 1})
    child.wait_for("step 1/")
    child.signal(signal.SIGTERM)
    time.sleep(0.1)
    child.signal(signal.SIGTERM)
    assert child.wait() == 143
    assert only_checkpoint(run) >= 1
    tried("a second SIGTERM")


@pytest.mark.parametrize("receiver", ["both", "the first", "the second"])
@pytest.mark.parametrize("number", CODES if SOAK else [signal.SIGTERM], ids=lambda number: number.name)
def test_signal_saves_and_stops_two_processes(children, uninterrupted_pair, folder, tried, number, receiver):
    """Both processes stop after the same step, whichever receives the signal, and the first one saves."""
    run, released = folder / "run", folder / "released"
    hold = {"hold": {"step": 4, "until": str(released)}}
    ranks = children.start_ranks("train", *OPTIONS, *NO_INTERVALS, "--output", run, faults={0: hold, 1: hold})
    ranks[0].wait_for("step 4/14")
    receivers = {"both": ranks, "the first": ranks[:1], "the second": ranks[1:]}[receiver]
    for rank in receivers:
        rank.signal(number)
    released.touch()
    # A process that did not receive the signal itself ends as after a SIGTERM.
    expected = [CODES[number] if rank in receivers else 143 for rank in ranks]
    assert [rank.wait() for rank in ranks] == expected, [rank.output for rank in ranks]
    assert only_checkpoint(run) == int(re.search(r"saved at step (\d+) and stopped", ranks[0].output)[1]) == 5
    assert "saved at step" not in ranks[1].output
    finish(children, run)
    assert_same_run(run, uninterrupted_pair)
    tried(f"{number.name} to {receiver} of two processes")


def finish(children, run):
    ranks = children.start_ranks("train", "--resume", run)
    assert [rank.wait() for rank in ranks] == [0, 0], [rank.output for rank in ranks]


@pytest.fixture(scope="module")
def uninterrupted_pair(children, place):
    """Return an uninterrupted run of two processes."""
    run = place / "two"
    ranks = children.start_ranks("train", *OPTIONS, *NO_INTERVALS, "--output", run)
    assert [rank.wait() for rank in ranks] == [0, 0], [rank.output for rank in ranks]
    return run


@pytest.mark.parametrize("lost", [0, 1])
def test_killed_process_ends_the_other(children, folder, tried, lost):
    """The other process ends with an error instead of hanging, and the run can be resumed."""
    run = folder / "run"
    faults = {lost: {"die_at_step": {"step": 5}}}
    ranks = children.start_ranks("train", *OPTIONS, "--output", run, faults=faults)
    assert ranks[lost].wait() == -9
    assert ranks[1 - lost].wait() not in (0, None)
    assert newest_step(run) == 3
    finish(children, run)
    assert newest_step(run) == 14
    tried("one of two processes killed")


def test_two_processes_end_without_hanging(children, folder, tried):
    """Gloo's thread needs Python's lock to free its last tensors: a thread that waits for it must release the lock."""
    for number in range(PAIRS):
        run = folder / str(number)
        ranks = children.start_ranks("train", *OPTIONS, "--iterations", 2, "--output", run)
        assert [rank.wait() for rank in ranks] == [0, 0]
        tried("a run of two processes that finishes")
