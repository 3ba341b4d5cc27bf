"""Every example runs with small settings, is short, documents its command and prints its results."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))
MEAN_AND_SPREAD = re.compile(r"(\d+\.\d+|\d+) ± +(\d+\.\d+|\d+)")


@pytest.fixture
def run(capsys, monkeypatch):
    """Return a function that runs an example in this process, where warnings are errors, and returns its lines."""

    def run_here(name, options=""):
        monkeypatch.setattr(sys, "argv", [name, *options.split()])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        printed = capsys.readouterr()
        assert not printed.err
        return printed.out.splitlines()

    return run_here


def means(line):
    """Return the means in a line; each is followed by its spread."""
    return [float(mean) for mean, _ in MEAN_AND_SPREAD.findall(line)]


def named(lines, names):
    """Return the means of each line by the name at its start; every name occurs once, in this order."""
    by_length = sorted(names, key=len, reverse=True)
    starts = [next((name for name in by_length if line.startswith(name)), None) for line in lines]
    assert starts == list(names), lines
    return {name: means(line) for name, line in zip(starts, lines, strict=True)}


def test_all_examples_are_tested():
    tested = set(re.findall(r'"(\w+\.py)"', Path(__file__).read_text()))
    assert set(SCRIPTS) <= tested


@pytest.mark.parametrize("name", SCRIPTS)
def test_example_documents_its_command(name):
    text = (EXAMPLES / name).read_text()
    docstring = text.split('"""')[1]
    assert re.search(rf"^    python examples/{name} .*(on one core|alone)$", docstring, re.MULTILINE)
    assert re.search(r"minute|second", docstring)


@pytest.mark.parametrize("name", SCRIPTS)
def test_docs_list_the_command(name):
    page = (EXAMPLES.parent / "docs/examples.md").read_text()
    assert f"python examples/{name}" in page


def test_swap_a_layer(run):
    header, *rows = run("swap_a_layer.py", "--iterations 12 --seeds 2")
    assert "12 iterations, n = 2 seeds" in header
    accuracies = named(rows, ["Conv2d", "SphereConv2d"])
    assert all(len(row) == 4 for row in accuracies.values())
    bright, *dim = accuracies["SphereConv2d"]
    assert bright > 20  # chance is 10
    assert dim == pytest.approx([bright] * 3, abs=1.0)  # only eps depends on the brightness


def test_convert_a_model(run):
    lines = run("convert_a_model.py", "--iterations 20 --seeds 2")
    table, accuracies = lines[: lines.index("")], lines[-4:]
    assert sum("converted from Conv2d" in line for line in table) == 8
    assert sum("skipped by rule '0.downsample'" in line for line in table) == 1
    assert "8 sphere, 2 plain" in lines[len(table) + 1]
    accuracy = named(accuracies, ["plain", "converted", "converted, trained", "plain, trained again"])
    assert accuracy["converted, trained"][0] > accuracy["converted"][0]
    assert accuracy["plain, trained again"][0] > accuracy["plain"][0] > 10


def test_small_batches(run):
    header, *rows = run("small_batches.py", "--images 400 --batches 2 --seeds 2")
    assert header == "test accuracy %, 400 images seen, n = 2 seeds"
    names = ["no normalization", "BatchNorm", "SphereNorm"]
    accuracy = named([row.removeprefix("batch 2    ") for row in rows], names)
    assert accuracy["SphereNorm"][0] > accuracy["BatchNorm"][0] + 10


def test_retrieval(run):
    header, *rows = run("retrieval.py", "--iterations 12 --seeds 2")
    assert "1600 images of unseen classes" in header
    assert 80 < float(rows[0].removeprefix("pixels")) < 100
    recalls = named(rows[1:], ["CNN", "SphereNet", "SphereNet + GA"])
    assert all(60 < recall < 100 for (recall,) in recalls.values())  # chance is 25


def test_face_margins(run):
    header, *rows = run("face_margins.py", "--iterations 4 --seeds 2")
    assert "20% wrong labels, n = 2 seeds" in header
    names = ["softmax", "arcface", "adaface", "magface", "curricularface", "elasticface", "subcenter-arcface"]
    rates = named(rows, [*names, "uniface"])
    assert all(5 < rate < 50 for (rate,) in rates.values())  # chance is 50


def test_pairs(run):
    header, *rows = run("pairs.py", "--iterations 6 --seeds 2")
    assert "6 iterations, n = 2 seeds" in header
    results = named(rows, ["SupCon", "prototypical", "simplex", "NT-Xent", "SigLIP", "alignment, uniformity"])
    for recall, within, between in results.values():
        assert 30 < recall <= 100  # chance is 25
        assert 0 < within < 110
        assert 95 < between < 107  # 101.5 is a simplex of six classes


