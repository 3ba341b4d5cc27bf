"""Scripts of the folder benchmarks at a reduced size: what they print, not how long it takes."""

import json
import re
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


def printed(script, *arguments):
    """Run a script and return the lines that it prints."""
    command = [sys.executable, SCRIPTS / script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_recipe_time_adds_steps_and_evaluations_up():
    small = ("--images", 4, "--rounds", 2, "--widths", 4, 4, 4, "--threads", 1)
    first, _, *rows = printed("recipe_time.py", *small)
    assert first.startswith("air, bfloat16, steps of 4 images, n = 2 rounds")
    assert [row.split(":")[0] for row in rows] == ["CNN", "cosine", "cosine"]
    form = r"step [\d.]+ s \(.*\), of which the optimizer [\d.]+% \(.*\); run [\d.]+ min \([\d.]+ min to [\d.]+ min\)$"
    assert all(re.search(form, row) for row in rows[:2]), rows
    assert re.search(r"run [\d.]+ \([\d.]+ to [\d.]+\) of the CNN's$", rows[2])


def test_pair_losses_prints_memory_and_time():
    first, *rows = printed("pair_losses.py", "--samples", 256, "--dim", 4, "--losses", "NT-Xent", "prototypical")
    assert first.startswith("256 samples of 4 features")
    assert len(rows) == 2
    assert all(re.search(r" +\d+ MB +[\d.]+ s$", row) for row in rows), rows


def test_gpu_benchmark_runs_on_a_cpu(tmp_path):
    output = tmp_path / "gpu.json"
    choice = ("--operators", "cosine", "learnable", "--ways", "eager", "compiled", "graphs")
    lines = printed("gpu.py", "--smoke", "--device", "cpu", "--output", output, *choice)
    table = json.loads(output.read_text())
    assert {"processor", "torch", "triton", "cuda", "batch_size"} <= set(table["environment"])
    rows = {(row["precision"], row["way"], row["network"]): row for row in table["rows"]}
    assert len(rows) == 2 * 3 * 3
    for (_, way, network), row in rows.items():
        assert ("error" in row) == (way == "graphs"), row
        if way != "graphs":
            assert row["milliseconds"]["median"] > 0
            assert row["ratio"]["median"] == 1 or network != "cnn"
    assert any("learnable" in line for line in lines)
