"""A loss or gradient that is NaN or infinite stops the run at that step, or the step is skipped."""

import random
import re

import pytest

from faults.children import OPTIONS
from faults.folders import assert_no_temporaries, assert_same_run, assert_same_tensors, rows, tensors_of
from faults.scale import FAULTY_STEPS, SOAK
from faults.small_sets import SMALL10, SMALL100, binary_files, write_folder
from spherenet.runs import RunDirectory
from spherenet.runs.checkpoints import load_checkpoint

POINT = 6
EVERY_STEP = ["--log-every", "1", "--checkpoint-every", "1"]
FAULTS = [("loss", "nan"), ("loss", "inf"), ("gradient", "nan"), ("gradient", "inf"), ("loss", "-inf")]


def steps():
    """Return (step, where, value) for the first step, the last one and some between."""
    between = random.Random(0).sample(range(1, 13), 12) * 2
    chosen = [0, 13, *between][:FAULTY_STEPS]
    return [(step, *FAULTS[number % len(FAULTS)]) for number, step in enumerate(chosen)]


@pytest.mark.parametrize(("step", "where", "value"), steps())
def test_fault_stops_the_run_with_step_and_images(children, uninterrupted, folder, tried, step, where, value):
    run = folder / "run"
    poison = {"steps": [step], "where": where, "value": value}
    done = children.run("train", *OPTIONS, *EVERY_STEP, "--output", run, poison=poison)
    assert done.code == 1, done.output
    assert "Traceback" not in done.output
    last = done.output.strip().splitlines()[-1]
    rate = "0.001" if step < 7 else "0.0001" if step < 12 else "1e-05"
    message = rf"the (loss|gradient) is not finite at step {step} \(.*learning rate {rate}, .*images \d+, "
    assert re.search(message, last), last
    fault = rows(run)[-1]
    assert (fault["split"], fault["step"], fault["learning_rate"]) == ("fault", step, pytest.approx(float(rate)))
    assert len(set(fault["indices"])) == 32
    assert_no_temporaries(run)
    checkpoint, errors = RunDirectory(run).checkpoints.newest()
    assert errors == []
    assert (0 if checkpoint is None else checkpoint.step) == step
    assert checkpoint is None or all(tensor.isfinite().all() for tensor in checkpoint.tensors["model"].values())
    assert children.run("train", "--resume", run).code == 0  # without the fault
    assert_same_run(run, uninterrupted(*EVERY_STEP))
    tried(f"a {where} of {value} at some step, the first and the last included")


MODES = [
    ("loss", "nan", "float32"),
    ("gradient", "inf", "bfloat16"),
    ("loss", "inf", "float32"),
    ("gradient", "nan", "float32"),
]


@pytest.mark.parametrize(("where", "value", "precision"), MODES if SOAK else MODES[:2])
def test_skipped_steps_do_not_change_the_run(children, folder, tried, where, value, precision):
    """They change neither weights, running means nor optimizer, also if the run is killed and resumed between them."""
    poison = {"steps": [0, 5, 6, 13], "where": where, "value": value}
    options = [*OPTIONS, "--on-nan", "skip", "--precision", precision]
    expected, run = folder / "expected", folder / "run"
    assert children.run("train", *options, "--output", expected, poison=poison).code == 0
    # Step counters of the optimizer and BatchNorm.
    newest = load_checkpoint(RunDirectory(expected).checkpoints.paths()[-1])
    assert newest.state["progress"]["skipped"] == 4
    assert {int(value) for name, value in newest.tensors["optimizer"].items() if name.startswith("step/")} == {10}
    assert {int(value) for name, value in newest.tensors["model"].items() if "num_batches" in name} == {10}
    assert all(tensor.isfinite().all() for tensor in newest.tensors["model"].values())
    assert children.run("train", *options, "--output", run, poison=poison, die_at_step={"step": 7}).code == -9
    assert children.run("train", "--resume", run, poison=poison).code == 0
    assert_same_run(run, expected)
    tried("--on-nan skip: four steps of a run left out", 4)


def test_steps_can_be_skipped_in_float16(children, folder, tried):
    done = children.run(
        "train", *OPTIONS, "--on-nan", "skip", "--precision", "float16", "--output", folder / "run",
        poison={"steps": [5]},
    )  # fmt: skip
    assert done.code == 0, done.output
    tried("--on-nan skip in float16")


