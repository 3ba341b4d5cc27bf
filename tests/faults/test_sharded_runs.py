"""Runs whose weights are divided among processes: equal to others, and as robust against lost processes and full disks.

The head is sharded by class, the backbone by FSDP, and checkpoints are written by all processes.
"""

import json
import shutil
import signal

import pytest
import torch

from command_line import one_sentence
from faults.children import OPTIONS
from faults.folders import (
    assert_no_temporaries,
    assert_same_run,
    assert_same_tensors,
    assert_valid,
    newest_step,
    rows,
    tensors_of,
)
from faults.fork_server import few_digits
from faults.scale import PATIENCE, SOAK
from faults.test_torchrun import Job
from spherenet.export import load_model
from spherenet.runs import RunDirectory
from spherenet.runs.checkpoints import load_checkpoint
from spherenet.training import Processes, evaluate
from spherenet.training.saved_runs import load_run

POINT = 18
SHARDED = (*OPTIONS, "--shard-head", "--sharding", "fsdp", "--batch-size", 33, "--set", "keep_norms=true",
           "--loss", "w-linear", "--eval-batch-size", 33)  # fmt: skip
in_a_soak = pytest.mark.skipif(not SOAK, reason="starts more processes: only in make soak")


def run_ranks(children, *arguments, world=2, codes=None, **options):
    ranks = children.start_ranks("train", *arguments, world=world, **options)
    ended = [rank.wait(PATIENCE) for rank in ranks]
    assert ended == (codes or [0] * world), [rank.output for rank in ranks]
    return ranks


def error_of(child):
    lines = [line for line in child.output.strip().splitlines() if line.startswith("spherenet train:")]
    assert len(lines) == 1, child.output
    assert "Traceback" not in child.output
    assert one_sentence(lines[0])
    return lines[0]


def assert_close(path, other):
    """Assert that two runs have the same final weights up to rounding."""
    tensors, expected = tensors_of(path), tensors_of(other)
    final = [name for name in expected if name.startswith("step-00000014/")]
    assert final
    for name in final:
        torch.testing.assert_close(tensors[name], expected[name], rtol=1e-3, atol=1e-5)


@pytest.fixture(scope="module")
def sharded(children, place):
    """Return an uninterrupted sharded run of two processes."""
    path = place / "sharded"
    run_ranks(children, *SHARDED, "--output", path)
    return path


@pytest.fixture(scope="module")
def killed(children, place):
    """Return a sharded run of which one process was killed at step 7, and the output of the other one."""
    path = place / "killed"
    faults = {1: {"die_at_step": {"step": 7}}}
    ranks = run_ranks(children, *SHARDED, "--output", path, codes=[1, -9], faults=faults)
    assert "another process of the run ended or did not respond" in error_of(ranks[0])
    return path


def without_sharding(options):
    return [value for value in options if value not in ("--shard-head", "--sharding", "fsdp")]


