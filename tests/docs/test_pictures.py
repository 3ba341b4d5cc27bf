"""The committed pictures are what the code draws: the quick ones are drawn again and compared, curve by curve."""

import importlib.util
import re

import pytest

from command_line import spherenet
from docs.pages import DOCS

IMAGES = DOCS / "images"


def curves(path):
    """All coordinates of all paths; the text around them may differ between versions of matplotlib."""
    return [float(n) for d in re.findall(r' d="([^"]*)"', path.read_text()) for n in re.findall(r"-?\d+\.?\d*", d)]


@pytest.mark.parametrize("name", ["operators", "findings"])
def test_scripts(name, tmp_path):
    spec = importlib.util.spec_from_file_location(name, IMAGES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(tmp_path / "drawn.svg")
    drawn, committed = curves(tmp_path / "drawn.svg"), curves(IMAGES / f"{name}.svg")
    assert len(drawn) > 100
    assert drawn == pytest.approx(committed, abs=0.01)


@pytest.mark.parametrize(
    ("picture", "command"),
    [("margins.svg", ["operators", "--m", "4"]), ("colour.svg", ["colour"])],
    ids=["margins", "colour"],
)
def test_theory(picture, command, tmp_path):
    assert spherenet("theory", *command, "-o", tmp_path / picture) == 0
    drawn, committed = curves(tmp_path / picture), curves(IMAGES / picture)
    assert len(drawn) > 1000
    assert drawn == pytest.approx(committed, abs=0.05)
