"""A disk that fills up: one sentence, an exit code that is not 0, and everything that was saved is still there."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from command_line import one_sentence
from faults.children import OPTIONS
from faults.folders import assert_no_temporaries, assert_same_run, assert_sound, newest_step
from faults.scale import DISK_LIMITS, PATIENCE
from spherenet.runs import RunDirectory

POINT = 3


def complaint(child):
    """What it said last; the lines before are those of a healthy run."""
    assert "Traceback" not in child.said, child.said
    return child.said.strip().splitlines()[-1]


def test_a_checkpoint_does_not_fit(children, interrupted, whole, folder, tried):
    """A limit on the size of files that each file of the next checkpoint exceeds in turn."""
    newest = RunDirectory(interrupted(4, folder / "sizes")).checkpoints.paths()[-1]
    sizes = sorted(file.stat().st_size for file in newest.glob("*.safetensors"))
    first, last = sizes[0], sizes[-1]
    limits = [first - 1, last - 1, first // 2, last // 2 + first // 2, last - 5000, first + 1]
    for number, limit in enumerate(limits[:DISK_LIMITS]):
        run = interrupted(4, folder / str(number))  # its checkpoint is that of step 3
        child = children.run("train", "--resume", run, largest_file={"size": limit})
        assert child.code == 2, child.said
        assert re.search("(best-00000004|step-00000006) could not be written", complaint(child))
        assert "earlier ones are intact" in complaint(child)
        assert_sound(run)
        assert newest_step(run) == 3
        assert_no_temporaries(run)
        assert children.run("train", "--resume", run).code == 0
        assert_same_run(run, whole())
        tried("a checkpoint that exceeds the largest file allowed")


@pytest.mark.parametrize("room", [0, 20])
def test_the_metrics_do_not_fit(children, interrupted, whole, folder, tried, room):
    """No byte of the next row fits, or a part of it; the checkpoint of step 6 would come later."""
    run = interrupted(4, folder / "run")
    limit = (run / "metrics.jsonl").stat().st_size + room
    child = children.run("train", "--resume", run, largest_file={"size": limit})
    assert child.code == 2, child.said
    reason = "the disk is full" if room else "File too large"
    assert f"metrics.jsonl could not be written ({reason}); the rows before are intact." in complaint(child)
    assert_sound(run)
    assert newest_step(run) == 3
    assert children.run("train", "--resume", run).code == 0
    assert_same_run(run, whole())
    tried("a row of metrics that exceeds the largest file allowed")


def test_nothing_fits(children, folder, tried):
    """Not even config.json: the folder is not a run, nothing half written is left, and it can be used again."""
    run = folder / "run"
    child = children.run("train", *OPTIONS, "--output", run, largest_file={"size": 100})
    assert child.code == 2, child.said
    assert one_sentence(child.said), child.said
    assert [entry.name for entry in run.iterdir() if entry.name != ".lock"] == []
    assert children.run("train", *OPTIONS, "--iterations", 1, "--output", run).code == 0
    tried("a disk that has no room for a run at all")


ON_A_SMALL_DISK = """
import json, subprocess, sys
from spherenet.cli import main
from spherenet.runs.directory import examine
disk, answers, *options = sys.argv[1:]
run = f"{disk}/run"
options += ["--image-size", "12", "--iterations", "90", "--log-every", "1", "--eval-every", "30"]
filled = main(["train", *options, "--output", run])
findings = [(finding.part, finding.good) for finding in examine(run)]
subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
resumed = main(["train", "--resume", run, "--iterations", "30", "--allow-changes"])
after = [(finding.part, finding.good) for finding in examine(run)]
json.dump([filled, findings, resumed, after], open(answers, "w"))
"""


def test_a_full_device(tmp_path, tried):
    """A run on a disk of its own that fills up; when there is room again, it goes on."""
    disk, answers = tmp_path / "disk", tmp_path / "answers.json"
    disk.mkdir()
    alone = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=120k tmpfs '{disk}'"
    if not shutil.which("unshare") or subprocess.run([*alone, mount], capture_output=True).returncode:
        pytest.skip("this system lets nobody mount a small disk")
    program = [sys.executable, "-c", ON_A_SMALL_DISK, disk, answers, *OPTIONS]
    done = subprocess.run(
        [*alone, f"{mount} && exec {shlex.join(map(str, program))}"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=2 * PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    filled, findings, resumed, after = json.loads(answers.read_text())
    assert filled == 2
    assert resumed == 0, done.stderr
    assert all(good for _, good in findings + after), findings + after
    assert any(part.startswith("checkpoints/step") for part, _ in findings)
    assert ["checkpoints/step-00000030", True] in after
    tried("a run on a device that fills up, and goes on when there is room")


def test_an_answer_that_cannot_be_printed(tmp_path, tried):
    """A result that never reached its reader is no success."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "spherenet", "--version"], stdout=full, stderr=subprocess.PIPE, timeout=PATIENCE
        )
    assert done.returncode != 0
    tried("output to /dev/full")
