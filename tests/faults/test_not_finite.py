"""A loss or gradient that is NaN or infinite: the run stops at that step and says all, or leaves the step out."""

import random
import re

import pytest

from faults.children import OPTIONS
from faults.folders import assert_no_temporaries, assert_same_run, assert_same_tensors, rows, tensors_of
from faults.scale import FAULTY_STEPS, SOAK
from faults.small_sets import SMALL10, SMALL100, binary_files, pickled_files, write_folder
from spherenet.runs import RunDirectory
from spherenet.runs.checkpoints import load_checkpoint

POINT = 6
EVERY_STEP = ["--log-every", "1", "--checkpoint-every", "1"]
KINDS = [("loss", "nan"), ("loss", "inf"), ("gradient", "nan"), ("gradient", "inf"), ("loss", "-inf")]


def steps():
    """The first step, the last one, and some between; each with a kind of fault."""
    between = random.Random(0).sample(range(1, 13), 12) * 2
    chosen = [0, 13, *between][:FAULTY_STEPS]
    return [(step, *KINDS[number % len(KINDS)]) for number, step in enumerate(chosen)]


@pytest.mark.parametrize(("step", "where", "value"), steps())
def test_it_stops_at_that_step_and_says_all(children, whole, folder, tried, step, where, value):
    run = folder / "run"
    poison = {"steps": [step], "where": where, "value": value}
    done = children.run("train", *OPTIONS, *EVERY_STEP, "--output", run, poison=poison)
    assert done.code == 1, done.said
    assert "Traceback" not in done.said
    last = done.said.strip().splitlines()[-1]
    rate = "0.001" if step < 7 else "0.0001" if step < 12 else "1e-05"
    words = rf"the (loss|gradient) is not finite at step {step} \(.*learning rate {rate}, .*pictures \d+, "
    assert re.search(words, last), last
    fault = rows(run)[-1]
    assert (fault["split"], fault["step"], fault["learning_rate"]) == ("fault", step, pytest.approx(float(rate)))
    assert len(set(fault["indices"])) == 32
    assert_no_temporaries(run)
    found, complaints = RunDirectory(run).checkpoints.newest()
    assert complaints == []
    assert (0 if found is None else found.step) == step
    assert found is None or all(tensor.isfinite().all() for tensor in found.tensors["model"].values())
    assert children.run("train", "--resume", run).code == 0  # whatever it was is gone
    assert_same_run(run, whole(*EVERY_STEP))
    tried(f"a {where} of {value} at some step, the first and the last included")


MODES = [
    ("loss", "nan", "float32"),
    ("gradient", "inf", "bfloat16"),
    ("loss", "inf", "float32"),
    ("gradient", "nan", "float32"),
]


@pytest.mark.parametrize(("where", "value", "precision"), MODES if SOAK else MODES[:2])
def test_steps_are_skipped(children, folder, tried, where, value, precision):
    """No trace of them in weights, running means or optimiser; and a kill between changes nothing."""
    poison = {"steps": [0, 5, 6, 13], "where": where, "value": value}
    options = [*OPTIONS, "--on-nan", "skip", "--precision", precision]
    whole, run = folder / "whole", folder / "run"
    assert children.run("train", *options, "--output", whole, poison=poison).code == 0
    # A quantity that only counts steps says how many were made.
    newest = load_checkpoint(RunDirectory(whole).checkpoints.paths()[-1])
    assert newest.state["progress"]["skipped"] == 4
    assert {int(value) for name, value in newest.tensors["optimizer"].items() if name.startswith("step/")} == {10}
    assert {int(value) for name, value in newest.tensors["model"].items() if "num_batches" in name} == {10}
    assert all(tensor.isfinite().all() for tensor in newest.tensors["model"].values())
    assert children.run("train", *options, "--output", run, poison=poison, die_at_step={"step": 7}).code == -9
    assert children.run("train", "--resume", run, poison=poison).code == 0
    assert_same_run(run, whole)
    tried("--on-nan skip: four steps of a run left out", 4)


def test_steps_are_skipped_in_float16(children, folder, tried):
    done = children.run(
        "train", *OPTIONS, "--on-nan", "skip", "--precision", "float16", "--output", folder / "run",
        poison={"steps": [5]},
    )  # fmt: skip
    assert done.code == 0, done.said
    tried("--on-nan skip in float16")


