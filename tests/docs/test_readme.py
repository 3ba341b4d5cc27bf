"""The README's code runs, and its picture is what the code draws."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_block_runs(block):
    exec(compile(block, "README.md", "exec"), {})


def test_readme_shows_code():
    assert BLOCKS


def test_operator_picture_is_what_the_code_draws(tmp_path):
    script = ROOT / "docs/images/operators.py"
    spec = importlib.util.spec_from_file_location("operators", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(tmp_path / "operators.svg")

    def curves(path):
        """All coordinates of all paths; the text around them may differ between versions of matplotlib."""
        return [float(n) for d in re.findall(r' d="([^"]*)"', path.read_text()) for n in re.findall(r"-?\d+\.?\d*", d)]

    drawn, committed = curves(tmp_path / "operators.svg"), curves(script.with_suffix(".svg"))
    assert drawn == pytest.approx(committed, abs=0.01)