def assert_same_results(path, other):
    """Assert that two runs have the same final weights and metrics up to rounding."""
    assert_close(path, other)
    for row, expected in zip(rows(path), rows(other), strict=True):
        assert (row["step"], row["split"]) == (expected["step"], expected["split"])
        if "loss" in row:
            assert row["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        if row["split"] == "probes":
            assert row["weight_norm"] == pytest.approx(expected["weight_norm"], rel=1e-3)


def test_sharded_run_equals_copies_of_the_weights(children, sharded, folder, tried):
    """Weights divided by FSDP with a sharded head, and copies of DDP with a sharded head."""
    options = without_sharding(SHARDED)
    run_ranks(children, *options, "--output", folder / "copies")
    assert_same_results(sharded, folder / "copies")
    run_ranks(children, *options, "--shard-head", "--output", folder / "head")
    assert_same_results(folder / "head", folder / "copies")
    tried("a sharded run compared with an unsharded one", times=2)


OTHER = {
    "a k for all layers": ["--operator", "learnable:k_sharing=network", "--sharding", "fsdp"],
    "SGD, micro-batches": ["--optimizer", "sgd", "--accumulate", 2, "--shard-head"],
    "AdamW, hsdp": ["--optimizer", "adamw", "--sharding", "hsdp", "--loss", "sphereface2", "--shard-head"],
}


@pytest.mark.parametrize("name", OTHER if SOAK else list(OTHER)[:2])
def test_other_options_equal_copies_of_the_weights(children, folder, tried, name):
    options = [*OPTIONS, "--batch-size", 33, *OTHER[name]]
    run_ranks(children, *options, "--output", folder / "sharded")
    plain = [value for value in options if value not in ("--shard-head", "--sharding", "fsdp", "hsdp")]
    run_ranks(children, *plain, "--output", folder / "copies")
    assert_same_results(folder / "sharded", folder / "copies")
    tried("a sharded run compared with an unsharded one")


@in_a_soak
def test_sampled_classes(children, folder, tried):
    options = [*OPTIONS, "--shard-head", "--sample-rate", 0.5, "--output", folder / "run"]
    run_ranks(children, *options)
    tried("a run with sampled classes")


def test_checkpoints_of_all_processes_are_one_model(children, sharded, folder, tried):
    """A single process evaluates, exports and checks the run."""
    assert_valid(sharded)
    checkpoint = RunDirectory(sharded).checkpoints.paths()[-1]
    parts = sorted(file.name for file in checkpoint.glob("*.safetensors"))
    assert [name[:11] for name in parts] == ["shard-00001", "shard-00002"]
    assert json.loads((checkpoint / "manifest.json").read_text()).keys() == {*parts, "state.json"}
    assert not list(checkpoint.glob("*metadata*")), "torch's default metadata are a pickle"
    exported = children.run("export", sharded, folder / "model", "--checkpoint", "last")
    assert exported.code == 0, exported.output
    state, expected = load_model(folder / "model").state_dict(), load_run(sharded, "last").model.state_dict()
    assert state["head.weight"].shape == (10, 256)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in state.items())
    row = [row for row in rows(sharded) if row["split"] == "test"][-1]
    processes = Processes(0, 1, torch.device("cpu"))
    result = evaluate(load_run(sharded, "last").model, few_digits().test, 10, processes)
    assert result.accuracy == row["accuracy"]
    assert result.loss == pytest.approx(row["loss"], rel=1e-5)
    tried("a distributed checkpoint read by one process")


def test_killed_process_and_resumed_run(children, sharded, killed, folder, tried):
    """The resumed run is bit-identical to an uninterrupted one."""
    run = shutil.copytree(killed, folder / "run")
    assert_valid(run)
    assert newest_step(run) == 6
    run_ranks(children, "--resume", run)
    assert_same_run(run, sharded)
    tried("one of two processes of a sharded run killed, then resumed")


@pytest.mark.parametrize("world", [1, 3] if SOAK else [3])
def test_resumed_with_another_number_of_processes(children, killed, folder, tried, world):
    """With a learning rate of 0 the weights stay those of the checkpoint."""
    run = shutil.copytree(killed, folder / "run")
    before = load_checkpoint(RunDirectory(run).checkpoints.paths()[-1])
    refused = children.start_ranks("train", "--resume", run, world=1)[0]
    assert refused.wait() == 2
    assert "was started with 2 processes, got 1" in error_of(refused)
    ranks = run_ranks(children, "--resume", run, "--allow-changes", "--learning-rate", 0, world=world)
    assert "training from step 6 to 14" in ranks[0].output
    after = load_checkpoint(RunDirectory(run).checkpoints.paths()[-1])
    for name, tensor in before.tensors["model"].items():
        if not name.startswith("features.") or name.endswith("weight"):
            torch.testing.assert_close(after.tensors["model"][name], tensor, rtol=1e-6, atol=1e-6)
    assert after.tensors["optimizer"].keys() == before.tensors["optimizer"].keys()
    assert after.tensors["optimizer"]["step/head.weight"] == 14
    tried("a sharded run resumed with another number of processes")