def test_two_processes_take_the_same_steps_as_one(run):
    """Run both commands of the docstring; the losses differ by rounding."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run(
        [*launcher, EXAMPLES / "multi_process.py", "--iterations", "4"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    two, one = result.stdout.splitlines(), run("multi_process.py", "--iterations 4")
    assert two[-1].startswith("processes: 2, ")
    assert two[-1].endswith("difference of weights 0")
    assert re.fullmatch(r"processes: 1, test accuracy \d+\.\d %, difference of weights 0", one[-1])
    losses = [[float(re.search(r"loss (\S+)", line)[1]) for line in lines[:-1]] for lines in (two, one)]
    assert len(losses[0]) == 5  # four rows of training metrics, one of test metrics
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)


def test_sharded_retrieval():
    """Two processes with divided class weights learn an embedding of new identities."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run(
        [*launcher, EXAMPLES / "sharded_retrieval.py", "--identities", "500", "--iterations", "60"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    header, *rows = result.stdout.splitlines()
    assert header == "500 identities, 2 processes with equal parts of the class weights"
    pattern = r"(numbers|network) +TPR@FPR 1 % +(\d+\.\d) %, EER +(\d+\.\d) %"
    (_, tpr, error), (_, tpr_of_network, error_of_network) = [re.fullmatch(pattern, row).groups() for row in rows]
    assert float(tpr_of_network) > 1.5 * float(tpr)
    assert float(error_of_network) < 0.8 * float(error) < 40


def test_estimators(run):
    header, *rows = run("estimators.py", "--data wine --folds 2 --repetitions 1")
    assert header == "wine: 178 samples, 13 features; accuracy %, n = 2 folds"
    angles = ("cosine", "linear", "sigmoid")
    logistic, svc = ([f"  {name} {angle}" for angle in angles] for name in ("SphereLogisticRegression", "SphereSVC"))
    accuracies = named(rows, ["  LogisticRegression", *logistic, "  LinearSVC", *svc])
    assert all(85 < accuracy <= 100 for (accuracy,) in accuracies.values())


def test_sequences(run):
    header, *rows = run("sequences.py", "--length 8 --iterations 12 --seeds 2")
    assert "8 steps, 12 iterations, n = 2 seeds" in header
    errors = named(rows, ["LSTM", "SphereLSTM", "GRU", "SphereGRU"])
    for first, *_, last in errors.values():
        assert 0 < last < first
    assert all("never, never" in row for row in rows)


def test_characters(run):
    header, *rows = run("characters.py", "--steps 20 --seeds 2")
    assert header == "loss per held-out character; 20 steps, rates 0.01 and 0.003, n = 2 seeds"
    losses = named(rows[:2], ["SphereGPT", "plain"])
    for first, *_, last in losses.values():
        assert 2 < last < first < 4.7  # chance is ln 103 = 4.63
    pattern = r"loss (\d\.\d{3}): SphereGPT after (\d+) steps, plain after (\d+)"
    for goal, *steps in (re.fullmatch(pattern, row).groups() for row in rows[2:]):
        assert 2 < float(goal) < 4.7
        # The goal is the loss at the end of one of them, which the last step, with learning rate 0, does not change.
        assert 19 <= max(map(int, steps)) <= 20
        assert min(map(int, steps)) >= 1
    assert len(rows) == 4


def test_magnitudes(run):
    header, *rows = run("magnitudes.py", "--iterations 10 --seeds 2")
    assert header.endswith("n = 2 seeds")
    measured = named(rows, ["plain", "MP"])
    assert measured["MP"][0] == pytest.approx(1, abs=0.2)
    assert all(accuracy > 20 for *_, accuracy in measured.values())  # chance is 10


def test_reinforcement(run):
    pytest.importorskip("gymnasium")
    header, *rows = run("reinforcement.py", "--updates 4 --seeds 2")
    assert "4 updates, n = 2 seeds" in header
    by_policy = named(rows, ["plain", "SphereNet"])
    assert all(8 < length < 100 for lengths in by_policy.values() for length in lengths)
    assert all(len(row.split(":")[1].split()) == 2 for row in rows)
    for row, lengths in zip(rows, by_policy.values(), strict=True):
        by_seed = [float(length) for length in row.split(":")[1].split()]
        assert sum(by_seed) / 2 == pytest.approx(lengths[3], abs=1)
