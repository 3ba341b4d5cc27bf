"""Processes of one run that were started differently, see other data, are late, frozen or lost: one sentence each."""

import signal
import socket
import time

import pytest
import torch

from command_line import one_sentence
from faults.children import OPTIONS
from faults.folders import newest_step
from faults.small_sets import write_pictures
from spherenet.runs import RunDirectory
from spherenet.runs.checkpoints import load_checkpoint

POINT = 14
DIFFERENT = {
    "seed": ("--seed", 1),
    "batch_size": ("--batch-size", 16),
    "loss": ("--loss", "w-cosine"),
    "precision": ("--precision", "bfloat16"),
    "eval_every": ("--eval-every", 3),
}


def start_ranks(children, *options, world=2, environment=None):
    """options: those of each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world)}
    return [
        children.start(*arguments, environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank, arguments in enumerate(options)
    ]


def refusal(child):
    """The one sentence that a process left with."""
    said = [line for line in child.said.strip().splitlines() if line.startswith("spherenet train:")]
    assert len(said) == 1, child.said
    assert "Traceback" not in child.said
    assert one_sentence(said[0])
    return said[0]


@pytest.mark.parametrize("name", DIFFERENT)
def test_another_option_in_one_process_is_refused_in_all(children, folder, tried, name):
    run = folder / "run"
    first = ["train", *OPTIONS, "--output", run]
    ranks = start_ranks(children, first, [*first, *DIFFERENT[name]])
    assert [rank.wait(60) for rank in ranks] == [2, 2], [rank.said for rank in ranks]
    for rank in ranks:
        assert f"{name} must be the same in all processes" in refusal(rank)
    assert not run.exists()
    tried("another option in one of two processes")


def test_other_data_in_one_process_are_refused_in_all(children, folder, tried):
    run = folder / "run"
    for name, count in (("a", 12), ("b", 13)):
        write_pictures(folder / name, per_class=count)
    options = ["train", *OPTIONS, "--data", "folder", "--image-size", "12", "--batch-size", "4", "--output", run]
    ranks = start_ranks(children, *([*options, "--data-dir", folder / name] for name in "ab"))
    assert [rank.wait(60) for rank in ranks] == [2, 2], [rank.said for rank in ranks]
    assert all("the training data must be the same in all processes" in refusal(rank) for rank in ranks)
    assert not run.exists()
    tried("other data in one of two processes")


def test_data_that_only_one_process_cannot_read_end_all(children, folder, tried):
    write_pictures(folder / "a", per_class=12)
    options = ["train", *OPTIONS, "--data", "folder", "--image-size", "12", "--batch-size", "4"]
    ranks = start_ranks(
        children, *([*options, "--data-dir", folder / name, "--output", folder / "run"] for name in ("a", "nowhere"))
    )
    assert [rank.wait(60) for rank in ranks] == [2, 2], [rank.said for rank in ranks]
    assert all("there is no folder" in refusal(rank) for rank in ranks)
    tried("data that one of two processes does not have")


def test_another_resumed_step_is_refused(children, interrupted, folder, tried):
    """One of the machines sees an older copy of the run."""
    import shutil

    new, old = interrupted(10, folder / "new"), interrupted(10, folder / "old")
    shutil.rmtree(RunDirectory(old).checkpoints.paths()[-1])
    ranks = start_ranks(children, *(["train", "--resume", run, "--allow-changes"] for run in (new, old)))
    assert [rank.wait(60) for rank in ranks] == [2, 2], [rank.said for rank in ranks]
    assert all("the resumed step must be the same in all processes" in refusal(rank) for rank in ranks)
    assert newest_step(new) == 9
    tried("another checkpoint in one of two processes")


def test_metrics_are_those_of_the_saved_weights(children, folder, tried):
    """The running means of the process that saves are those that all evaluate with."""
    run = folder / "run"
    options = ["train", *OPTIONS, "--checkpoint-every", 14, "--eval-every", 14, "--seed", 5, "--output", run]
    ranks = start_ranks(children, options, options)
    assert [rank.wait() for rank in ranks] == [0, 0], [rank.said for rank in ranks]
    row = [row for row in RunDirectory(run).metrics.read() if row["split"] == "test"][-1]
    from faults.fork_server import few_digits
    from spherenet.training import Processes, evaluate
    from spherenet.training.saved_runs import load_run

    saved = load_run(run, "last")
    alone = Processes(0, 1, torch.device("cpu"))
    found = evaluate(saved.model, few_digits().test, 10, alone, batch_size=100)
    assert row["loss"] == pytest.approx(found.loss, rel=1e-6)
    assert row["accuracy"] == found.accuracy
    assert load_checkpoint(RunDirectory(run).checkpoints.paths()[-1]).step == row["step"]
    tried("metrics of two processes against an evaluation of what they saved")


BOUND = 40


def test_a_process_that_never_joins(children, folder, tried):
    began = time.monotonic()
    (rank,) = start_ranks(children, ["train", *OPTIONS, "--timeout", 3, "--output", folder / "run"])
    assert rank.wait(BOUND) == 2, rank.said
    assert "processes must join within 3 s" in refusal(rank)
    assert time.monotonic() - began < BOUND
    assert not (folder / "run").exists()
    tried("a process that never joins")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_signals_while_waiting_for_the_others(children, folder, tried, number):
    (rank,) = start_ranks(children, ["train", *OPTIONS, "--output", folder / "run"])
    time.sleep(3)
    began = time.monotonic()
    rank.signal(number)
    assert rank.wait(BOUND) == 128 + number, rank.said
    assert time.monotonic() - began < BOUND
    assert "left before the first step" in refusal(rank)
    tried(f"{number.name} while the other processes have not joined")


def test_a_frozen_process_is_noticed(children, folder, tried):
    run = folder / "run"
    options = ["train", *OPTIONS, "--iterations", 100_000, "--log-every", 1, "--timeout", 5, "--output", run]
    ranks = start_ranks(children, options, options)
    ranks[0].wait_for("step 4/")
    ranks[1].signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert ranks[0].wait(BOUND) == 1, ranks[0].said
        assert time.monotonic() - began < BOUND
        assert "another process of the run" in refusal(ranks[0])
    finally:
        ranks[1].signal(signal.SIGKILL)
        ranks[1].signal(signal.SIGCONT)
        ranks[1].wait()
    tried("one of two processes frozen")


def test_a_lost_process_is_one_sentence(children, folder, tried):
    options = ["train", *OPTIONS, "--iterations", 100_000, "--log-every", 1, "--output", folder / "run"]
    ranks = start_ranks(children, options, options)
    ranks[0].wait_for("step 4/")
    ranks[1].kill()
    assert ranks[0].wait(BOUND) == 1, ranks[0].said
    assert "another process of the run" in refusal(ranks[0])
    tried("one of two processes killed, and what the other one says")
