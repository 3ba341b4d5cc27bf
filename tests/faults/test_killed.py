"""kill -9 at any moment: nothing that was saved is lost, and the run that goes on ends as if nothing had happened."""

import json
import random
from itertools import cycle

import pytest

from faults.children import OPTIONS
from faults.folders import assert_same_run, assert_sound, is_run, newest_step
from faults.scale import CRASH_POINTS, RANDOM_KILLS, SOAK
from spherenet.runs import RunDirectory

POINT = 1
VARIANTS = {
    "as it is": (),
    "with accumulation": ("--accumulate", "2"),
    "with a margin and augmentation": ("--loss", "ga-linear", "--augmentation", "flip-crop"),
    "with norms kept": ("--keep-norms", "true"),
}


def start(children, run, options, **faults):
    """Begin a run, or go on with it once it is one."""
    arguments = ("--resume", run) if is_run(run) else (*OPTIONS, *options, "--output", run)
    return children.start("train", *arguments, **faults)


def finish(children, run, options):
    done = start(children, run, options)
    assert done.wait() == 0, done.said


def look_after(run, before):
    """After a kill: all that is there is whole, and the newest checkpoint is no older than it was."""
    assert_sound(run)
    newest = newest_step(run)
    assert newest >= before
    return newest


def test_at_random_moments(children, whole, folder, tried):
    chance = random.Random(0)
    length = 0.2 + RunDirectory(whole()).summary["seconds"]
    killed = number = 0
    while killed < RANDOM_KILLS:
        options = chance.choice(list(VARIANTS.values()))
        expected, run, newest = whole(*options), folder / str(number), -1
        number += 1
        for _ in range(chance.choice((1, 2))):
            child = start(children, run, options)
            child.has_ended(chance.uniform(0, length))
            ended = child.kill()
            assert ended in (-9, 0), child.said
            killed += ended == -9
            tried("kill -9 at a random moment of training", ended == -9)
            newest = look_after(run, newest)
        finish(children, run, options)
        assert_same_run(run, expected)


STEPS = {  # step, whether what is due after it is saved first, and the checkpoint that is then the newest
    "in the first step": [(1, False, -1)],
    "in the middle of an epoch": [(4, False, 3)],
    "at an epoch's end, before its checkpoint": [(6, False, 3)],
    "at an epoch's end, after its checkpoint": [(6, True, 6)],
    "in the last step": [(14, False, 12)],
    "between the last checkpoint and the summary": [(14, True, 14)],
    "twice in a row at one step": [(5, False, 3), (5, False, 3)],
    "twice in a row, the second time further on": [(4, False, 3), (12, True, 12)],
}
ONES = [(moment, variant) for moment in STEPS for variant in VARIANTS]
CHOSEN = ONES if SOAK else list(zip(STEPS, cycle(VARIANTS), strict=False))  # every moment and every variant


@pytest.mark.parametrize(("moment", "variant"), CHOSEN)
def test_at_a_step(children, whole, folder, tried, moment, variant):
    options, run, newest = VARIANTS[variant], folder / "run", -1
    expected = whole(*options)
    for step, after_saving, saved in STEPS[moment]:
        child = start(children, run, options, die_at_step={"step": step, "after_saving": after_saving})
        assert child.wait() == -9, child.said
        tried(f"kill -9 {moment}")
        newest = look_after(run, newest)
        assert newest == saved
    finish(children, run, options)
    assert_same_run(run, expected)


@pytest.fixture(scope="module")
def changes(children, place):
    """Every change that a run makes to its folder, in order."""
    folder = place / "changes"
    folder.mkdir()
    watched = {"folder": str(folder / "run"), "record": str(folder / "changes.json")}
    done = children.run("train", *OPTIONS, "--output", folder / "run", changes=watched)
    assert done.code == 0, done.said
    return json.loads((folder / "changes.json").read_text())


def test_before_every_change_of_the_folder(children, whole, changes, folder, tried):
    """Each open, write, fsync, rename and removal of config, metrics, checkpoints and summary; writes half done."""
    every = max(1, len(changes) // CRASH_POINTS)
    for number, point in enumerate(range(0, len(changes), every)):
        run = folder / str(point)
        child = start(children, run, (), changes={"folder": str(run), "die_at": point})
        assert child.wait() == -9, (point, child.said)
        tried("kill -9 at a chosen change of the folder (open, half a write, fsync, rename, removal)")
        newest = look_after(run, -1)
        if number % 2:  # and once more, while it goes on
            again = start(children, run, (), changes={"folder": str(run), "die_at": point % 50})
            assert again.wait() in (-9, 0), again.said
            tried("kill -9 at a chosen change while the run goes on", again.code == -9)
            look_after(run, newest)
        finish(children, run, ())
        assert_same_run(run, whole())


def test_what_takes_its_place_is_on_the_disk_first(changes, tried):
    """A file or folder is synced before its rename, the rename before anything older is removed."""
    unsynced, renamed = set(), set()
    for kind, path, *source in changes:
        folder = path.rpartition("/")[0] or "."
        if kind == "fsync":
            unsynced.discard(path)
            renamed -= {name for name in renamed if (name.rpartition("/")[0] or ".") == path}
        elif kind in ("open", "write"):
            unsynced |= {path, folder}
        elif kind == "mkdir":
            unsynced.add(path)
        elif kind == "rename":
            (origin,) = source
            is_removal = "-gone-" in path
            if is_removal:
                assert not renamed, f"{origin} is removed before {renamed} is on the disk"
                continue
            dirty = [name for name in unsynced if name == origin or name.startswith(f"{origin}/")]
            assert not dirty, f"{dirty} is not on the disk when {path} takes its place"
            renamed.add(path)
            unsynced.add(folder)
            tried("order of fsync and rename")
    assert any(path.endswith("summary.json") for kind, path, *_ in changes if kind == "rename")
