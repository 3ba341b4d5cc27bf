"""A run is resumed with the options it was started with. Changes are rejected by name, unless they are allowed."""

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
    "operator": ("--operator", "sigmoid"),
    "precision": ("--precision", "float16"),
    "augmentation": ("--augmentation", "flip"),
    "orthogonality": ("--set", "orthogonality=0"),
    "threads": ("--threads", "2"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_option_is_rejected(children, interrupted, folder, tried, name):
    run = interrupted(4, folder / "run")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    child = children.run("train", "--resume", run, *CHANGES[name])
    assert child.code == 2, child.output
    assert f"was started with {name if CHANGES[name][0] == '--set' else CHANGES[name][0]} " in child.output
    assert "--allow-changes" in child.output
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    tried("another option on --resume")


@pytest.mark.parametrize("name", ["batch_size", "iterations", "learning_rate", "loss", "optimizer", "precision"])
def test_changed_option_is_accepted_with_allow_changes(children, interrupted, folder, tried, name):
    run = interrupted(4, folder / "run")
    child = children.run("train", "--resume", run, *CHANGES[name], "--allow-changes")
    assert child.code == 0, child.output
    assert "training from step 3 to" in child.output
    config = RunDirectory(run).config["train"]
    assert str(config[name]) == CHANGES[name][1]
    tried("another option on --resume with --allow-changes")


def test_changed_network_is_rejected_even_with_allow_changes(children, interrupted, uninterrupted, folder, tried):
    """The run is unchanged then, and can be resumed without the change."""
    run = interrupted(4, folder / "run")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    child = children.run("train", "--resume", run, "--widths", 5, 5, 5, "--allow-changes")
    assert child.code == 2, child.output
    assert "does not fit the model" in child.output
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    child = children.run("train", "--resume", run)
    assert child.code == 0, child.output
    assert_same_run(run, uninterrupted())
    tried("another network on --resume with --allow-changes")


def test_options_that_do_not_change_the_result_may_differ(children, interrupted, folder, tried):
    run = interrupted(4, folder / "run")
    child = children.run("train", "--resume", run, "--log-every", 1, "--checkpoint-every", 5, "--workers", 0)
    assert child.code == 0, child.output
    tried("another interval of logs and checkpoints on --resume")


@pytest.mark.parametrize("world", [1, 2])
def test_changed_number_of_processes_is_rejected(children, interrupted, folder, tried, world):
    run = folder / "run"
    if world == 1:
        interrupted(4, run)
    else:
        faults = {rank: {"die_at_step": {"step": 4}} for rank in (0, 1)}
        for rank in children.start_ranks("train", *OPTIONS, "--output", run, faults=faults):
            assert rank.wait() != 0

    def resume(*options):
        if world == 2:
            return [children.start("train", "--resume", run, *options)]
        return children.start_ranks("train", "--resume", run, *options)

    rejected = resume()
    assert {rank.wait() for rank in rejected} == {2}, [rank.output for rank in rejected]
    assert f"was started with {world} processes, got {3 - world}" in rejected[0].output
    allowed = resume("--allow-changes")
    assert {rank.wait() for rank in allowed} == {0}, [rank.output for rank in allowed]
    assert newest_step(run) == 14
    tried("another number of processes on --resume")
