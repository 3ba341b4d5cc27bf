"""The script benchmarks/optimizer_step.py at a reduced size."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "optimizer_step.py"


def test_script_measures_the_share_of_a_step():
    command = [sys.executable, SCRIPT, "--images", "4", "--rounds", "2", "--widths", "4", "4", "4", "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    first, *rows = done.stdout.splitlines()
    assert first.startswith("air, bfloat16, 4 images, n = 2 rounds")
    assert [row.split()[0] for row in rows] == ["CNN", "cosine"]
    assert all(re.search(r"[\d.]+% of a training step \([\d.]+% to [\d.]+%\)$", row) for row in rows), rows
