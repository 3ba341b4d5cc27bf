"""Committed figures are up to date: those that can be drawn quickly are drawn again and compared."""

import importlib.util
import re
from statistics import fmean

import pytest

from command_line import spherenet
from docs.pages import DOCS
from spherenet_paper.experiments.evidence import PROTOCOL

IMAGES = DOCS / "images"


def curves(path):
    """Return the coordinates of all paths; other text can differ between versions of matplotlib."""
    return [float(n) for d in re.findall(r' d="([^"]*)"', path.read_text()) for n in re.findall(r"-?\d+\.?\d*", d)]


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, IMAGES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name", ["architecture", "operators", "findings", "optimizers", "small_batches", "protocol", "deep"]
)
def test_figure_of_script_is_up_to_date(name, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(IMAGES)  # a script may import the one beside it
    load_script(name).main(tmp_path / "drawn.svg")
    drawn, committed = curves(tmp_path / "drawn.svg"), curves(IMAGES / f"{name}.svg")
    assert len(drawn) > 100
    assert drawn == pytest.approx(committed, abs=0.01)


@pytest.mark.parametrize(
    ("figure", "command"),
    [("margins.svg", ["operators", "--m", "4"]), ("color.svg", ["color"])],
    ids=["margins", "color"],
)
def test_figure_of_theory_command_is_up_to_date(figure, command, tmp_path):
    assert spherenet("theory", *command, "-o", tmp_path / figure) == 0
    drawn, committed = curves(tmp_path / figure), curves(IMAGES / figure)
    assert len(drawn) > 1000
    assert drawn == pytest.approx(committed, abs=0.05)


def test_curves_of_the_authors_have_the_averages_of_the_experiment():
    curves, logs = load_script("protocol").read_authors_logs(), PROTOCOL.logs
    assert curves.keys() == logs.accuracies.keys()
    for cell, averages in logs.accuracies.items():
        for name, average in zip(("training", "lagging"), averages, strict=True):
            curve = curves[cell][name]
            # Each is a mean over 1,000 iterations, the first after iteration 1,000.
            values = [v for s, v in zip(curve.steps, curve.values, strict=True) if logs.first <= s <= logs.last]
            assert len(values) == 4
            assert round(100 * fmean(values), 1) == average
