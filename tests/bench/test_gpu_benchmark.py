"""The script benchmarks/gpu.py on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def test_gpu_benchmark_runs_on_a_cpu(tmp_path):
    output = tmp_path / "gpu.json"
    command = [sys.executable, SCRIPT, "--smoke", "--device", "cpu", "--output", output, "--operators", "cosine",
               "learnable", "--ways", "eager", "compiled", "graphs"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    table = json.loads(output.read_text())
    assert {"processor", "torch", "triton", "cuda", "batch_size"} <= set(table["environment"])
    rows = {(row["precision"], row["way"], row["network"]): row for row in table["rows"]}
    assert len(rows) == 2 * 3 * 3
    for (_, way, network), row in rows.items():
        assert ("error" in row) == (way == "graphs"), row
        if way != "graphs":
            assert row["milliseconds"]["median"] > 0
            assert row["ratio"]["median"] == 1 or network != "cnn"
    assert "learnable" in done.stdout
