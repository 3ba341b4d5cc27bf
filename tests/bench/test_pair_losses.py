"""The script benchmarks/pair_losses.py at a reduced size."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "pair_losses.py"


def test_script_measures_losses():
    command = [sys.executable, SCRIPT, "--samples", "256", "--dim", "4", "--losses", "NT-Xent", "prototypical"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    first, *rows = done.stdout.splitlines()
    assert first.startswith("256 samples of 4 features")
    assert len(rows) == 2
    assert all(re.search(r" +\d+ MB +[\d.]+ s$", row) for row in rows), rows
