"""Committed figures are up to date: those that can be drawn quickly are drawn again and compared."""

import importlib.util
import re

import pytest

from command_line import spherenet
from docs.pages import DOCS

IMAGES = DOCS / "images"


def curves(path):
    """Return the coordinates of all paths; other text can differ between versions of matplotlib."""
    return [float(n) for d in re.findall(r' d="([^"]*)"', path.read_text()) for n in re.findall(r"-?\d+\.?\d*", d)]


@pytest.mark.parametrize("name", ["operators", "findings"])
def test_figure_of_script_is_up_to_date(name, tmp_path):
    spec = importlib.util.spec_from_file_location(name, IMAGES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(tmp_path / "drawn.svg")
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


def test_architecture_is_up_to_date(tmp_path):
    spec = importlib.util.spec_from_file_location("architecture", IMAGES / "architecture.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert {name for layer in module.import_layers() for name in layer} == set(module.SUMMARIES)
    module.main(tmp_path / "drawn.svg")
    assert (tmp_path / "drawn.svg").read_text() == (IMAGES / "architecture.svg").read_text()