def test_run_with_all_steps_skipped_is_an_error(children, folder, tried):
    """The weights are the initial ones."""
    run = folder / "run"
    done = children.run(
        "train", *OPTIONS, "--on-nan", "skip", "--output", run, poison={"steps": list(range(14))}
    )  # fmt: skip
    assert done.code == 1, done.output
    assert "is not finite at step 13, as in the 13 steps before it" in done.output
    assert "Traceback" not in done.output
    assert not RunDirectory(run).finished
    checkpoints = [load_checkpoint(path).tensors["model"] for path in RunDirectory(run).checkpoints.paths()]
    assert_same_tensors(checkpoints[0], checkpoints[1])
    tried("--on-nan skip: every step of a run left out", 14)


@pytest.mark.parametrize("precision", ["float16", "float32"])
def test_too_many_skipped_steps_are_an_error(children, folder, tried, precision):
    """In float16 the scaler skips the steps; they count too."""
    run = folder / "run"
    options = ["--iterations", 60, "--on-nan", "skip", "--precision", precision, "--output", run]
    done = children.run("train", *OPTIONS, *options, poison={"steps": list(range(3, 60)), "where": "gradient"})
    assert done.code == 1, done.output
    assert "is not finite at step 27, as in the 24 steps before it" in done.output
    assert not RunDirectory(run).finished
    checkpoint, _ = RunDirectory(run).checkpoints.newest()
    assert checkpoint.state["progress"]["skipped"] == checkpoint.step - 3
    tried("gradients that are not finite without end")


def test_steps_skipped_by_the_scaler_are_counted(children, folder, tried):
    run = folder / "run"
    poison = {"steps": [4, 7], "where": "gradient", "value": "inf"}
    done = children.run("train", *OPTIONS, "--precision", "float16", "--output", run, poison=poison)
    assert done.code == 0, done.output
    assert [row for row in rows(run) if row["split"] == "train"][-1]["skipped"] == 2
    tried("steps that the scaler skipped, in the metrics")


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_weights_that_are_not_finite_are_never_saved(children, folder, tried, policy):
    """Loss and gradient are finite, but the updated weights are not."""
    run = folder / "run"
    options = ["--learning-rate", "1e37", "--optimizer", "sgd", "--weight-decay", "1e10", "--on-nan", policy]
    done = children.run("train", *OPTIONS, *options, "--checkpoint-every", 1, "--output", run)
    assert done.code == 1, done.output
    assert "not finite" in done.output
    assert not RunDirectory(run).finished
    for name, tensor in tensors_of(run).items():
        assert tensor.isfinite().all(), name
    tried("weights that are not finite after a finite gradient")


def test_optimizer_state_that_is_not_finite_is_never_saved(children, folder, tried):
    """The squared gradient overflows. Adam then divides by infinity, and the weights never change."""
    run = folder / "run"
    done = children.run("train", *OPTIONS, "--weight-decay", "1e38", "--checkpoint-every", 1, "--output", run)
    assert done.code == 1, done.output
    assert "optimizer state are not finite after step 1 (first: exp_avg_sq/" in done.output
    assert tensors_of(run) == {}
    tried("an optimizer state that is not finite after a finite gradient")


def test_fault_in_one_process_stops_both(children, folder, tried):
    """The fault is in one of them. Both end with code 1, and the checkpoint before it is valid."""
    run = folder / "run"
    ranks = children.start_ranks(
        "train", *OPTIONS, *EVERY_STEP, "--output", run, faults={1: {"poison": {"steps": [5], "where": "loss"}}}
    )
    assert [rank.wait() for rank in ranks] == [1, 1], [rank.output for rank in ranks]
    assert "is not finite at step 5" in ranks[0].output
    assert list(tensors_of(run))[-1].startswith(("step-00000005", "best"))
    tried("a loss of nan in one of two processes")


LABELS = {"one too many": 10, "255": 255}


@pytest.mark.parametrize("case", LABELS)
@pytest.mark.parametrize("form", [SMALL10, SMALL100], ids=lambda form: form.name)
def test_label_out_of_range_is_rejected_when_it_is_read(children, folder, tried, case, form):
    label = LABELS[case] if form is SMALL10 else min(LABELS[case] + 90, 255)
    files = binary_files(form)
    name = f"{next(iter(form.train))}.bin"
    data = bytearray(files[name])
    data[7 * (3072 + form.label_bytes) + form.label_bytes - 1] = label
    files[name] = bytes(data)
    write_folder(folder / "data" / form.binary_folder, files)
    options = ["--data", form.name, "--data-dir", folder / "data", "--no-download"]
    done = children.run("train", *OPTIONS, *options, "--output", folder / "run", small_sets=True)
    assert done.code == 2, done.output
    assert f"got {label} for image 7" in done.output
    assert not (folder / "run").exists()
    tried("a label out of range in a data file")
