"""The walk of one layer through the package is the one that CONTRIBUTING.md lists."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = "from layer_walk import *; calls = walk(); print(as_markdown(calls)); print(*counts(calls))"


def test_list_of_the_walk_is_current():
    """In a new process, in which no other test has replaced a function."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, cwd=ROOT / "tools", timeout=240)
    assert done.returncode == 0, done.stderr
    *lines, numbers = done.stdout.strip().splitlines()
    assert int(numbers.split()[0]) > 10
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert "\n".join(lines) in page, "run python tools/layer_walk.py --write CONTRIBUTING.md"
