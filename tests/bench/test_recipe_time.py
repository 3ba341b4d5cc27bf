"""The script benchmarks/recipe_time.py at a reduced size."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "recipe_time.py"


def test_script_adds_steps_and_evaluations_up():
    command = [sys.executable, SCRIPT, "--images", "4", "--rounds", "2", "--widths", "4", "4", "4", "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    first, _, *rows = done.stdout.splitlines()
    assert first.startswith("air, bfloat16, steps of 4 images, n = 2 rounds")
    assert [row.split(":")[0] for row in rows] == ["CNN", "cosine", "cosine"]
    form = r"step [\d.]+ s \(.*\), of which the optimizer [\d.]+% \(.*\); run [\d.]+ min \([\d.]+ min to [\d.]+ min\)$"
    assert all(re.search(form, row) for row in rows[:2]), rows
    assert re.search(r"run [\d.]+ \([\d.]+ to [\d.]+\) of the CNN's$", rows[2])
