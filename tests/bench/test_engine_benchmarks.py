"""The scripts engine_choice, passes, profile_step and small_maps in benchmarks: what they measure, not how long."""

import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import spherenet as sn
from spherenet.kernels import library

SCRIPTS = Path(__file__).parents[2] / "benchmarks"

pytestmark = pytest.mark.skipif(not library.available(), reason="needs the native kernels")


@pytest.fixture
def load(monkeypatch):
    """Import a script with command-line arguments; torch keeps its number of threads."""
    threads = torch.get_num_threads()

    def imported(name, *arguments):
        monkeypatch.setattr("sys.argv", [name, *arguments])
        spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
        script = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(script)
        return script

    yield imported
    torch.set_num_threads(threads)


def test_both_layers_of_the_choice_compute_the_same(load):
    script = load("engine_choice")
    shape = next(script.shapes(quick=True))
    with sn.convolution("winograd"):
        runs = script.runs_of(shape, False, torch.channels_last)
        expected, out = runs["torch"](), runs["ours"]()
    assert not torch.equal(out, expected)  # another algorithm
    assert (out - expected).abs().max() < 1e-5 * expected.abs().max()
    assert all(value > 0 for value in script.ratios(runs, 0))


@pytest.mark.parametrize(("ratio", "violations"), [(0.9, 0), (1.1, 2)])
def test_choices_above_the_limit_are_counted(load, monkeypatch, capsys, ratio, violations):
    script = load("engine_choice", "--threads", "1", "--quick")
    served = (128, 64, 64, 8)
    assert script.is_served(served, torch.channels_last)
    unserved = (1, 16, 16, 4)
    assert not script.is_served(unserved, torch.channels_last)
    monkeypatch.setattr(script, "shapes", lambda quick: [served, unserved])
    monkeypatch.setattr(script, "ratios", lambda runs, seconds: (ratio, ratio, ratio))
    script.main()
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"2 measurements with 1 threads: {violations} above 1.03"  # forward, forward + backward


def test_quick_shapes_are_a_part_of_all(load):
    script = load("engine_choice")
    quick, full = list(script.shapes(True)), list(script.shapes(False))
    assert len(quick) < len(full)
    assert all(batch * filters * size * size <= script.LARGEST for batch, _, filters, size in full)


@pytest.mark.parametrize("kernel", [0, 1, 3])
def test_passes_prints_a_share_per_operator(load, monkeypatch, capsys, kernel):
    script = load("passes", "--threads", "1", "--repeats", "2", "--kernel", str(kernel))
    monkeypatch.setitem(script.SHAPES, kernel, ((2, 8, 4 if kernel else 0),))
    script.main()
    out = capsys.readouterr().out
    assert re.search(r"^8 to 8 channels, (4x4, )?batch 2$", out, re.MULTILINE)
    shares = re.findall(r"^  (cosine|linear|sigmoid) +forward +-?\d+\.\d+ \( *-?\d+%\)", out, re.MULTILINE)
    assert shares == ["cosine", "linear", "sigmoid"]  # a busy machine decides how large the shares are


def test_profile_of_calls_names_the_functions_of_the_library(load, monkeypatch, capsys):
    size = ("--widths", "8", "8", "8", "--size", "8", "--batch-size", "2", "--threads", "1")
    script = load("profile_step", "cosine", "--steps", "2", "--calls", *size)
    for module in (script.native, script.winograd):  # the script replaces them
        monkeypatch.setattr(module, "load", module.load)
    script.main()
    out = capsys.readouterr().out
    assert "n = 2" in out
    for name in ("unit_weight", "forward", "backward"):
        assert re.search(rf" ms  {name}$", out, re.MULTILINE)


def test_small_maps_prints_a_ratio_per_operator_and_algorithm(load, monkeypatch, capsys):
    script = load("small_maps", "--threads", "1", "--rounds", "2")
    small = replace(script.SMALL, widths=(8, 8, 8), batch_size=2, size=8)
    monkeypatch.setattr(script, "SMALL", small)
    script.main()
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split()[0] for row in rows] == ["auto", "direct"]
    assert all(len(re.findall(r"\d\.\d\d \(\d+\.\d\d to \d+\.\d\d\)", row)) == len(script.OPERATORS) for row in rows)
