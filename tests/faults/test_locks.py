"""A run has one writer: a second process ends at once, and the lock of a killed process is released."""

import pytest

from faults.children import OPTIONS
from faults.folders import assert_same_run, newest_step
from faults.scale import RACERS, RACES
from faults.small_sets import write_images

POINT = 8


def test_second_run_in_the_same_folder_ends_at_once(children, uninterrupted, folder, tried):
    run, released = folder / "run", folder / "released"
    first = children.start("train", *OPTIONS, "--output", run, hold={"step": 5, "until": str(released)})
    first.wait_for("step 4/14")
    for arguments in (["--resume", run], [*OPTIONS, "--output", run]):
        second = children.run("train", *arguments)  # it ends although the first is held
        assert second.code == 2, second.output
        assert "is in use by another process" in second.output or "contains a run" in second.output
        assert "Traceback" not in second.output
        tried("a second run in the folder of a first")
    released.touch()
    assert first.wait() == 0, first.output
    assert_same_run(run, uninterrupted())


def test_only_one_of_several_new_runs_trains(children, uninterrupted, folder, tried):
    for race in range(RACES):
        run = folder / str(race)
        racers = [children.start("train", *OPTIONS, "--output", run) for _ in range(RACERS)]
        assert sorted(racer.wait() for racer in racers) == [0] + [2] * (RACERS - 1), [racer.output for racer in racers]
        assert not any("Traceback" in racer.output for racer in racers)
        assert_same_run(run, uninterrupted())
        tried("processes that start one run at the same moment", RACERS)


def test_only_one_of_several_resumed_runs_trains(children, interrupted, uninterrupted, folder, tried):
    for race in range(RACES):
        run = interrupted(10, folder / str(race))
        racers = [children.start("train", "--resume", run) for _ in range(RACERS)]
        codes = sorted(racer.wait() for racer in racers)
        # A process that starts after the end of the run finds it finished.
        assert codes[0] == 0
        assert set(codes) <= {0, 2}, [racer.output for racer in racers]
        assert not any("Traceback" in racer.output for racer in racers)
        assert_same_run(run, uninterrupted())
        tried("processes that resume one run at the same moment", RACERS)


def test_lock_of_a_killed_process_is_released(children, uninterrupted, folder, tried):
    run = folder / "run"
    first = children.start("train", *OPTIONS, "--output", run, hold={"step": 5, "until": "never"})
    first.wait_for("step 4/14")
    first.kill()
    assert newest_step(run) == 3
    second = children.run("train", "--resume", run)
    assert second.code == 0, second.output
    assert_same_run(run, uninterrupted())
    tried("a run whose owner was killed a moment ago")


@pytest.mark.parametrize("workers", [2])
def test_workers_of_a_killed_process_do_not_hold_its_lock(children, folder, tried, workers):
    """The workers end some seconds after the process."""
    write_images(folder / "images", per_class=12)
    run = folder / "run"
    options = ["--data", "folder", "--data-dir", folder / "images", "--image-size", "12", "--batch-size", "4",
               "--workers", workers, "--eval-every", "7"]  # fmt: skip
    first = children.start("train", *OPTIONS, *options, "--output", run, hold={"step": 5, "until": "never"})
    first.wait_for("step 4/14")
    first.kill()
    second = children.run("train", "--resume", run)
    assert second.code == 0, second.output
    tried("a run whose owner was killed, but not yet the workers that read its images")
