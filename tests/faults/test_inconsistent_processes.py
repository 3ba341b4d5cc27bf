"""Processes of a run with different options or data, or that are late, frozen or killed: all end with one sentence."""

import shutil
import signal
import socket
import time

import pytest
import torch

from command_line import one_sentence
from faults.children import OPTIONS
from faults.folders import newest_step
from faults.small_sets import write_images
from spherenet.runs import RunDirectory
from spherenet.runs.checkpoints import load_checkpoint

POINT = 14
DIFFERENT = {
    "seed": ("--seed", 1),
    "batch_size": ("--batch-size", 16),
    "loss": ("--loss", "w-cosine"),
    "precision": ("--precision", "bfloat16"),
    "eval_every": ("--eval-every", 3),
    "checkpoint_every": ("--checkpoint-every", 2),
}


def start_ranks(children, *options, world=2, environment=None):
    """Start one process per command line. options: the command line of each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world)}
    return [
        children.start(*arguments, environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank, arguments in enumerate(options)
    ]


def error_of(child):
    """Return the error message of a process, which is one sentence."""
    lines = [line for line in child.output.strip().splitlines() if line.startswith("spherenet train:")]
    assert len(lines) == 1, child.output
    assert "Traceback" not in child.output
    assert one_sentence(lines[0])
    return lines[0]


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_option_in_one_process_ends_all(children, folder, tried, name):
    run = folder / "run"
    first = ["train", *OPTIONS, "--output", run]
    ranks = start_ranks(children, first, [*first, *DIFFERENT[name]])
    assert [rank.wait(240) for rank in ranks] == [2, 2], [rank.output for rank in ranks]
    for rank in ranks:
        assert f"{name.replace('_', '-')} must be the same in all processes" in error_of(rank)
    assert not run.exists()
    tried("another option in one of two processes")


def test_different_data_in_one_process_end_all(children, folder, tried):
    run = folder / "run"
    for name, count in (("a", 12), ("b", 13)):
        write_images(folder / name, per_class=count)
    options = ["train", *OPTIONS, "--data", "folder", "--image-size", "12", "--batch-size", "4", "--output", run]
    ranks = start_ranks(children, *([*options, "--data-dir", folder / name] for name in "ab"))
    assert [rank.wait(240) for rank in ranks] == [2, 2], [rank.output for rank in ranks]
    assert all("the training data must be the same in all processes" in error_of(rank) for rank in ranks)
    assert not run.exists()
    tried("other data in one of two processes")


def test_missing_data_in_one_process_end_all(children, folder, tried):
    write_images(folder / "a", per_class=12)
    options = ["train", *OPTIONS, "--data", "folder", "--image-size", "12", "--batch-size", "4"]
    ranks = start_ranks(
        children, *([*options, "--data-dir", folder / name, "--output", folder / "run"] for name in ("a", "nowhere"))
    )
    assert [rank.wait(240) for rank in ranks] == [2, 2], [rank.output for rank in ranks]
    assert all("there is no folder" in error_of(rank) for rank in ranks)
    tried("data that one of two processes does not have")


def test_different_checkpoint_in_one_process_ends_all(children, interrupted, folder, tried):
    """For example if one of the machines has an older copy of the run."""
    new, old = interrupted(10, folder / "new"), interrupted(10, folder / "old")
    shutil.rmtree(RunDirectory(old).checkpoints.paths()[-1])
    ranks = start_ranks(children, *(["train", "--resume", run, "--allow-changes"] for run in (new, old)))
    assert [rank.wait(240) for rank in ranks] == [2, 2], [rank.output for rank in ranks]
    assert all("the resumed step must be the same in all processes" in error_of(rank) for rank in ranks)
    assert newest_step(new) == 9
    tried("another checkpoint in one of two processes")


def test_resume_in_one_process_only_ends_all(children, interrupted, folder, tried):
    run = interrupted(10, folder / "run")
    ranks = start_ranks(
        children, ["train", "--resume", run, "--allow-changes"], ["train", *OPTIONS, "--output", folder / "new"]
    )
    assert [rank.wait(240) for rank in ranks] == [2, 2], [rank.output for rank in ranks]
    assert all("resume must be the same in all processes" in error_of(rank) for rank in ranks)
    assert not (folder / "new").exists()
    tried("one of two processes resumes, the other one starts a run")


def test_evaluation_of_different_runs_in_one_group_is_rejected(children, uninterrupted, tried):
    """Otherwise the counts of two networks would be added."""
    runs = [uninterrupted(), uninterrupted("--accumulate", "2")]
    ranks = start_ranks(children, *(["evaluate", run, "--allow-changes"] for run in runs))
    assert [rank.wait(240) for rank in ranks] == [2, 2], [rank.output for rank in ranks]
    assert all("the weights must be the same in all processes" in rank.output for rank in ranks)
    tried("another run in one of two evaluating processes")


def test_all_processes_leave_out_the_same_broken_images(children, folder, tried):
    """The main process decodes all images and tells the others, which decode none before the training."""
    paths, run = write_images(folder / "images", per_class=12), folder / "run"
    paths[3].write_bytes(b"broken")
    images = ["--data", folder / "images", "--image-size", 12, "--batch-size", 4, "--workers", 0]
    options = ["train", *OPTIONS, *images, "--on-broken", "skip", "--validation-fraction", 0.2, "--output", run]
    ranks = start_ranks(children, options, options)
    assert [rank.wait() for rank in ranks] == [0, 0], [rank.output for rank in ranks]
    config = RunDirectory(run).config
    assert config["data"]["broken"] == ["cat/3.gif"]
    assert sum(config["images"].values()) == 23
    assert "1 of 24 images cannot be read" in ranks[0].output
    tried("a broken image and two processes")


def test_metrics_are_those_of_the_saved_weights(children, folder, tried):
    """All processes evaluate with the running means of the main process, which are saved."""
    run = folder / "run"
    options = ["train", *OPTIONS, "--checkpoint-every", 14, "--eval-every", 14, "--seed", 5, "--output", run]
    ranks = start_ranks(children, options, options)
    assert [rank.wait() for rank in ranks] == [0, 0], [rank.output for rank in ranks]
    row = [row for row in RunDirectory(run).metrics.read() if row["split"] == "test"][-1]
    from faults.fork_server import few_digits
    from spherenet.training import Processes, evaluate
    from spherenet.training.saved_runs import load_run

    saved = load_run(run, "last")
    single = Processes(0, 1, torch.device("cpu"))
    evaluation = evaluate(saved.model, few_digits().test, 10, single, batch_size=100)
    assert row["loss"] == pytest.approx(evaluation.loss, rel=1e-6)
    assert row["accuracy"] == evaluation.accuracy
    assert load_checkpoint(RunDirectory(run).checkpoints.paths()[-1]).step == row["step"]
    tried("metrics of two processes against an evaluation of what they saved")


def test_missing_process_ends_the_others(children, folder, tried):
    (rank,) = start_ranks(children, ["train", *OPTIONS, "--timeout", 3, "--output", folder / "run"])
    assert rank.wait() == 2, rank.output
    assert "processes must join within 3 s" in error_of(rank)
    assert not (folder / "run").exists()
    tried("a process that never joins")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_signal_while_waiting_for_other_processes_ends_the_run(children, folder, tried, number):
    (rank,) = start_ranks(children, ["train", *OPTIONS, "--output", folder / "run"])
    time.sleep(3)
    rank.signal(number)
    assert rank.wait() == 128 + number, rank.output
    assert "stopped" in error_of(rank)
    tried(f"{number.name} while the other processes have not joined")


def test_frozen_process_ends_the_others(children, folder, tried):
    run = folder / "run"
    options = ["train", *OPTIONS, "--iterations", 100_000, "--log-every", 1, "--timeout", 5, "--output", run]
    ranks = start_ranks(children, options, options)
    ranks[0].wait_for("step 4/")
    ranks[1].signal(signal.SIGSTOP)
    try:
        assert ranks[0].wait() == 1, ranks[0].output
        assert "another process of the run" in error_of(ranks[0])
    finally:
        ranks[1].signal(signal.SIGKILL)
        ranks[1].signal(signal.SIGCONT)
        ranks[1].wait()
    tried("one of two processes frozen")


def test_killed_process_ends_the_others_with_one_sentence(children, folder, tried):
    options = ["train", *OPTIONS, "--iterations", 100_000, "--log-every", 1, "--output", folder / "run"]
    ranks = start_ranks(children, options, options)
    ranks[0].wait_for("step 4/")
    ranks[1].kill()
    assert ranks[0].wait() == 1, ranks[0].output
    assert "another process of the run" in error_of(ranks[0])
    tried("one of two processes killed, and the message of the other one")