def test_a_run_in_which_every_step_is_skipped(children, folder, tried):
    """It is no success: the weights are those it started with."""
    run = folder / "run"
    done = children.run(
        "train", *OPTIONS, "--on-nan", "skip", "--output", run, poison={"steps": list(range(14))}
    )  # fmt: skip
    assert done.code == 1, done.said
    assert "is not finite at step 13, as in the 13 steps before it" in done.said
    assert "Traceback" not in done.said
    assert not RunDirectory(run).finished
    checkpoints = [load_checkpoint(path).tensors["model"] for path in RunDirectory(run).checkpoints.paths()]
    assert_same_tensors(checkpoints[0], checkpoints[1])
    tried("--on-nan skip: every step of a run left out", 14)


@pytest.mark.parametrize("precision", ["float16", "float32"])
def test_skips_without_end_are_a_failure(children, folder, tried, precision):
    """In float16 it is the scaler that leaves steps out; they count, too."""
    run = folder / "run"
    options = ["--iterations", 60, "--on-nan", "skip", "--precision", precision, "--output", run]
    done = children.run("train", *OPTIONS, *options, poison={"steps": list(range(3, 60)), "where": "gradient"})
    assert done.code == 1, done.said
    assert "is not finite at step 27, as in the 24 steps before it" in done.said
    assert not RunDirectory(run).finished
    found, _ = RunDirectory(run).checkpoints.newest()
    assert found.state["progress"]["skipped"] == found.step - 3
    tried("gradients that are not finite without end")


def test_the_scalers_skips_are_counted(children, folder, tried):
    run = folder / "run"
    poison = {"steps": [4, 7], "where": "gradient", "value": "inf"}
    done = children.run("train", *OPTIONS, "--precision", "float16", "--output", run, poison=poison)
    assert done.code == 0, done.said
    assert [row for row in rows(run) if row["split"] == "train"][-1]["skipped"] == 2
    tried("steps that the scaler left out, in the metrics")


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_weights_that_are_not_finite_are_never_saved(children, folder, tried, policy):
    """The loss and the gradient are finite; the step is not."""
    run = folder / "run"
    options = ["--learning-rate", "1e37", "--optimizer", "sgd", "--weight-decay", "1e10", "--on-nan", policy]
    done = children.run("train", *OPTIONS, *options, "--checkpoint-every", 1, "--output", run)
    assert done.code == 1, done.said
    assert "not finite" in done.said
    assert not RunDirectory(run).finished
    for name, tensor in tensors_of(run).items():
        assert tensor.isfinite().all(), name
    tried("weights that are not finite after a finite gradient")


def test_two_processes_stop_together(children, folder, tried):
    """One of them meets the fault; both leave with code 1, and the checkpoint before it is whole."""
    run = folder / "run"
    ranks = children.start_ranks(
        "train", *OPTIONS, *EVERY_STEP, "--output", run, faults={1: {"poison": {"steps": [5], "where": "loss"}}}
    )
    assert [rank.wait() for rank in ranks] == [1, 1], [rank.said for rank in ranks]
    assert "is not finite at step 5" in ranks[0].said
    assert list(tensors_of(run))[-1].startswith(("step-00000005", "best"))
    tried("a loss of nan in one of two processes")


LABELS = {"one too many": 10, "255": 255}


@pytest.mark.parametrize("case", LABELS)
@pytest.mark.parametrize("form", [SMALL10, SMALL100], ids=lambda form: form.name)
@pytest.mark.parametrize("pickled", [False, True])
def test_labels_out_of_range_are_refused_at_load(children, folder, tried, case, form, pickled):
    label = LABELS[case] if form is SMALL10 else LABELS[case] + 90
    if pickled:
        import pickle

        files, kind = pickled_files(form), form.python_folder
        name = next(iter(form.train))
        batch = pickle.loads(files[name])
        batch[form.label_key.encode()][7] = label
        files[name] = pickle.dumps(batch, protocol=2)
    else:
        files, kind = binary_files(form), form.binary_folder
        name = f"{next(iter(form.train))}.bin"
        record = 3072 + form.label_bytes
        data = bytearray(files[name])
        data[7 * record + form.label_bytes - 1] = min(label, 255)
        files[name] = bytes(data)
    write_folder(folder / "data" / kind, files)
    options = ["--data", form.name, "--data-dir", folder / "data", "--download", "false"]
    done = children.run("train", *OPTIONS, *options, "--output", folder / "run", small_sets=True)
    assert done.code == 2, done.said
    assert f"gives picture 7 the label {label if pickled else min(label, 255)}" in done.said
    assert not (folder / "run").exists()
    tried("a label out of range in a data file")