def test_corrupt_part_is_skipped(children, sharded, killed, folder, tried):
    run = shutil.copytree(killed, folder / "run")
    part = sorted(RunDirectory(run).checkpoints.paths()[-1].glob("shard-00002*"))[0]
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    ranks = run_ranks(children, "--resume", run)
    assert "is corrupt: its SHA-256 differs from the manifest" in ranks[0].output
    assert "training from step 3 to 14" in ranks[0].output
    assert_same_tensors(tensors_of(run), tensors_of(sharded))
    tried("a corrupt part of a distributed checkpoint")


def test_full_disk_of_one_process(children, folder, tried):
    run = folder / "run"
    faults = {1: {"largest_file": {"size": 2000}}}
    ranks = run_ranks(children, *SHARDED, "--output", run, codes=[2, 2], faults=faults)
    messages = [error_of(rank) for rank in ranks]
    assert "could not be written by process 1 (File too large); there is no earlier one." in messages[0]
    assert messages[0] == messages[1]
    assert_no_temporaries(run)
    assert newest_step(run) == -1
    tried("a disk that is full for one process of a sharded run")


def test_resume_with_other_classes_ends_all_processes(children, killed, folder, tried):
    run = shutil.copytree(killed, folder / "run")
    config = json.loads((run / "config.json").read_text())
    config["train"]["widths"] = [4, 4, 6]  # other shapes, as another number of classes has
    (run / "config.json").write_text(json.dumps(config))
    ranks = run_ranks(children, "--resume", run, "--allow-changes", codes=[2, 2])
    messages = [error_of(rank) for rank in ranks]
    assert "the checkpoint of step 6 does not fit the model: it has other shapes of" in messages[0]
    assert messages[0] == messages[1]
    tried("a sharded run resumed with other shapes")


@in_a_soak
def test_killed_worker_of_torchrun_is_restarted(sharded, folder, tried):
    job = Job(*SHARDED, "--output", folder / "run", restarts=2, DIE_AT_STEP="7", DIE_RANK="1")
    assert job.wait() == 0, job.output
    assert "training from step 6 to 14" in job.output
    assert_same_run(folder / "run", sharded)
    tried("a worker of a sharded run under torchrun killed, with restarts")


@in_a_soak
def test_frozen_process_ends_the_others(children, folder, tried):
    options = [*SHARDED, "--iterations", 100_000, "--log-every", 1, "--timeout", 5, "--output", folder / "run"]
    ranks = children.start_ranks("train", *options)
    ranks[0].wait_for("step 4/")
    ranks[1].signal(signal.SIGSTOP)
    try:
        assert ranks[0].wait() == 1, ranks[0].output
        assert "another process of the run" in error_of(ranks[0])
    finally:
        ranks[1].signal(signal.SIGKILL)
        ranks[1].signal(signal.SIGCONT)
        ranks[1].wait()
    assert_valid(folder / "run")
    tried("one of two processes of a sharded run frozen")


@in_a_soak
def test_slow_process_changes_nothing(children, sharded, folder, tried):
    run = folder / "run"
    run_ranks(children, *SHARDED, "--output", run, faults={1: {"slow": {"seconds": 0.5}}})
    assert_same_run(run, sharded)
    tried("a slow process of a sharded run")


@in_a_soak
def test_stop_signal_saves_and_stops(children, folder, tried):
    options = [*SHARDED, "--iterations", 100_000, "--log-every", 1, "--checkpoint-every", 100_000]
    ranks = children.start_ranks("train", *options, "--output", folder / "run")
    ranks[0].wait_for("step 4/")
    ranks[1].signal(signal.SIGTERM)
    assert [rank.wait() for rank in ranks] == [143, 143], [rank.output for rank in ranks]
    assert newest_step(folder / "run") >= 4
    tried("SIGTERM to one process of a sharded run")
