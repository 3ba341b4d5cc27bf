"""A run goes on as it was begun: anything else is refused, by name, unless it is asked for."""

import pytest

from faults.children import OPTIONS
from faults.folders import assert_same_run, newest_step
from spherenet.runs import RunDirectory

POINT = 9
CHANGES = {
    "batch_size": ("--batch-size", "16"),
    "iterations": ("--iterations", "20"),
    "accumulate": ("--accumulate", "2"),
    "seed": ("--seed", "1"),
    "learning_rate": ("--learning-rate", "0.01"),
    "optimizer": ("--optimizer", "sgd"),
    "loss": ("--loss", "w-cosine"),
    "operator": ("--operator", "cosine"),
    "precision": ("--precision", "float16"),
    "augmentation": ("--augmentation", "flip"),
    "orthogonality": ("--orthogonality", "0"),
    "threads": ("--threads", "2"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_option_is_refused(children, interrupted, folder, tried, name):
    run = interrupted(4, folder / "run")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    child = children.run("train", "--resume", run, *CHANGES[name])
    assert child.code == 2, child.said
    assert f"was begun with {name} = " in child.said
    assert "--allow-changes" in child.said
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    tried("another option on --resume")


@pytest.mark.parametrize("name", ["batch_size", "iterations", "learning_rate", "loss", "optimizer", "precision"])
def test_another_option_is_taken_when_asked_for(children, interrupted, folder, tried, name):
    run = interrupted(4, folder / "run")
    child = children.run("train", "--resume", run, *CHANGES[name], "--allow-changes")
    assert child.code == 0, child.said
    assert "training from step 3 to" in child.said
    config = RunDirectory(run).config["train"]
    assert str(config[name]) == CHANGES[name][1]
    tried("another option on --resume with --allow-changes")


def test_another_network_is_refused_even_then(children, interrupted, whole, folder, tried):
    """And the run is as it was: without the change it goes on."""
    run = interrupted(4, folder / "run")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    child = children.run("train", "--resume", run, "--widths", 5, 5, 5, "--allow-changes")
    assert child.code == 2, child.said
    assert "does not fit the model" in child.said
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    child = children.run("train", "--resume", run)
    assert child.code == 0, child.said
    assert_same_run(run, whole())
    tried("another network on --resume with --allow-changes")


def test_what_changes_no_result_may_differ(children, interrupted, folder, tried):
    run = interrupted(4, folder / "run")
    child = children.run("train", "--resume", run, "--log-every", 1, "--checkpoint-every", 5, "--workers", 0)
    assert child.code == 0, child.said
    tried("another interval of logs and checkpoints on --resume")


@pytest.mark.parametrize("begun_with", [1, 2])
def test_another_number_of_processes(children, interrupted, folder, tried, begun_with):
    run = folder / "run"
    if begun_with == 1:
        interrupted(4, run)
    else:
        faults = {rank: {"die_at_step": {"step": 4}} for rank in (0, 1)}
        for rank in children.start_ranks("train", *OPTIONS, "--output", run, faults=faults):
            assert rank.wait() != 0

    def resumed(*options):
        if begun_with == 2:
            return [children.start("train", "--resume", run, *options)]
        return children.start_ranks("train", "--resume", run, *options)

    refused = resumed()
    assert {rank.wait() for rank in refused} == {2}, [rank.said for rank in refused]
    assert f"was begun with {begun_with} processes, not {3 - begun_with}" in refused[0].said
    allowed = resumed("--allow-changes")
    assert {rank.wait() for rank in allowed} == {0}, [rank.said for rank in allowed]
    assert newest_step(run) == 14
    tried("another number of processes on --resume")
