"""A full disk ends a run with one sentence and an exit code other than 0, and everything saved before is valid."""

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
from faults.folders import assert_no_temporaries, assert_same_run, assert_valid, newest_step
from faults.scale import DISK_LIMITS, PATIENCE
from spherenet.runs import RunDirectory

POINT = 3


def last_line(child):
    """Return the last line of the output, without a traceback. The lines before report progress."""
    assert "Traceback" not in child.output, child.output
    return child.output.strip().splitlines()[-1]


def test_checkpoint_that_does_not_fit_keeps_the_earlier_one(children, interrupted, uninterrupted, folder, tried):
    """Each file of the next checkpoint exceeds the limit on the size of files in turn."""
    newest = RunDirectory(interrupted(4, folder / "sizes")).checkpoints.paths()[-1]
    sizes = sorted(file.stat().st_size for file in newest.glob("*.safetensors"))
    first, last = sizes[0], sizes[-1]
    limits = [first - 1, last - 1, first // 2, last // 2 + first // 2, last - 5000, first + 1]
    for number, limit in enumerate(limits[:DISK_LIMITS]):
        run = interrupted(4, folder / str(number))  # its checkpoint is that of step 3
        child = children.run("train", "--resume", run, largest_file={"size": limit})
        assert child.code == 2, child.output
        assert re.search("(best-00000004|step-00000006) could not be written", last_line(child))
        assert "earlier ones are valid" in last_line(child)
        assert_valid(run)
        assert newest_step(run) == 3
        assert_no_temporaries(run)
        assert children.run("train", "--resume", run).code == 0
        assert_same_run(run, uninterrupted())
        tried("a checkpoint that exceeds the largest file allowed")


def test_changed_options_that_cannot_be_recorded_leave_the_run_unchanged(children, interrupted, folder, tried):
    run = interrupted(4, folder / "run")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    limit = (run / "config.json").stat().st_size // 2
    options = ["--learning-rate", "0.01", "--allow-changes"]
    child = children.run("train", "--resume", run, *options, largest_file={"size": limit})
    assert child.code == 2, child.output
    assert "config.json of" in last_line(child)
    assert "could not be written (File too large); the run is unchanged." in last_line(child)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    tried("changed options that do not fit on the disk")


@pytest.mark.parametrize("space", [0, 20])
def test_row_that_does_not_fit_keeps_the_earlier_rows(children, interrupted, uninterrupted, folder, tried, space):
    """Nothing or only the start of the next row fits."""
    run = interrupted(4, folder / "run")
    limit = (run / "metrics.jsonl").stat().st_size + space
    child = children.run("train", "--resume", run, largest_file={"size": limit})
    assert child.code == 2, child.output
    reason = "the disk is full" if space else "File too large"
    assert f"metrics.jsonl could not be written ({reason}); earlier rows are valid." in last_line(child)
    assert_valid(run)
    assert newest_step(run) == 3
    assert children.run("train", "--resume", run).code == 0
    assert_same_run(run, uninterrupted())
    tried("a row of metrics that exceeds the largest file allowed")


def test_disk_without_space_leaves_no_files(children, folder, tried):
    """Not even config.json fits: the folder is not a run, has no temporary files and can be used again."""
    run = folder / "run"
    child = children.run("train", *OPTIONS, "--output", run, largest_file={"size": 100})
    assert child.code == 2, child.output
    assert one_sentence(child.output), child.output
    assert [entry.name for entry in run.iterdir() if entry.name != ".lock"] == []
    assert children.run("train", *OPTIONS, "--iterations", 1, "--output", run).code == 0
    tried("a disk without space for a run")


ON_A_SMALL_DISK = """
import json, subprocess, sys
from spherenet.cli import main
from spherenet.runs.directory import examine
disk, results, *options = sys.argv[1:]
run = f"{disk}/run"
options += ["--image-size", "12", "--iterations", "90", "--log-every", "1", "--eval-every", "30"]
filled = main(["train", *options, "--output", run])
findings = [(finding.name, finding.valid) for finding in examine(run)]
subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
resumed = main(["train", "--resume", run, "--iterations", "30", "--allow-changes"])
after = [(finding.name, finding.valid) for finding in examine(run)]
json.dump([filled, findings, resumed, after], open(results, "w"))
"""


def test_run_on_a_full_device_is_resumed_later(tmp_path, tried):
    """A run fills a small disk, and is resumed when there is space again."""
    disk, results = tmp_path / "disk", tmp_path / "results.json"
    disk.mkdir()
    unshared = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=120k tmpfs '{disk}'"
    if not shutil.which("unshare") or subprocess.run([*unshared, mount], capture_output=True).returncode:
        pytest.skip("mounting a small disk is not allowed")
    program = [sys.executable, "-c", ON_A_SMALL_DISK, disk, results, *OPTIONS]
    done = subprocess.run(
        [*unshared, f"{mount} && exec {shlex.join(map(str, program))}"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=2 * PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    filled, findings, resumed, after = json.loads(results.read_text())
    assert filled == 2
    assert resumed == 0, done.stderr
    assert all(valid for _, valid in findings + after), findings + after
    assert any(name.startswith("checkpoints/step") for name, _ in findings)
    assert ["checkpoints/step-00000030", True] in after
    tried("a run on a device that fills up, and resumes when there is space")


@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], ["train", "--help"], ["data", "mnist5k"]], ids=" ".join
)
def test_output_to_a_full_device_is_an_error(arguments, tried):
    """The exit code is not 0 if the result cannot be printed, and the reason is one sentence."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "spherenet", *arguments],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=PATIENCE,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == f"spherenet{'' if arguments[0][0] == '-' else ' ' + arguments[0]}: No space left on device.\n"
    tried("output to /dev/full")
