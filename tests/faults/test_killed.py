"""SIGKILL at any moment: saved files stay valid, and the resumed run is bit-identical to an uninterrupted one."""

import json
import random
from itertools import cycle

import pytest

from faults.children import OPTIONS
from faults.folders import assert_same_run, assert_valid, is_run, newest_step
from faults.scale import CRASH_POINTS, RANDOM_KILLS, SOAK
from spherenet.runs import RunDirectory

POINT = 1
VARIANTS = {
    "default": (),
    "accumulation": ("--accumulate", "2"),
    "margin and augmentation": ("--loss", "ga-linear", "--augmentation", "flip-crop"),
    "keep-norms": ("--set", "keep_norms=true"),
}


def start(children, run, options, **faults):
    """Start a run, or resume it if it exists."""
    arguments = ("--resume", run) if is_run(run) else (*OPTIONS, *options, "--output", run)
    return children.start("train", *arguments, **faults)


def finish(children, run, options):
    done = start(children, run, options)
    assert done.wait() == 0, done.output


def check_killed_run(run, before):
    """Assert that all files are valid and return the newest step, which must not be smaller than before."""
    assert_valid(run)
    newest = newest_step(run)
    assert newest >= before
    return newest


def test_resume_after_sigkill_at_random_moments_is_bit_identical(children, uninterrupted, folder, tried):
    chance = random.Random(0)
    duration = 0.2 + RunDirectory(uninterrupted()).summary["seconds"]
    killed = number = 0
    while killed < RANDOM_KILLS:
        options = chance.choice(list(VARIANTS.values()))
        expected, run, newest = uninterrupted(*options), folder / str(number), -1
        number += 1
        for _ in range(chance.choice((1, 2))):
            child = start(children, run, options)
            child.has_ended(chance.uniform(0, duration))
            ended = child.kill()
            assert ended in (-9, 0), child.output
            killed += ended == -9
            tried("kill -9 at a random moment of training", ended == -9)
            newest = check_killed_run(run, newest)
        finish(children, run, options)
        assert_same_run(run, expected)


STEPS = {  # step, whether to save before the kill, and the newest checkpoint after it
    "in the first step": [(1, False, -1)],
    "in the middle of an epoch": [(4, False, 3)],
    "at an epoch's end, before its checkpoint": [(6, False, 3)],
    "at an epoch's end, after its checkpoint": [(6, True, 6)],
    "in the last step": [(14, False, 12)],
    "between the last checkpoint and the summary": [(14, True, 14)],
    "twice in a row at one step": [(5, False, 3), (5, False, 3)],
    "twice in a row, the second time further on": [(4, False, 3), (12, True, 12)],
}
COMBINATIONS = [(moment, variant) for moment in STEPS for variant in VARIANTS]
CHOSEN = (
    COMBINATIONS if SOAK else list(zip(STEPS, cycle(VARIANTS), strict=False))
)  # each moment and each variant at least once


@pytest.mark.parametrize(("moment", "variant"), CHOSEN)
def test_resume_after_sigkill_at_a_step_is_bit_identical(children, uninterrupted, folder, tried, moment, variant):
    options, run, newest = VARIANTS[variant], folder / "run", -1
    expected = uninterrupted(*options)
    for step, after_saving, saved in STEPS[moment]:
        child = start(children, run, options, die_at_step={"step": step, "after_saving": after_saving})
        assert child.wait() == -9, child.output
        tried(f"kill -9 {moment}")
        newest = check_killed_run(run, newest)
        assert newest == saved
    finish(children, run, options)
    assert_same_run(run, expected)


@pytest.fixture(scope="module")
def changes(children, place):
    """Return all changes that a run makes to its folder, in order."""
    folder = place / "changes"
    folder.mkdir()
    watched = {"folder": str(folder / "run"), "record": str(folder / "changes.json")}
    done = children.run("train", *OPTIONS, "--output", folder / "run", changes=watched)
    assert done.code == 0, done.output
    return json.loads((folder / "changes.json").read_text())


def test_resume_after_sigkill_at_any_change_is_bit_identical(children, uninterrupted, changes, folder, tried):
    """Before each open, fsync, rename and removal of a file, and in the middle of each write."""
    every = max(1, len(changes) // CRASH_POINTS)
    for number, point in enumerate(range(0, len(changes), every)):
        run = folder / str(point)
        child = start(children, run, (), changes={"folder": str(run), "die_at": point})
        assert child.wait() == -9, (point, child.output)
        tried("kill -9 at a chosen change of the folder (open, half a write, fsync, rename, removal)")
        newest = check_killed_run(run, -1)
        if number % 2:  # kill the resumed run too
            again = start(children, run, (), changes={"folder": str(run), "die_at": point % 50})
            assert again.wait() in (-9, 0), again.output
            tried("kill -9 at a chosen change while the run resumes", again.code == -9)
            check_killed_run(run, newest)
        finish(children, run, ())
        assert_same_run(run, uninterrupted())


def test_files_are_synced_before_they_are_renamed(changes, tried):
    """A file or folder is synced before it is renamed, and the rename is synced before anything older is removed."""
    unsynced, renamed = set(), set()
    for operation, path, *source in changes:
        folder = path.rpartition("/")[0] or "."
        if operation == "fsync":
            unsynced.discard(path)
            renamed -= {name for name in renamed if (name.rpartition("/")[0] or ".") == path}
        elif operation in ("open", "write"):
            unsynced |= {path, folder}
        elif operation == "mkdir":
            unsynced.add(path)
        elif operation == "rename":
            (origin,) = source
            if path.endswith("-gone"):
                assert not renamed, f"{origin} is removed before {renamed} is synced"
                continue
            dirty = [name for name in unsynced if name == origin or name.startswith(f"{origin}/")]
            assert not dirty, f"{dirty} is not synced when {path} is renamed"
            renamed.add(path)
            unsynced.add(folder)
            tried("order of fsync and rename")
    assert any(path.endswith("summary.json") for operation, path, *_ in changes if operation == "rename")
