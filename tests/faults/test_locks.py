"""One run, one writer: whoever comes second leaves at once, and a killed owner leaves no lock behind."""

import time

import pytest

from faults.children import OPTIONS
from faults.folders import assert_same_run, newest_step
from faults.scale import RACERS, RACES
from faults.small_sets import write_pictures

POINT = 8
BOUND = 30
"""Seconds in which the second has left; it takes milliseconds, unless the machine is busy."""


def test_a_second_run_in_the_same_folder_leaves_at_once(children, whole, folder, tried):
    run, released = folder / "run", folder / "released"
    first = children.start("train", *OPTIONS, "--output", run, hold={"step": 5, "until": str(released)})
    first.wait_for("step 4/14")
    for arguments in (["--resume", run], [*OPTIONS, "--output", run]):
        began = time.monotonic()
        second = children.run("train", *arguments)
        assert time.monotonic() - began < BOUND
        assert second.code == 2, second.said
        assert "is in use by another process" in second.said or "holds a run already" in second.said
        assert "Traceback" not in second.said
        tried("a second run in the folder of a first")
    released.touch()
    assert first.wait() == 0, first.said
    assert_same_run(run, whole())


def test_of_runs_that_begin_together_one_goes_on(children, whole, folder, tried):
    for race in range(RACES):
        run = folder / str(race)
        racers = [children.start("train", *OPTIONS, "--output", run) for _ in range(RACERS)]
        assert sorted(racer.wait() for racer in racers) == [0] + [2] * (RACERS - 1), [racer.said for racer in racers]
        assert not any("Traceback" in racer.said for racer in racers)
        assert_same_run(run, whole())
        tried("processes that begin one run at the same moment", RACERS)


def test_of_runs_that_go_on_together_one_goes_on(children, interrupted, whole, folder, tried):
    for race in range(RACES):
        run = interrupted(10, folder / str(race))
        racers = [children.start("train", "--resume", run) for _ in range(RACERS)]
        codes = sorted(racer.wait() for racer in racers)
        # One that looks when the run has just ended finds it finished, or finds nothing left to do.
        assert codes[0] == 0
        assert set(codes) <= {0, 2}, [racer.said for racer in racers]
        assert not any("Traceback" in racer.said for racer in racers)
        assert_same_run(run, whole())
        tried("processes that go on with one run at the same moment", RACERS)


def test_a_killed_owner_leaves_no_lock(children, whole, folder, tried):
    run = folder / "run"
    first = children.start("train", *OPTIONS, "--output", run, hold={"step": 5, "until": "never"})
    first.wait_for("step 4/14")
    first.kill()
    assert newest_step(run) == 3
    second = children.run("train", "--resume", run)
    assert second.code == 0, second.said
    assert_same_run(run, whole())
    tried("a run whose owner was killed a moment ago")


@pytest.mark.parametrize("workers", [2])
def test_nor_do_the_workers_of_a_killed_owner(children, folder, tried, workers):
    """They outlive it by some seconds; the lock does not wait for them."""
    write_pictures(folder / "pictures", per_class=12)
    run = folder / "run"
    options = ["--data", "folder", "--data-dir", folder / "pictures", "--image-size", "12", "--batch-size", "4",
               "--workers", workers, "--eval-every", "7"]  # fmt: skip
    first = children.start("train", *OPTIONS, *options, "--output", run, hold={"step": 5, "until": "never"})
    first.wait_for("step 4/14")
    first.kill()
    second = children.run("train", "--resume", run)
    assert second.code == 0, second.said
    tried("a run whose owner was killed, but not yet the workers that read its pictures")
