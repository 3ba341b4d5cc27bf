"""The walk of one layer through the package: short, and as CONTRIBUTING.md lists it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = "from layer_walk import *; calls = walk(); print(as_markdown(calls)); print(*counts(calls))"


def test_walk_is_short_and_its_list_is_current():
    """In a new process, in which no other test has replaced a function."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, cwd=ROOT / "tools", timeout=120)
    assert done.returncode == 0, done.stderr
    *lines, numbers = done.stdout.strip().splitlines()
    calls, functions, files, changes = map(int, numbers.split())
    assert (calls <= 26, functions <= 16, files <= 5, changes <= 8) == (True,) * 4, numbers
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert "\n".join(lines) in page, "run python tools/layer_walk.py --write CONTRIBUTING.md"
