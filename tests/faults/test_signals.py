"""Asked to leave: one checkpoint at the step it was at, the documented exit code, in seconds, one process or two."""

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
BOUND = 30
"""Seconds a run may take to save and leave; those of the test take milliseconds, unless the machine is busy."""

NOTHING_DUE = ("--checkpoint-every", "100", "--eval-every", "100", "--log-every", "1")


def left_at(run):
    """The step of the one checkpoint."""
    (path,) = RunDirectory(run).checkpoints.paths()
    return newest_step(run) if path else None


@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
def test_one_process(children, whole, folder, tried, number):
    run, released = folder / "run", folder / "released"
    hold = {"step": 4, "until": str(released)}
    child = children.start("train", *OPTIONS, *NOTHING_DUE, "--output", run, hold=hold)
    child.wait_for("step 4/14")
    began = time.monotonic()
    child.signal(number)
    released.touch()
    assert child.wait() == CODES[number], child.said
    assert time.monotonic() - began < BOUND
    step = int(re.search(r"saved at step (\d+) and left", child.said)[1])
    assert f"--resume {run}" in child.said
    assert step == 5  # the step that it was at
    assert left_at(run) == step
    assert not RunDirectory(run).finished
    assert children.run("train", "--resume", run).code == 0
    assert_same_run(run, whole(*NOTHING_DUE))
    tried(f"{number.name} to one process")


def test_a_second_ctrl_c_leaves_at_once(children, folder, tried):
    run = folder / "run"
    child = children.start("train", *OPTIONS, *NOTHING_DUE, "--output", run, slow={"seconds": 60})
    child.wait_for("training from step 0")
    child.signal(signal.SIGINT)
    assert not child.has_ended(1)  # it waits for its step to end
    began = time.monotonic()
    child.signal(signal.SIGINT)
    assert child.wait() == 130
    assert time.monotonic() - began < BOUND
    assert newest_step(run) == -1
    tried("a second Ctrl-C")


def test_a_second_sigterm_changes_nothing(children, folder, tried):
    """Launchers pass on what the terminal has sent already."""
    run = folder / "run"
    child = children.start("train", *OPTIONS, *NOTHING_DUE, "--output", run, slow={"seconds": 1})
    child.wait_for("training from step 0")
    child.signal(signal.SIGTERM)
    time.sleep(0.1)
    child.signal(signal.SIGTERM)
    assert child.wait() == 143
    assert left_at(run) >= 1
    tried("a second SIGTERM")


@pytest.mark.parametrize("to", ["both", "the first", "the second"])
@pytest.mark.parametrize("number", CODES if SOAK else [signal.SIGTERM], ids=lambda number: number.name)
def test_two_processes(children, two_whole, folder, tried, number, to):
    """Whoever hears of it, both leave after the same step, and the first one saves."""
    run, released = folder / "run", folder / "released"
    hold = {"hold": {"step": 4, "until": str(released)}}
    ranks = children.start_ranks("train", *OPTIONS, *NOTHING_DUE, "--output", run, faults={0: hold, 1: hold})
    ranks[0].wait_for("step 4/14")
    began = time.monotonic()
    told = {"both": ranks, "the first": ranks[:1], "the second": ranks[1:]}[to]
    for rank in told:
        rank.signal(number)
    released.touch()
    # A process that was told by the others alone leaves as after a SIGTERM.
    expected = [CODES[number] if rank in told else 143 for rank in ranks]
    assert [rank.wait() for rank in ranks] == expected, [rank.said for rank in ranks]
    assert time.monotonic() - began < BOUND
    assert left_at(run) == int(re.search(r"saved at step (\d+) and left", ranks[0].said)[1]) == 5
    assert "saved at step" not in ranks[1].said
    finish(children, run)
    assert_same_run(run, two_whole)
    tried(f"{number.name} to {to} of two processes")


def finish(children, run):
    ranks = children.start_ranks("train", "--resume", run)
    assert [rank.wait() for rank in ranks] == [0, 0], [rank.said for rank in ranks]


@pytest.fixture(scope="module")
def two_whole(children, place):
    """A run of two processes that nothing happened to."""
    run = place / "two"
    ranks = children.start_ranks("train", *OPTIONS, *NOTHING_DUE, "--output", run)
    assert [rank.wait() for rank in ranks] == [0, 0], [rank.said for rank in ranks]
    return run


@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_process_ends_the_other(children, folder, tried, lost):
    """Not a hang: the one that is left notices, ends with an error, and the run can go on."""
    run = folder / "run"
    faults = {lost: {"die_at_step": {"step": 5}}}
    ranks = children.start_ranks("train", *OPTIONS, "--output", run, faults=faults)
    assert ranks[lost].wait() == -9
    began = time.monotonic()
    assert ranks[1 - lost].wait() not in (0, None)
    assert time.monotonic() - began < BOUND
    assert newest_step(run) == 3
    finish(children, run)
    assert newest_step(run) == 14
    tried("one of two processes killed")


def test_two_processes_end_without_hanging(children, folder, tried):
    """Gloo's thread wants Python to free its last tensors; whoever waits for that thread must not hold Python."""
    for number in range(PAIRS):
        run = folder / str(number)
        ranks = children.start_ranks("train", *OPTIONS, "--iterations", 2, "--output", run)
        assert [rank.wait() for rank in ranks] == [0, 0]
        tried("a run of two processes that comes to its end")
