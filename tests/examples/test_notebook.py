"""The quickstart notebook: its cells run from top to bottom, and it names the extra of a missing package."""

import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


@pytest.fixture(scope="module")
def cells():
    content = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    return content["cells"]


def run(cells):
    """Run the code cells as one program and return its variables and output. Warnings are errors, as in all tests."""
    variables, printed = {"__name__": "__main__"}, io.StringIO()
    with redirect_stdout(printed):
        for number, cell in enumerate(cells):
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), f"cell {number}", "exec"), variables)
    return variables, printed.getvalue()


def test_notebook_is_stored_without_output(cells):
    """Output depends on the machine, and is written when it is run."""
    assert len({cell["id"] for cell in cells}) == len(cells)
    assert {cell["cell_type"] for cell in cells} == {"markdown", "code"}
    stored = [(cell["outputs"], cell["execution_count"]) for cell in cells if cell["cell_type"] == "code"]
    assert stored == [([], None)] * len(stored)
    assert cells[0]["source"][0].startswith("# ")


def test_notebook_runs_from_top_to_bottom(cells, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    monkeypatch.setattr(pyplot, "show", lambda: None)
    variables, printed = run(cells)
    pyplot.close("all")
    bright, dim = variables["results"][1.0], variables["results"][0.25]
    assert min(bright.values()) > 0.8  # 120 steps are enough for digits; chance is 0.1
    assert dim["SphereNet"] > dim["CNN"]
    assert printed.endswith("the loaded model gives the same scores\n")


def test_missing_package_is_named_with_its_extra(cells, monkeypatch):
    (plotting,) = [cell for cell in cells if "matplotlib" in "".join(cell["source"]) and cell["cell_type"] == "code"]
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run([plotting])[1] == "matplotlib is not installed: pip install 'spherenet-torch[plot]'.\n"
