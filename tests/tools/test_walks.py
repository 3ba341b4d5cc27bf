"""The walks of one batch and of one layer in CONTRIBUTING.md are those that the scripts in tools measure."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "batch_walk.py"

LAYER = "from layer_walk import *; calls = walk(); print(as_markdown(calls)); print(*counts(calls))"

qualified = pytest.mark.skipif(sys.version_info < (3, 11), reason="code objects have no qualified names")


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("batch_walk", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def functions(tool):
    """Return the measured walk; another process, so that nothing is cached."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, TOOL, "--json"], capture_output=True, text=True, timeout=240, env=environment
    )
    assert result.returncode == 0, result.stderr
    return [tool.Function(*entry) for entry in json.loads(result.stdout)["walk"]]


@qualified
def test_list_in_contributing_is_the_measured_walk(tool, functions):
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert page == tool.replace_list(page, functions), "run python tools/batch_walk.py --write CONTRIBUTING.md"


@qualified
def test_walk_leads_from_the_command_line_to_the_metrics(functions):
    assert functions[0].file == "cli/main.py"
    assert ("runs/metrics.py", "MetricsFile.append") in functions
    assert any(function.file.startswith("angles/") or function.file.startswith("kernels/") for function in functions)


def test_list_is_grouped_by_file(tool):
    functions = [tool.Function("a.py", "f"), tool.Function("a.py", "g"), tool.Function("b.py", "h")]
    assert tool.as_markdown(functions) == "1. `a.py`: `f`, `g`\n2. `b.py`: `h`\n\n3 functions in 2 files."


def test_page_without_markers_is_rejected(tool):
    with pytest.raises(SystemExit, match="must contain the lines"):
        tool.replace_list("# Contributing\n", [])


def test_list_of_a_layer_is_the_measured_walk():
    """In a new process, in which no other test has replaced a function."""
    done = subprocess.run(
        [sys.executable, "-c", LAYER], capture_output=True, text=True, cwd=ROOT / "tools", timeout=240
    )
    assert done.returncode == 0, done.stderr
    *lines, numbers = done.stdout.strip().splitlines()
    assert int(numbers.split()[0]) > 10
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert "\n".join(lines) in page, "run python tools/layer_walk.py --write CONTRIBUTING.md"
